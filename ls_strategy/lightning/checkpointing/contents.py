"""Contents of Lightning's checkpoints, which no rank ever holds in full.

::

    trainer.save_checkpoint     dump_checkpoint collects stand-ins for what is sharded     `Collection`
                                strategy.save_checkpoint writes                            `write`, `write_file`
    trainer.fit(ckpt_path)      strategy.load_checkpoint: small values and lazy tensors    `read`, `map_file`
                                strategy.load_model_state_dict, load_optimizer_state_dict: each rank reads its part
"""

from __future__ import annotations

import copy
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.serialization import get_crc32_options
from typing_extensions import override

from ls_strategy._torch import tree_iter, tree_map
from ls_strategy.checkpoint import save
from ls_strategy.checkpoint.background import BackgroundSaver
from ls_strategy.checkpoint.describe import verify_all
from ls_strategy.checkpoint.history import HISTORY
from ls_strategy.checkpoint.manifest import Manifest, verify
from ls_strategy.checkpoint.place import CheckpointPath
from ls_strategy.checkpoint.random import random_states
from ls_strategy.checkpoint.reshard import Contents, Source, assemble, separate
from ls_strategy.checkpoint.source import (
    OURS,
    RANDOM,
    VERSIONS,
    open_folder,
    refuse_damaged,
    versions_of,
    with_versions,
)
from ls_strategy.checkpoint.target import META, check_replaceable
from ls_strategy.checkpoint.web import as_on_disk, is_web, refuse_web_folder
from ls_strategy.distributed.comm import Comm
from ls_strategy.engine import Engine
from ls_strategy.errors import CheckpointError, LSError
from ls_strategy.extensions import find_all
from ls_strategy.host.fabric import CheckpointIO, TorchCheckpointIO
from ls_strategy.host.pytorch import rank_zero_info
from ls_strategy.lightning._private import plain_checkpoint_io
from ls_strategy.meta_init.lazy import LazyTensor
from ls_strategy.zero.flat.flat_buffer import FlatBuffer

CHECKSUMS = "checksums"
"""Whether a file has checksums of its records; below `OURS`."""


class Collection:
    """The contents of a checkpoint folder while ``trainer.save_checkpoint`` collects them."""

    def __init__(self, engine: Engine, *, frozen: bool) -> None:
        """``frozen``: include parameters that do not train."""
        self.engine = engine
        for flat in engine.flats:
            flat.wait_updated()
        self.contents = Contents()
        self.left_out: list[str] = []
        self.versions: dict[str, Any] | None = None
        """Of the modules whose weights were collected, as in torch's state dicts."""
        self._frozen = frozen

    def weights(self, raw: dict[str, Any], masters: list[Tensor] | None = None) -> dict[str, Any]:
        """Return stand-ins for the parameters in ``raw``, a ``module.state_dict()``; or for ``masters`` instead."""
        weights, left_out = self.contents.weights(raw, self.engine.units, masters=masters, frozen=self._frozen)
        if masters is None:
            self.left_out, self.versions = left_out, versions_of(raw)
        return weights

    def optimizer_state(self, index: int) -> dict[str, Any]:
        """Return the part of the optimizer's state that this rank has, by parameter name."""
        return self.engine.optimizers[index].sharded.states.named_state(self._state)

    def _state(self, flat: FlatBuffer, slot: int, read: Callable[[int, int], Tensor], dtype: torch.dtype) -> Tensor:
        return self.contents.stand_in(Source(flat, slot, read, guarded=True), dtype)


class FileCollection(Collection):
    """The contents of a file that all ranks write together. Every rank has the same stand-ins, in the same order."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, frozen=True)

    @override
    def weights(self, raw: dict[str, Any], masters: list[Tensor] | None = None) -> dict[str, Any]:
        """Return stand-ins as a folder has them. Other tensors are on the CPU, and have no history of autograd."""
        weights = super().weights(raw, masters)
        others = (k for k, v in weights.items() if isinstance(v, Tensor) and id(v) not in self.contents.sources)
        return with_versions({**weights, **{k: weights[k].detach().cpu() for k in others}}, versions_of(raw))

    @override
    def optimizer_state(self, index: int) -> dict[str, Any]:
        """Return the optimizer's state as torch numbers it."""
        return self.engine.optimizers[index].sharded.states.numbered_state(self._state)


@dataclass(frozen=True)
class Background:
    """Settings of a save that runs while training goes on."""

    saver: BackgroundSaver
    target: save.SaveTarget = field(default_factory=save.SaveTarget)
    failed: Callable[[CheckpointError], None] | None = None
    """Gets the error of a save that must not end the run."""

    waits: bool = False
    """Whether the caller waits for the end, so that training does not go on meanwhile."""


