"""The strategy as callbacks and modules see it: the values that users read off it.

It has no hook of Lightning: those are in `ls_strategy.lightning.strategy`, whose parts share a `RunState` instead.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ls_strategy.access.gradients import full_gradients, grad_norms
from ls_strategy.access.offload import offload_states
from ls_strategy.access.rounding_error import gather_error, gradient_error
from ls_strategy.access.weights import full_weights
from ls_strategy.config import ZeROConfig
from ls_strategy.distributed.comm import Traffic
from ls_strategy.engine import Engine
from ls_strategy.errors import StateError
from ls_strategy.host.pytorch import DDPStrategy
from ls_strategy.lightning._private import unwrap_optimizer
from ls_strategy.lightning.activation_memory import ActivationMemory
from ls_strategy.lightning.connection import Connection
from ls_strategy.lightning.ranks import PATIENCE_S
from ls_strategy.lightning.run_state import RunState
from ls_strategy.lightning.virtual.ranks import VirtualRanks
from ls_strategy.precision import PrecisionPolicy
from ls_strategy.zero.state_offload import KINDS, StateKind

Part: TypeAlias = nn.Module | nn.Parameter | Iterable[nn.Module | nn.Parameter]
"""A part of a model, as users name it."""


def parameters_of(part: Part) -> list[nn.Parameter]:
    """Return the parameters of a part, each once.

    Raises:
        StateError: it holds something else.
    """
    if isinstance(part, (nn.Module, nn.Parameter)):
        part = [part]
    found: dict[int, nn.Parameter] = {}
    for each in [part] if isinstance(part, (Tensor, str)) else part:
        if not isinstance(each, (nn.Module, nn.Parameter)):
            raise StateError(
                f"Got a {type(each).__name__} for a part of the model, but a part is a module, a parameter, or a list "
                "of both. Pass module.parameters() instead of tensors or names."
            )
        found.update((id(p), p) for p in (each.parameters() if isinstance(each, nn.Module) else [each]))
    return list(found.values())


def _ids(part: Part | None) -> set[int] | None:
    return None if part is None else {id(p) for p in parameters_of(part)}


class EngineStrategy(Connection, DDPStrategy):
    """A strategy with an engine, as callbacks and modules see it through ``trainer.strategy``."""

    _run: RunState
    """What the parts of the strategy share."""

    islands: tuple[int, int] = (0, 1)
    """Number of this group of ranks, and of all that train the same model on other data (`DiLoCo`)."""

    @property
    def config(self) -> ZeROConfig:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Every option, in groups."""
        return self._run.config

    @property
    def engine(self) -> Engine | None:
        """Made in `setup`, for one module on one process group."""
        return self._run.engine

    @engine.setter
    def engine(self, engine: Engine | None) -> None:
        self._run.engine = engine

    @property
    def virtual(self) -> VirtualRanks | None:
        """The virtual ranks of this process."""
        return self._run.virtual

    @virtual.setter
    def virtual(self, virtual: VirtualRanks | None) -> None:
        self._run.virtual = virtual

    @property
    def activations(self) -> ActivationMemory:
        """Recomputes and stores activations."""
        return self._run.activations

    def require_engine(self) -> Engine:
        """Return the engine of the current module.

        Raises:
            StateError: the module is not set up yet.
        """
        return self._run.engine or self._run.require_engine()

    def wait_for_saves(self) -> None:
        """Return when every checkpoint that was saved is committed. Collective.

        Raises:
            CheckpointError: one could not be written.
        """
        raise NotImplementedError

    def all_interrupted(self) -> bool:
        """Return whether an exception ended the same step on every rank, so that all can save together.

        Waits a few seconds for the other ranks.
        """
        complete = self._comm is None or not self._comm.failures.stopped  # else another rank failed alone and has left
        try:
            if self.engine is not None:
                self.engine.check_complete()
        except StateError:
            complete = False  # the others need no message: they do not wait long for this rank
        if self._comm is None or self._comm.world_size == 1:
            return complete
        everyone = complete and self._comm.failures.announce(RuntimeError("interrupted"), patience_s=PATIENCE_S)
        self._alone = not everyone
        return everyone

    def grad_norm(self, norm_type: float = 2.0, *, optimizer: Optimizer | None = None) -> Tensor:
        """Return the global norm of the averaged gradients of one optimizer, or of all, ``()`` fp32. Collective.

        Call it between backward and the next ``zero_grad``, for example in ``on_before_optimizer_step``, which runs
        before clipping.

        Raises:
            StateError: there are no gradients, or the optimizer is not one of the fit's.
        """
        engine = self.require_engine()
        if optimizer is None:
            return engine.grad_norm(None, norm_type)
        index = engine.index_of(unwrap_optimizer(optimizer))
        if index is None:
            raise StateError(
                f"Got a {type(unwrap_optimizer(optimizer)).__name__} for grad_norm(optimizer=...) that "
                "configure_optimizers has not returned. Pass one of trainer.optimizers, or none for the norm of all."
            )
        return engine.grad_norm(index, norm_type)

    def full_weights(
        self, module: nn.Module | None = None, *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield names and full tensors of ``module.state_dict()``, unit by unit, on every rank. Collective.

        For pushing weights into an inference engine: at most two units are in memory besides what the loop keeps.
        Every rank must run the loop to its end. Tied parameters come under each of their names, parts of tensor- and
        expert-parallel parameters are joined, and in a pipeline every rank gets the weights of all stages. Buffers
        come last. The tensors are copies, on the device.

        Args:
            module: a part of the model; names begin there. Default: the LightningModule.
            dtype: of floating-point parameters, cast from the masters. Default: the dtype that the forward reads.

        Raises:
            StateError: only some weights have taken the last step, or they are offloaded by `offload_states`.
        """
        engine = self.require_engine()
        return full_weights(engine, engine.model if module is None else module, dtype)

    def full_gradients(self, part: Part | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield name and full gradient of every parameter: averaged, fp32, in the order of the units. Collective.

        Every rank must run the loop to its end. A unit is gathered by one collective when the loop gets there, and one
        unit is in memory besides what the loop keeps. The numbers are those that the optimizer would get now: without
        the loss scale, and clipped if clipping has run. Changing them changes nothing. Legal from the end of backward
        to ``zero_grad``; in micro-batches before the last they are the average so far.

        With tensor and expert parallelism the parts of a parameter are joined, by a collective for each such parameter.
        In a pipeline a rank gets the parameters of its stage.

        Args:
            part: a module, a parameter, or any number of both. Default: the full model. Parameters without a gradient
                on any rank, and those in no optimizer, are left out.

        Raises:
            StateError: there are no gradients, or their update has begun (offload without a hook before the step).
        """
        return full_gradients(self.require_engine(), _ids(part))

    def grad_norms(self, part: Part | None = None, norm_type: float = 2.0) -> dict[str, Tensor]:
        """Return the norm of each parameter's gradient, ``()`` fp32 by name, on every rank. Collective.

        It is computed from the shards, so nothing is gathered: one number per parameter is sent, all in one
        collective. The gradients, and when this is legal, are as in `full_gradients`; in a pipeline every rank gets the
        norms of all stages.

        Args:
            part: as in `full_gradients`.
            norm_type: order of the norm, positive or ``inf``.

        Raises:
            StateError: there are no gradients, or their update has begun.
        """
        return grad_norms(self.require_engine(), _ids(part), norm_type)

    def gather_error(self) -> float:
        """Return what ``sharding.quantized_gathers`` changes: the norm of the change over that of the weights.

        Collective. 0.005 means that a weight changes by half a percent of the root mean square of all weights.

        Raises:
            StateError: weights are not rounded.
        """
        return gather_error(self.require_engine())

    def gradient_error(self) -> float:
        """Return what ``sharding.quantized_gradients`` changes: the norm of the change over that of the gradients.

        It is measured in all reductions since the last call, and errors of different messages count as independent.
        Collective. 0.01 means that the averaged gradients change by one percent.

        Raises:
            StateError: gradients are not rounded.
        """
        return gradient_error(self.require_engine())

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes of model state on this rank, by kind. Not collective."""
        return self.require_engine().memory_bytes()

    @property
    def traffic(self) -> Traffic:
        """Return the traffic that this rank has sent for sharded states, counted at the send calls."""
        return self.require_engine().comm.traffic

    @property
    def tensor_parallel_traffic(self) -> Traffic:
        """Return the traffic that this rank has sent to its tensor-parallel group."""
        return self.require_engine().mesh.tensor.traffic

    @property
    def context_parallel_traffic(self) -> Traffic:
        """Return the traffic that this rank has sent to its context-parallel group."""
        return self.require_engine().mesh.sequence.traffic

    @property
    def expert_parallel_traffic(self) -> Traffic:
        """Return the traffic that this rank has sent to its expert-parallel group: tokens and their gradients."""
        return self.require_engine().mesh.expert.traffic

    @property
    def data_parallel_size(self) -> int:
        """The number of model replicas, or of virtual ranks; each trains on its own batches."""
        return self._run.data_parallel_size

    @property
    def data_parallel_rank(self) -> int:
        """The model replica that this rank belongs to."""
        return self.parallel.data_rank[0]

    @property
    def loss_scale(self) -> float | None:
        """The current loss scale, None in precisions without one."""
        scaler = self.require_engine().scaler
        return None if scaler is None else scaler.scale

    @property
    def precision_policy(self) -> PrecisionPolicy:
        """The dtypes in force."""
        return self.require_engine().precision

    @property
    def skipped_steps(self) -> int:
        """The number of optimizer steps skipped after an fp16 overflow."""
        return self.require_engine().skipped_steps

    @property
    def exposed_step_s(self) -> float:
        """Seconds that training has waited for updates of offloaded states that computation did not hide."""
        return self.require_engine().exposed_step_s

    @contextmanager
    def gathered_parameters(self, part: Part | None = None, *, modify: bool = False) -> Generator[None, None, None]:
        """Hold full parameters on every rank inside, all at once. Collective.

        This is never needed: reading a parameter gathers it, and writes take effect. It saves time where many
        parameters are used repeatedly, at the cost of their memory. Inside, forwards of the modules given send no
        parameters, so ranks may run them a different number of times, as in a rollout.

        Contexts may be nested, and optimizers may step inside: the next use gathers the new parameters.

        Args:
            part: a module, a parameter, or any number of both. Other parameters in the same flat buffers are gathered
                too; with tensor and expert parallelism this rank's part of each, and in a pipeline those of this
                rank's stage. Default: the full model.
            modify: keep what is written inside; every rank must write the same. Without it a write is an error.

        Raises:
            StateError: something was written without ``modify``; on every rank. Or ``part`` holds neither modules nor
                parameters.
        """
        params = None if part is None else parameters_of(part)
        with self.require_engine().gathered(params, modify=modify):
            yield

    def offload_states(self, *kinds: StateKind) -> int:
        """Free the device's memory of model states for something else, until `reload_states`. Collective.

        For example to an inference engine, between two training steps. The values are copied to pinned host memory,
        and come back bit for bit; tensors and views that user code holds stay valid. States that offload already
        stores in host memory or on NVMe stay there, and without an accelerator nothing is copied. Full parameters that
        are gathered at stage 3 are released, and idle communication buffers are freed.

        Args:
            kinds: any of ``"parameters"``, ``"masters"``, ``"optimizer"`` and ``"gradients"``. None: all of them.
                Without ``"parameters"`` the model can still run forwards, for example a rollout.

        Returns:
            The bytes of device memory that the copies have freed on this rank.

        Raises:
            ConfigError: there is no such kind.
            StateError: later, when something uses what is offloaded: a forward, a backward, a step, a save.
        """
        return offload_states(self.require_engine(), kinds or KINDS)

    def reload_states(self) -> None:
        """Load what `offload_states` has offloaded, with the same bits. Call it on every rank.

        Does nothing if nothing is offloaded. The end of a fit does it, too.
        """
        self.require_engine().state_offload.reload()
