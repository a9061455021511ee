"""``ZeROStrategy(deepspeed_config=...)``: what a DeepSpeed configuration says about the Trainer and the module.

===========================  =======================================================================================
when                         what
===========================  =======================================================================================
the strategy is made         `deepspeed.translate`; its options are the strategy's
the Trainer gives a plugin   `DeepSpeedConfiguration.precision`
``connect``                  the module gets optimizer and schedule, where it has none
``setup``                    clipping and accumulation are taken over, or compared; the report is logged
``on_train_start``           batch sizes are compared
===========================  =======================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ls_strategy._compat import made_by_parser, parse_again, tree_iter
from ls_strategy.config import PipelineConfig, TensorConfig, ZeROConfig, nested
from ls_strategy.config.renamed import GROUPS
from ls_strategy.deepspeed.config import Translation
from ls_strategy.deepspeed.schedules import Schedule
from ls_strategy.errors import ConfigError
from ls_strategy.lightning.precision import ZeROPrecision


class DeepSpeedConfiguration:
    """A translated configuration in the hands of a strategy."""

    def __init__(self, translation: Translation) -> None:
        """Note it."""
        self.translation = translation
        self._batch_size: int | None = None
        self._reported = False

    def precision(self, plugin: ZeROPrecision) -> ZeROPrecision:
        """The Trainer's plugin, or that of the configuration.

        Raises:
            ConfigError: they contradict each other.
        """
        chosen = self.translation.trainer.choose_precision(str(plugin.precision))
        return plugin if chosen == plugin.precision else ZeROPrecision(chosen)

    def connect(self, module: pl.LightningModule) -> None:
        """Let ``configure_optimizers`` give what the configuration has and the module has not."""
        self.disconnect(module)
        if self.translation.optimizer is None and self.translation.scheduler is None:
            return
        own = module.configure_optimizers if is_overridden("configure_optimizers", module) else None
        if own is None and self.translation.optimizer is None:
            return  # Lightning says that it is missing
        module.configure_optimizers = partial(_configure, self.translation, module, own)

    def disconnect(self, module: pl.LightningModule) -> None:
        """Give the module its own ``configure_optimizers`` back."""
        there = module.__dict__.get("configure_optimizers")
        if isinstance(there, partial) and there.func is _configure:
            del module.__dict__["configure_optimizers"]

    def resolve(self, trainer: pl.Trainer, replicas: int) -> None:
        """Take clipping and accumulation over into the Trainer, or compare them; log the report once.

        Args:
            trainer: about to fit.
            replicas: data-parallel ranks.

        Raises:
            ConfigError: Trainer and configuration contradict each other.
        """
        settings = self.translation.trainer
        by_value = trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE
        clipping = settings.choose_clipping(trainer.gradient_clip_val, by_value=by_value)
        steps, self._batch_size = settings.choose_batches(trainer.accumulate_grad_batches, replicas)
        scheduled = any(isinstance(c, GradientAccumulationScheduler) for c in trainer.callbacks)  # type: ignore[attr-defined]
        if scheduled and settings.accumulate_grad_batches is not None:
            raise ConfigError(
                "a GradientAccumulationScheduler and gradient_accumulation_steps in the DeepSpeed configuration. Write "
                '"gradient_accumulation_steps": "auto".'
            )
        if not trainer.lightning_module.automatic_optimization and (settings.gradient_clip_val or steps > 1):
            raise ConfigError(
                f"the module optimizes by hand (automatic_optimization=False), and the DeepSpeed configuration has "
                f"gradient_clipping={settings.gradient_clip_val}, gradient_accumulation_steps={steps}. Clip and "
                'accumulate in training_step, and write "auto" for both.'
            )
        trainer.gradient_clip_val = clipping
        if not scheduled:
            trainer.accumulate_grad_batches = steps
        if not self._reported:
            rank_zero_info(self.translation.report())
            self._reported = True

    def watch(self, schedulers: list[Any], skipped_steps: Callable[[], int]) -> None:
        """A step that an fp16 overflow skips does not move the configuration's schedule."""
        for config in schedulers:
            if isinstance(config.scheduler, Schedule):
                config.scheduler.skipped_steps = skipped_steps

    def check_loaders(self, trainer: pl.Trainer) -> None:
        """Compare the training DataLoaders' batch sizes with the configuration.

        Raises:
            ConfigError: they differ.
        """
        for loader in tree_iter(trainer.train_dataloader):
            if isinstance(loader, DataLoader):
                size = getattr(loader.batch_sampler, "batch_size", loader.batch_size)
                self.translation.trainer.check_loader(size, self._batch_size)