def write(
    collection: Collection,
    checkpoint: dict[str, Any],
    path: str,
    checkpoint_io: CheckpointIO,
    storage_options: Any,
    background: Background | None = None,
    random: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint folder; with ``background``, return when training can no longer change it. Collective.

    Raises:
        CheckpointError: on every rank, if any rank failed; with ``background``, if the save before this one failed.
    """
    engine = collection.engine
    entries, rest = separate(checkpoint, collection.contents)
    layout = {**_layout(engine), HISTORY: checkpoint.get(OURS, {}).get(HISTORY)}
    if collection.versions is not None:
        rest[OURS] = {**rest.get(OURS, {}), VERSIONS: {name: dict(own) for name, own in collection.versions.items()}}
    job = save.Save(
        path=path,
        entries=entries,
        random=random_states() if random is None else random,
        manifest=Manifest(
            step=int(checkpoint.get("global_step", 0)),
            epoch=int(checkpoint.get("epoch", 0)),
            layout={name: value for name, value in layout.items() if value is not None},
            files={},
            left_out=collection.left_out,
        ),
        names=collection.contents.names,
        writes=partial(_writes, engine),
        write_meta=partial(_write_meta, plain_checkpoint_io(checkpoint_io), rest, storage_options),
        target=save.SaveTarget() if background is None else background.target,
    )
    _run(job, engine.mesh.world.rank, engine.mesh.world.exchange_objects, background)


def _run(
    job: save.Save | save.SharedFileSave | save.FileSave,
    rank: int,
    exchange: save.ReportExchange,
    background: Background | None,
) -> None:
    """Run a save, or begin it in the background, and report its end. Collective."""
    started = time.perf_counter()

    def done(total: int, seconds: float) -> None:
        if background is not None and background.failed is not None:
            return  # whoever handles failures reports
        in_background = background is not None and not background.waits
        stalled = f", {stall:.1f} s of it blocked training" if in_background else ""
        rank_zero_info(f"ZeROStrategy: saved {job.path} ({total / 2**20:,.1f} MiB in {seconds:.1f} s{stalled})")

    if background is None:
        done(*save.run(job, rank, exchange))
        return
    stall = 0.0
    background.saver.submit(job, done, background.failed)
    stall = time.perf_counter() - started


def with_full_modules(checkpoint: dict[str, Any], engine: Engine) -> dict[str, Any]:
    """Return the checkpoint with copies of modules with sharded parameters, as in hyperparameters that are modules.

    Collective if there are any, which is the same on all ranks. Rank 0, which writes the copies, makes them; other
    ranks get None.
    """
    small = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    modules = [leaf for leaf in tree_iter(small) if isinstance(leaf, nn.Module)]
    wanted = [p for module in modules for p in module.parameters()]
    held = {id(p) for flat in engine.flats for p in flat.params}
    if not engine.gatherer.releases or held.isdisjoint(map(id, wanted)):
        return checkpoint
    with engine.gathered(wanted):
        try:
            copies = copy.deepcopy(modules) if engine.mesh.world.rank == 0 else [None] * len(modules)
        except Exception:  # of the module: the save raises it again, on all ranks
            return checkpoint
    found = {id(module): copied for module, copied in zip(modules, copies, strict=True)}
    return {**checkpoint, **tree_map(lambda leaf: found.get(id(leaf), leaf), small)}


def write_together(
    collection: FileCollection,
    checkpoint: dict[str, Any],
    path: str,
    background: Background | None,
    random: dict[str, Any],
) -> None:
    """Write one file, of what was collected every rank its part. Collective.

    Raises:
        CheckpointError: as `write_file` does.
    """
    world = collection.engine.mesh.world
    _add_random(checkpoint, world.rank, world.exchange_objects(random), checksums=True)
    job = save.SharedFileSave(path, checkpoint, collection.contents.entries())
    _run(job, world.rank, world.exchange_objects, background)


def write_file(
    checkpoint: dict[str, Any],
    path: str,
    checkpoint_io: CheckpointIO,
    storage_options: Any,
    comm: Comm | None,
    random: dict[str, Any] | None = None,
    background: Background | None = None,
) -> None:
    """Write what was gathered on rank 0, and every rank's random states, to one file. Collective.

    With Lightning's own `CheckpointIO` on a file system, the file gets its name when it is on the disk. With
    ``background``, return when training can no longer change what is written.

    Raises:
        CheckpointError: on every rank, if rank 0 could not write it; earlier checkpoints are untouched. With
            ``background``, if the save before this one failed.
    """
    rank, exchange = (0, _alone) if comm is None else (comm.rank, comm.exchange_objects)
    states = exchange(random_states() if random is None else random)
    _add_random(checkpoint, rank, states, checksums=is_lightnings(checkpoint_io) and get_crc32_options())
    job = save.FileSave(path, checkpoint, partial(_write_one, path, checkpoint_io, storage_options))
    _run(job, rank, exchange, background)


def _add_random(checkpoint: dict[str, Any], rank: int, states: Sequence[Any], *, checksums: bool) -> None:
    """Add all ranks' random states to a file, on rank 0, and whether its records have checksums."""
    if rank == 0 and "optimizer_states" in checkpoint:  # otherwise it cannot be resumed from
        ours = checkpoint.setdefault(OURS, {})
        ours[RANDOM] = {f"rank_{number}": state for number, state in enumerate(states)}
        ours[CHECKSUMS] = checksums


def _alone(value: Any) -> list[Any]:
    return [value]


def _write_one(path: str, checkpoint_io: CheckpointIO, storage_options: Any, checkpoint: dict[str, Any]) -> int:
    """Write one file and return its bytes. One rank only."""
    place = CheckpointPath(path)
    if not is_lightnings(checkpoint_io) or storage_options is not None:
        checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)  # type: ignore[call-arg]
    elif place.local or place.fs.isdir(place.path):  # a folder has this name, which the file must not lie beside
        save.run_file(path, checkpoint)
    else:
        check_replaceable(path)
        checkpoint_io.save_checkpoint(checkpoint, path)
    return place.parent.size(place.name) or 0


