"""``Trainer(precision=...)`` for `ZeROStrategy`: autocast, input dtypes, loss scale, gradient clipping."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ls_strategy._torch import run_step_pre_hooks, without_step_pre_hooks
from ls_strategy.checked import checked
from ls_strategy.config import PrecisionConfig
from ls_strategy.errors import ConfigError, PlanError, StateError
from ls_strategy.host.pytorch import GradClipAlgorithmType, Precision
from ls_strategy.lightning import module_state
from ls_strategy.lightning._private import is_mock_optimizer, unwrap_optimizer
from ls_strategy.precision import PRECISIONS, PrecisionPolicy, resolve_precision
from ls_strategy.zero.step.elementwise import ONE_PASS

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from ls_strategy.engine import Engine
    from ls_strategy.loss_scale import LossScaler

_FOREIGN_SCALER_KEYS = ("MixedPrecision", "FSDPPrecision", "native_amp_scaling_state")
"""Where other strategies' checkpoints keep the loss scale."""

_LIGHTNING = ("lightning.", "pytorch_lightning.", "lightning_fabric.")
_EQUIVALENT = (
    "Precision",
    "MixedPrecision",
    "HalfPrecision",
    "DoublePrecision",
    "FSDPPrecision",
    "DeepSpeedPrecision",
)
"""Plugins of Lightning that do what their precision says, and nothing else."""

_CURES = {
    "BitsandbytesPrecision": "For frozen weights in 4 or 8 bits (QLoRA) leave the plugin out, and set "
    "ZeROStrategy(precision=PrecisionConfig(frozen='nf4')).",
    "TransformerEnginePrecision": "For products in fp8 leave the plugin out, and set "
    "ZeROStrategy(precision=PrecisionConfig(matmul='fp8')).",
}
"""What to use instead of plugins that change layers."""


class Result:
    """The closure that an optimizer gets after forward and backward have run: it returns their result, once."""

    def __init__(self, result: Any, name: str) -> None:
        self._result = result
        self._name = name
        self._called = False

    def __call__(self) -> Any:
        """Return the result.

        Raises:
            PlanError: it was returned before.
        """
        if self._called:
            raise PlanError(f"{self._name}.step() calls its closure several times in a step. {ONE_PASS}")
        self._called = True
        return self._result


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Generator[None, None, None]:
    """Set the default dtype of new tensors inside; None keeps the user's."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(before if dtype is None else dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class ShownScaler:
    """What user code finds in the place of Lightning's ``GradScaler``: the loss scale, to be read."""

    def __init__(self, scaler: LossScaler) -> None:
        """Show ``scaler``."""
        self._scaler = scaler

    def get_scale(self) -> float:
        """Return the loss scale."""
        return self._scaler.scale

    def is_enabled(self) -> bool:
        """Return True: without a loss scale, there is no such object."""
        return True

    def scale(self, *_: Any) -> Any:
        """Refuse to take part in a step.

        Raises:
            StateError: always.
        """
        raise StateError(
            "Got a call of precision_plugin.scaler, but ZeROStrategy scales and unscales by itself, so that all ranks "
            "agree on skipping a step. Call self.manual_backward(loss), self.clip_gradients(optimizer, ...) and "
            "optimizer.step(). get_scale() returns the scale."
        )

    unscale_ = step = update = scale


