"""``fabric.save`` and ``fabric.load``: the checkpoint folders and files of the Trainer's strategy, with Fabric's keys.

A folder has the layout of a Trainer's: weights under ``state_dict``, optimizers in order under ``optimizer_states``.
What Fabric's program calls them is in the entry `OURS`, so that `load` gives the program its own keys back::

    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 3})
    {"state_dict": ..., "optimizer_states": [...], "fabric": {"step": 3},
     OURS: {"fabric": {"module": "model", "optimizers": ["optimizer"]}}}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ls_strategy.checkpoint.commit import recover
from ls_strategy.checkpoint.full import full_state_dict, load_full_state_dict
from ls_strategy.checkpoint.source import FABRIC, OURS, RANDOM, as_fabric
from ls_strategy.distributed.comm import Comm
from ls_strategy.errors import PlanError
from ls_strategy.fabric.model import Model
from ls_strategy.host.fabric import rank_zero_info
from ls_strategy.lightning.checkpointing import contents
from ls_strategy.lightning.checkpointing.contents import Collection
from ls_strategy.lightning.checkpointing.kind import Kind, kind_of
from ls_strategy.lightning.connection import Connection
from ls_strategy.lightning.parallel import ModelParallel


class Checkpoints:
    """The checkpoints of a strategy's modules."""

    def __init__(
        self,
        strategy: Connection,
        parallel: ModelParallel,
        model_of: Callable[[nn.Module | Optimizer], Model | None],
        convert: Callable[..., dict[str, Any]],
    ) -> None:
        """Serve a strategy.

        Args:
            strategy: has how files are written, and Fabric's barrier.
            parallel: connects the ranks.
            model_of: returns what was set up for a module, or for the module of an optimizer.
            convert: replaces modules and optimizers in a program's state by their states, as Fabric's strategies do.
        """
        self._strategy, self._parallel = strategy, parallel
        self._model_of, self._convert = model_of, convert
        self._collection: Collection | None = None
        """The contents of a checkpoint folder while `save` collects them."""
        self._kind: Kind | None = None
        """The kind of the last checkpoint."""

    @property
    def _comm(self) -> Comm:
        assert self._parallel.world is not None
        return self._parallel.world

    def weights_of(self, module: nn.Module) -> dict[str, Any]:
        """Return full weights on the CPU of rank 0, or stand-ins while a folder is collected. Collective without it."""
        model = self._model_of(module)
        if model is None:
            return module.state_dict()
        raw = model.raw_weights()
        if self._collection is not None:
            return self._collection.weights(raw)
        model.engine.check_complete()
        return full_state_dict(raw, model.engine.units, model.engine.mesh)

    def optimizer_state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer: full, or stand-ins while a folder is collected. Collective without it."""
        model = self._model_of(optimizer)
        index = None if model is None else model.index_of(optimizer)
        if model is None or index is None:
            return optimizer.state_dict()
        if self._collection is not None:
            return self._collection.optimizer_state(index)
        return model.engine.optimizers[index].sharded.states.full_state_dict()

    def load_weights(
        self, module: nn.Module, weights: Mapping[str, Any], *, strict: bool, may_lack: Sequence[str] = ()
    ) -> None:
        """Load full tensors by name into a module, of lazy ones what each rank needs. Collective."""
        model = self._model_of(module)
        if model is None:
            module.load_state_dict(weights, strict=strict)
            return
        model.engine.wait()
        load = partial(
            load_full_state_dict, model.module, weights, model.engine.units, strict=strict, may_lack=may_lack
        )
        self._comm.on_all_ranks(load)

    def _load_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        model = self._model_of(optimizer)
        index = None if model is None else model.index_of(optimizer)
        if model is None or index is None:
            optimizer.load_state_dict(dict(state))
        elif contents.is_named([state]):
            self._comm.on_all_ranks(partial(contents.load_optimizers, model.engine, [index], [state]))
        else:
            states = model.engine.optimizers[index].sharded.states
            self._comm.on_all_ranks(partial(states.load_full_state_dict, dict(state)))

    # saving -----------------------------------------------------------------------------------------------------------

    def save(
        self,
        path: str,
        state: dict[str, Any],
        storage_options: Any,
        filters: dict[str, Callable[[str, Any], bool]],
    ) -> None:
        """Write ``state``, a folder or a file. Collective."""
        modules = [key for key, value in state.items() if isinstance(value, nn.Module) and self._model_of(value)]
        optimizers = [key for key, value in state.items() if isinstance(value, Optimizer) and self._model_of(value)]
        found = (self._model_of(state[key]) for key in (*modules, *optimizers))
        models = list({id(model): model for model in found if model is not None}.values())
        if not models or self._is_file(models):
            self._save_file(path, state, storage_options, filters)
            return
        if len(models) > 1 or len(modules) != 1:
            raise PlanError(
                f"Got {len(modules)} modules and optimizers of {len(models)} for fabric.save, but a checkpoint folder "
                "holds one module that was set up, with its optimizers. Save each module into a folder of its own, or "
                'set checkpoint="file" on the strategy.'
            )
        model = models[0]
        model.engine.check_complete()
        model.engine.wait()
        self._collection = Collection(model.engine, frozen=self._strategy.config.checkpoint.frozen)
        try:
            converted = self._convert(state, filter=filters)
            collection = self._collection
        finally:
            self._collection = None
        checkpoint = {
            "state_dict": converted.pop(modules[0]),
            "optimizer_states": [converted.pop(key) for key in optimizers],
            FABRIC: converted,
            OURS: {FABRIC: {"module": modules[0], "optimizers": optimizers}},
        }
        contents.write(collection, checkpoint, path, self._strategy.checkpoint_io, storage_options)

    def _is_file(self, models: list[Model]) -> bool:
        """Return whether the next checkpoint is a single file rather than a folder. Collective.

        The reason is logged the first time, and whenever the kind changes.
        """
        first, *others = (model.engine for model in models)
        kind, before = kind_of(first, self._comm.exchange_objects, others=others), self._kind
        self._kind = kind
        if kind.why and (before is None or before.is_file != kind.is_file):
            rank_zero_info(str(kind))
        return kind.is_file

    def _save_file(self, path: str, state: dict[str, Any], storage_options: Any, filters: dict[str, Any]) -> None:
        converted = self._convert(state, filter=filters)
        contents.write_file(converted, path, self._strategy.checkpoint_io, storage_options, self._comm)

    # loading ----------------------------------------------------------------------------------------------------------

    def load(
        self,
        path: Any,
        state: nn.Module | Optimizer | dict[str, Any] | None,
        *,
        strict: bool,
        weights_only: bool | None,
    ) -> dict[str, Any]:
        """Restore ``state`` in place and return the rest of the checkpoint. Collective."""
        if self._parallel.is_first:
            recover(path)
        self._strategy.barrier("fabric.load")
        checkpoint, left_out = self._read(path, weights_only)
        if not state:
            return checkpoint
        if isinstance(state, nn.Module):
            weights = checkpoint.get("state_dict", checkpoint) if left_out is not None else checkpoint
            self.load_weights(state, weights, strict=strict, may_lack=left_out or ())
            return {}
        if isinstance(state, Optimizer):
            self._load_optimizer(state, checkpoint)
            return {}
        missing = [key for key in state if key not in checkpoint]
        if strict and missing:
            raise KeyError(
                f"The requested state contains a key {missing[0]!r} that does not exist in the loaded checkpoint. To "
                "disable strict loading, set `strict=False`."
            )
        for key in [key for key in state if key in checkpoint]:  # in order, because loading is collective
            state[key] = self._restored(state[key], checkpoint.pop(key), strict=strict, may_lack=left_out or ())
        return checkpoint

    def _restored(self, value: Any, saved: Any, *, strict: bool, may_lack: Any) -> Any:
        """Return ``value`` with what was saved loaded into it, or what was saved if it has no state. Collective."""
        if isinstance(value, nn.Module):
            self.load_weights(value, saved, strict=strict, may_lack=may_lack)
        elif isinstance(value, Optimizer):
            self._load_optimizer(value, saved)
        elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            value.load_state_dict(saved)
        else:
            return saved
        return value

    def _read(self, path: Any, weights_only: bool | None) -> tuple[dict[str, Any], list[str] | None]:
        """Return a checkpoint under Fabric's keys, and the names of weights it was saved without; None for a file."""
        io = self._strategy.checkpoint_io
        checkpoint, is_folder = contents.load(path, io, weights_only, io.load_checkpoint, self._comm)
        if not is_folder:
            if isinstance(checkpoint, dict):
                checkpoint.pop(OURS, None)
            return checkpoint, None
        left_out = checkpoint.get(OURS, {}).get("left_out", [])
        checkpoint.pop(RANDOM, None)
        return as_fabric(checkpoint), left_out