def _configure(translation: Translation, module: pl.LightningModule, own: Callable[[], Any] | None) -> Any:
    """In place of ``configure_optimizers``.

    Raises:
        ConfigError: module and configuration both have an optimizer, or a schedule.
    """
    result = None if own is None else own()
    optimizer, schedule = translation.optimizer, translation.scheduler
    if optimizer is not None and result is not None:
        raise ConfigError(
            f"{type(module).__name__}.configure_optimizers returns optimizers, and the DeepSpeed configuration has an "
            "optimizer block. Delete one of them."
        )
    auto = {"lr": _learning_rate(module)}
    if optimizer is not None:
        result = optimizer.build((p for p in module.parameters() if p.requires_grad), auto)
    if schedule is None or result is None:
        return result
    result = result["optimizer"] if isinstance(result, dict) and "lr_scheduler" not in result else result
    result = result[0] if isinstance(result, (list, tuple)) and len(result) == 1 else result
    if not isinstance(result, Optimizer):
        raise ConfigError(
            f"{type(module).__name__}.configure_optimizers returns a schedule or several optimizers, and the DeepSpeed "
            "configuration has a scheduler block, which is for one optimizer. Delete one of them."
        )
    if "auto" in schedule.params.values():
        auto["total_num_steps"] = module.trainer.estimated_stepping_batches
    return {"optimizer": result, "lr_scheduler": {"scheduler": schedule.build(result, auto), "interval": "step"}}


def _learning_rate(module: pl.LightningModule) -> Any:
    """Where Lightning's own learning rate finder looks for it."""
    for holder in (module, module.hparams):
        for name in ("lr", "learning_rate"):
            if hasattr(holder, name):
                return getattr(holder, name)
    return None


def took_default(strategy: Any, said: dict[str, Any]) -> list[str]:
    """Return the options of a strategy in the making that nobody wrote: a LightningCLI passes every default.

    To find out, the same command line and files are parsed again, with what the DeepSpeed configuration says as
    defaults: an option that somebody wrote does not follow.

    Args:
        strategy: in its ``__init__``.
        said: by name with dots, what the DeepSpeed configuration says; each was passed with the value of its default.
    """
    if not made_by_parser():
        return []
    doubtful = {name: value for name, value in said.items() if name not in getattr(type(strategy), "PRESET", ())}
    groups = nested(doubtful)
    defaults: dict[type, dict[str, Any]] = {type(strategy): {}}
    for name, value in groups.items():
        defaults[type(strategy)][name] = _as_default(GROUPS[name], value, defaults) if name in GROUPS else value
    parsed = parse_again(type(strategy), defaults)
    if parsed is None:
        return list(doubtful)
    follows = []
    for name, value in doubtful.items():
        group, _, option = name.partition(".")
        now = parsed.get(group)
        if option:
            config = ZeROConfig.of(3, **{group: now}) if not isinstance(now, Mapping) else GROUPS[group](**now)
            now = getattr(config, group) if isinstance(config, ZeROConfig) else config
            follows += [name] if _same_option(now, option, value) else []
        elif now == value:
            follows.append(name)
    return follows


def _as_default(kind: type[Any], options: dict[str, Any], defaults: dict[type, dict[str, Any]]) -> Any:
    """Return a group with ``options``, and note them as the defaults of its class, for files that write some of it."""
    inner = {"tensor": TensorConfig, "pipeline": PipelineConfig}
    values = {n: _as_default(inner[n], v, defaults) if n in inner else v for n, v in options.items()}
    defaults[kind] = values
    required = [field.name for field in fields(kind) if field.default is field.default_factory]
    return kind(**values) if set(required) <= set(values) else 1


def _same_option(group: Any, option: str, value: Any) -> bool:
    """Whether a group says the same of an option; a tier may be a name alone."""
    for name in option.split("."):
        group = getattr(group, name)
    if isinstance(value, str) and not isinstance(group, str):
        return value in (getattr(group, "tier", None), getattr(group, "policy", None))
    return bool(group == value)