class ZeROPrecision(Precision):
    """Precision plugin of `ZeROStrategy`, which creates it from ``Trainer(precision=...)``.

    Pass one explicitly (``ZeROStrategy(precision_plugin=ZeROPrecision("16-mixed"))``) only to run fp16 on the CPU,
    where the Trainer turns the string ``16-mixed`` into ``bf16-mixed``.
    """

    @checked()
    def __init__(self, precision: str = "32-true") -> None:
        """Check the name.

        Args:
            precision: ``32-true``, ``bf16-mixed``, ``16-mixed``, ``bf16-true``, ``16-true`` or ``64-true``.

        Raises:
            ConfigError: any other name.
        """
        self.policy: PrecisionPolicy = resolve_precision(precision)
        self.precision = precision  # type: ignore[assignment]
        self.engine: Engine | None = None
        self._pending_scaler_state: dict[str, Any] | None = None
        self.on_batch: Callable[[], None] | None = None
        """Called when a batch has been fetched, before any hook sees it."""
        self.around_backward: Callable[[pl.LightningModule], AbstractContextManager[bool]] | None = None
        """Surrounds the user's backward; yields whether that is still to run."""
        self.weight = 1.0
        """Factor in the gradients of the current batch, where ranks have batches of different weight."""

    @classmethod
    def from_plugin(cls, plugin: Precision) -> ZeROPrecision:
        """Return the equivalent of one of Lightning's own plugins.

        Raises:
            ConfigError: there is none: the plugin has another precision, or does what its name does not say.
        """
        if isinstance(plugin, cls):
            return plugin
        kind, name = type(plugin).__name__, str(plugin.precision)
        cure = _CURES.get(kind, "")
        if cure or name not in PRECISIONS:
            raise ConfigError(
                f"Got the precision plugin {kind} (precision={name!r}), but ZeROStrategy supports "
                f"{', '.join(PRECISIONS)}. {cure or 'Set one of these with Trainer(precision=...).'}"
            )
        if isinstance(plugin, ZeROPrecision):
            return cls(name)
        if kind not in _EQUIVALENT or not type(plugin).__module__.startswith(_LIGHTNING):
            raise ConfigError(
                f"Got the precision plugin {kind} (precision={name!r}), a class of your own, but ZeROStrategy puts its "
                f"own plugin in its place, and its methods would not be called. Set Trainer(precision={name!r}), or "
                "derive your class from ls_strategy.ZeROPrecision."
            )
        if kind == "MixedPrecision" and _has_own_scaler(plugin):
            raise ConfigError(
                f"Got {kind}({name!r}, scaler=...), but ZeROStrategy has a loss scale of its own, with which all ranks "
                "agree on skipping a step. Leave the plugin out, and set "
                "ZeROStrategy(precision=PrecisionConfig(loss_scale=LossScaleConfig(initial_power=..., window=...)))."
            )
        return cls(name)

    def asked(self, config: PrecisionConfig) -> PrecisionPolicy:
        """Return the dtypes that this plugin and the options ask for."""
        return resolve_precision(
            str(self.precision), master_weights=config.master_weights, reduce_dtype=config.reduce_dtype
        )

    def attach(self, engine: Engine) -> None:
        """Connect the plugin to the engine; the strategy calls it when the engine is ready."""
        self.engine = engine
        if self._pending_scaler_state is not None:
            self.load_state_dict(self._pending_scaler_state)
            self._pending_scaler_state = None

    @property
    def scaler(self) -> ShownScaler | None:
        """Return the loss scale to user code that reads it, where Lightning's plugin has one; else None."""
        scaler = None if self.engine is None else self.engine.scaler
        return ShownScaler(scaler) if scaler is not None and scaler.is_shown else None

    # dtypes ----------------------------------------------------------------------------------------------------------

    @override
    def tensor_init_context(self) -> AbstractContextManager:
        """Initialise weights unrounded in every mode, because master weights are copied from them."""
        return nullcontext() if self.policy.rounds else _default_dtype(self.policy.cast)

    @override
    def module_init_context(self) -> AbstractContextManager:
        """Return `tensor_init_context`."""
        return self.tensor_init_context()

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert what a module holds besides parameters and buffers, and report the dtype as ``module.dtype``."""
        if self.policy.cast is not None:
            module_state.convert(module, self.policy.cast)
        return module

    @override
    def convert_input(self, data: Any) -> Any:
        """Cast floating-point tensors to the parameters' dtype in the 16-bit ``*-true`` modes and in ``64-true``."""
        if self.on_batch is not None:
            self.on_batch()
        dtype = self.policy.cast
        if dtype is None:
            return data
        return apply_to_collection(data, Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t)

    @override
    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Enter autocast (``*-mixed``), or make the parameters' dtype the default of new tensors."""
        if self.policy.autocast is not None:
            device = self.engine.device.type if self.engine is not None else "cpu"
            with torch.autocast(device, dtype=self.policy.autocast, cache_enabled=False):
                yield
            return
        with _default_dtype(self.policy.cast):
            yield

    # backward and step -----------------------------------------------------------------------------------------------

    @override
    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        """Scale the loss, and run the ``on_before_backward`` hooks: as under DDP, after it in ``16-mixed``."""
        if self.weight != 1.0:
            tensor = tensor * self.weight
        scaler = None if self.engine is None else self.engine.scaler
        if scaler is None:
            return super().pre_backward(tensor, module)
        if scaler.is_shown:
            return super().pre_backward(tensor * scaler.scale, module)
        return super().pre_backward(tensor, module) * scaler.scale

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: pl.LightningModule, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> None:
        """Run the user's backward inside the engine's; in a pipeline it has already run in ``training_step``."""
        with nullcontext(True) if self.around_backward is None else self.around_backward(model) as to_run:
            if to_run:
                super().backward(tensor, model, optimizer, *args, **kwargs)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure (forward and backward), hooks and clipping on averaged gradients, then the sharded step."""
        if self.engine is None or is_mock_optimizer(optimizer):
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        hooks_first = self.engine.scaler is None  # as if `step` called the closure; a scaled step runs after it
        if hooks_first:
            kwargs = run_step_pre_hooks(optimizer, kwargs, besides=self.engine.stepper)
        result = closure()
        index = self._index(optimizer)  # now: the engine may have followed a change of the optimizers
        if index is None:
            raise PlanError(
                f"{type(optimizer).__name__} is to step, but joined the strategy in the middle of a training step. Set "
                "trainer.strategy.optimizers earlier: in on_train_epoch_start or on_train_batch_start."
            )
        stepper = self.engine.stepper
        self.engine.finish(index)
        self._after_closure(model, optimizer)
        if self.engine.optimizers[index].sharded.takes_closure:
            kwargs["closure"] = Result(result, type(optimizer).__name__)

        def run() -> Any:
            with without_step_pre_hooks(optimizer, besides=stepper) if hooks_first else nullcontext():
                return optimizer.step(**kwargs)

        self.engine.step(index, run)
        return result

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip by the exact global norm over all ranks' shards, or by value. Collective."""
        index = self._index(optimizer)
        if clip_val <= 0 or self.engine is None or index is None:
            return
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            self.engine.clip_value_(index, float(clip_val))
        else:
            self.engine.clip_norm_(index, float(clip_val))

    def _index(self, optimizer: Optimizer) -> int | None:
        return self.engine.index_of(unwrap_optimizer(optimizer)) if self.engine is not None else None

    # loss scale in checkpoints ---------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scale."""
        if self.engine is None or self.engine.scaler is None:
            return {}
        return self.engine.scaler.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the loss scale; without an engine the state is kept until there is one."""
        if self.engine is None:
            self._pending_scaler_state = state_dict
        elif self.engine.scaler is not None and state_dict:
            self.engine.scaler.load_state_dict(state_dict)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the loss scale as DDP saves it, so that a run under DDP continues with it, too."""
        if self.engine is not None and self.engine.scaler is not None:
            checkpoint["MixedPrecision"] = self.engine.scaler.grad_scaler_state()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the loss scale of a run under another strategy."""
        for key in _FOREIGN_SCALER_KEYS:
            if checkpoint.get(key) and type(self).__qualname__ not in checkpoint:
                self.load_state_dict(checkpoint[key])

    @override
    def teardown(self) -> None:
        """Keep the engine: a checkpoint may be saved after the fit."""


def _has_own_scaler(plugin: Any) -> bool:
    """Return whether a user has chosen the loss scale of Lightning's plugin."""
    scaler = plugin.scaler
    if scaler is None:
        return False
    default = torch.amp.GradScaler(device=plugin.device)
    values = [(s.get_scale(), s.get_growth_factor(), s.get_backoff_factor(), s.get_growth_interval())
              for s in (scaler, default)]  # fmt: skip
    return type(scaler) is not type(default) or values[0] != values[1]