def is_lightnings(checkpoint_io: CheckpointIO) -> bool:
    """Return whether this is Lightning's own plugin, which writes files with ``torch.save``, and not the user's."""
    return type(checkpoint_io) is TorchCheckpointIO


def _writes(engine: Engine, path: tuple[str, ...]) -> bool:
    """Return whether this rank writes a value that is not sharded.

    Rank 0 writes all of them, except for buffers in the blocks of another pipeline stage, which that stage's first rank
    writes.
    """
    own = engine.share.blocks
    in_blocks = path[0] == "model" and path[1].startswith(engine.share.all_blocks)
    return engine.mesh.stage.rank == 0 and (path[1].startswith(own) if in_blocks else engine.mesh.world.rank == 0)


def _layout(engine: Engine) -> dict[str, Any]:
    config = engine.config
    optimizer, parameters = config.offload.tier_of("optimizer"), config.offload.tier_of("parameters")
    return {
        "world_size": engine.mesh.world.world_size,
        "parallel.tensor.size": engine.mesh.shape.tensor,
        "parallel.context": engine.mesh.shape.sequence,
        "parallel.pipeline.size": engine.mesh.shape.pipeline,
        "parallel.expert": engine.mesh.shape.expert,
        "stage": config.stage,
        "offload.optimizer": optimizer.tier if optimizer else "device",
        "offload.parameters": parameters.tier if parameters else "device",
        "precision": engine.precision.name,
        "precision.moments": config.precision.moments,
    }


def _write_meta(checkpoint_io: CheckpointIO, rest: dict[str, Any], storage_options: Any, path: str) -> None:
    if storage_options is None or isinstance(checkpoint_io, TorchCheckpointIO):
        checkpoint_io.save_checkpoint(rest, path)
    else:
        checkpoint_io.save_checkpoint(rest, path, storage_options)


# --- loading ---------------------------------------------------------------------------------------------------------


def load(
    path: Any, checkpoint_io: CheckpointIO, weights_only: bool | None, load_file: Callable[..., Any], comm: Comm
) -> tuple[Any, bool]:
    """Return a checkpoint, and whether it is a folder, whose tensors are lazy. Collective.

    ``load_file(path, weights_only=...)`` is Lightning's own way to read a file.

    Raises:
        CheckpointError: the folder is not committed, or damaged; or rank 0 finds that the file is.
    """
    if is_folder(path):
        return comm.on_all_ranks(partial(read, path, checkpoint_io, weights_only)), True
    weights_only = as_on_disk(path, weights_only)
    checkpoint = read_file(path, checkpoint_io, weights_only, partial(load_file, path, weights_only=weights_only))
    comm.on_all_ranks(partial(_verify_file, path, checkpoint) if comm.rank == 0 else lambda: None)
    return checkpoint, False


def is_folder(path: Any) -> bool:
    """Return whether a checkpoint path is a folder, committed or not. Not collective.

    Raises:
        CheckpointError: it is a folder on a web server.
    """
    if is_web(path):
        refuse_web_folder(path)
        return False
    place = CheckpointPath(path)
    return bool(place.fs.isdir(place.path))


def read_file(
    path: Any, checkpoint_io: CheckpointIO, weights_only: bool | None, load: Callable[[], Any], *, mapped: bool = True
) -> Any:
    """Read a single-file checkpoint, mapped if it can be, else by ``load``. Not collective.

    Raises:
        CheckpointError: ``torch.save`` did not write the file, or it is damaged.
    """
    try:
        found = map_file(path, checkpoint_io, weights_only) if mapped else None
        return load() if found is None else found
    except LSError:
        raise
    except Exception as error:  # of any kind: a damaged pickle may do anything that a pickle can
        place = CheckpointPath(path)
        if is_lightnings(checkpoint_io) and place.local and place.exists():
            refuse_damaged(str(place), place.path, error)
        raise


def map_file(path: Any, checkpoint_io: CheckpointIO, weights_only: bool | None) -> dict[str, Any] | None:
    """Map a single-file checkpoint, so that all ranks of a host share one copy of its tensors. Not collective.

    Returns:
        None if it cannot be mapped: a remote file, another format, a `CheckpointIO` of the user.
    """
    place = CheckpointPath(path)
    if not is_lightnings(checkpoint_io) or not place.local:
        return None
    try:
        with place.open_itself() as file:
            mappable = zipfile.is_zipfile(file)
    except OSError:  # Lightning's own error follows
        return None
    if not mappable:
        return None
    return torch.load(place.path, map_location="cpu", mmap=True, weights_only=weights_only)


def _verify_file(path: Any, checkpoint: Any) -> None:
    """Compare a file of this package with its checksums, which torch does not. Reads it in full. One rank only.

    Raises:
        CheckpointError: it is damaged.
    """
    if isinstance(checkpoint, dict) and (checkpoint.get(OURS) or {}).get(CHECKSUMS) and CheckpointPath(path).local:
        broken = verify_all(path)
        if broken:
            raise CheckpointError(broken[0])


def read(path: Any, checkpoint_io: CheckpointIO, weights_only: bool | None) -> dict[str, Any]:
    """Return a Lightning checkpoint from a folder: small values are read now, tensors when they are used.

    Raises:
        CheckpointError: the folder is not a committed checkpoint, or damaged.
    """
    for read_if_theirs in find_all("checkpoint_reader"):
        theirs = read_if_theirs(path, weights_only=weights_only)
        if theirs is not None:
            return {**theirs, OURS: {"left_out": []}}
    reader, manifest = open_folder(path)
    if manifest is not None:
        verify(path, META, manifest.files[META])
    meta = plain_checkpoint_io(checkpoint_io).load_checkpoint(f"{reader.place}/{META}", weights_only=weights_only)
    checkpoint = assemble(reader, meta, weights_only=True if weights_only is None else weights_only)
    ours = checkpoint.setdefault(OURS, {})
    ours["left_out"] = manifest.left_out if manifest is not None else []
    checkpoint["state_dict"] = with_versions(checkpoint["state_dict"], ours.pop(VERSIONS, None))
    return checkpoint


def load_optimizers(engine: Engine, indices: list[int | None], states: Sequence[Mapping[str, Any]]) -> None:
    """Give every optimizer the states of its parameters by name, whichever optimizers they were saved from.

    If a parameter was in several optimizers, the one at the same position counts.
    """
    for position, index in enumerate(indices):
        if index is None:
            continue
        own: Mapping[str, Any] = states[position] if position < len(states) else {"param_groups": []}
        by_name: dict[str, Any] = {}
        groups: list[dict[str, Any]] = []
        for state in [*(s for s in states if s is not own), own]:
            by_name.update(state.get("state", {}))
            groups += state["param_groups"]
        for name in {name for group in own["param_groups"] for name in group["params"]} - own.get("state", {}).keys():
            by_name.pop(name, None)  # it had no state there, even if it had one elsewhere
        sharded = engine.optimizers[index].sharded
        entries = {key: tree_map(_in_memory, v) for key, v in own.items() if key not in ("state", "param_groups")}
        if not sharded.states.load_named_state(by_name, groups, entries):
            rank_zero_info(
                f"ZeROStrategy: {type(sharded.optimizer).__name__} has other parameter groups than the checkpoint's "
                "optimizers. States were loaded by parameter name; learning rates and other settings stay as "
                "configure_optimizers set them."
            )


def _in_memory(value: Any) -> Any:
    return value.materialize() if isinstance(value, LazyTensor) else value


def is_named(states: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether optimizer states are keyed by parameter name, as in folders, and not by position."""
    return any(isinstance(p, str) for state in states for group in state["param_groups"] for p in group["params"])
