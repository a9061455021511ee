"""``ZeROStrategy(deepspeed_config=...)``: what a DeepSpeed configuration sets on the Trainer and the module.

===========================  =======================================================================================
when                         what
===========================  =======================================================================================
the strategy is made         `with_config`: the file's options become the strategy's
the Trainer gives a plugin   `DeepSpeedConfiguration.precision`
``connect``                  the module gets optimizer and schedule if it has none
``setup``                    clipping and accumulation are set, or compared; the report is logged
``on_train_start``           batch sizes are compared
===========================  =======================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ls_strategy._torch import tree_iter
from ls_strategy.config import PipelineConfig, TensorConfig, ZeROConfig, nested
from ls_strategy.config.option_names import GROUPS
from ls_strategy.errors import ConfigError
from ls_strategy.extras._lightning import made_by_parser, parse_again
from ls_strategy.extras.deepspeed.config import Translation, translate
from ls_strategy.extras.deepspeed.options import with_file
from ls_strategy.extras.deepspeed.schedules import Schedule
from ls_strategy.host.pytorch import (
    GradClipAlgorithmType,
    GradientAccumulationScheduler,
    is_overridden,
    pl,
    rank_zero_info,
)
from ls_strategy.lightning.precision import ZeROPrecision


class DeepSpeedConfiguration:
    """Applies a translated configuration to the Trainer and the module of a strategy."""

    def __init__(self, translation: Translation) -> None:
        self.translation = translation
        self._batch_size: int | None = None
        self._reported = False

    def precision(self, plugin: ZeROPrecision) -> ZeROPrecision:
        """Return the Trainer's plugin, or one with the configuration's precision.

        Raises:
            ConfigError: they contradict each other.
        """
        chosen = self.translation.trainer.choose_precision(str(plugin.precision))
        return plugin if chosen == plugin.precision else ZeROPrecision(chosen)

    def connect(self, module: pl.LightningModule) -> None:
        """Make ``configure_optimizers`` return what the configuration has and the module does not."""
        self.disconnect(module)
        if self.translation.optimizer is None and self.translation.scheduler is None:
            return
        own = module.configure_optimizers if is_overridden("configure_optimizers", module) else None
        if own is None and self.translation.optimizer is None:
            return  # Lightning reports that it is missing
        module.configure_optimizers = partial(_configure, self.translation, module, own)

    def disconnect(self, module: pl.LightningModule) -> None:
        """Restore the module's own ``configure_optimizers``."""
        present = module.__dict__.get("configure_optimizers")
        if isinstance(present, partial) and present.func is _configure:
            del module.__dict__["configure_optimizers"]

    def resolve(self, trainer: pl.Trainer, replicas: int) -> None:
        """Set clipping and accumulation on the Trainer, or compare them; log the report once.

        Args:
            trainer: about to fit.
            replicas: the number of data-parallel ranks.

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
                "Got a GradientAccumulationScheduler and gradient_accumulation_steps in the DeepSpeed configuration, "
                'but only one of them can apply. Set "gradient_accumulation_steps": "auto".'
            )
        if not trainer.lightning_module.automatic_optimization and (settings.gradient_clip_val or steps > 1):
            raise ConfigError(
                f"Got gradient_clipping={settings.gradient_clip_val}, gradient_accumulation_steps={steps} in the "
                "DeepSpeed configuration, but the module uses manual optimization (automatic_optimization=False). Clip "
                'and accumulate in training_step, and set "auto" for both.'
            )
        trainer.gradient_clip_val = clipping
        if not scheduled:
            trainer.accumulate_grad_batches = steps
        if not self._reported:
            rank_zero_info(self.translation.report())
            self._reported = True

    def watch(self, schedulers: list[Any], skipped_steps: Callable[[], int]) -> None:
        """Keep the configuration's schedule from advancing on steps that an fp16 overflow skips."""
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


def with_config(strategy: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a strategy's constructor, completed by its ``deepspeed_config``.

    Args:
        strategy: the strategy, in its ``__init__``.
        given: arguments that were passed, by name.

    Returns:
        All arguments; ``deepspeed_config`` is a `DeepSpeedConfiguration`.

    Raises:
        ConfigError: a key is unknown, ignoring it would change results, or an argument contradicts the file.
    """
    source = given["deepspeed_config"]
    source = source.translation if isinstance(source, DeepSpeedConfiguration) else source
    translation = source if isinstance(source, Translation) else translate(source)
    completed = with_file(strategy, given, translation, took_default)
    return {**completed, "deepspeed_config": DeepSpeedConfiguration(translation)}


def _configure(translation: Translation, module: pl.LightningModule, own: Callable[[], Any] | None) -> Any:
    """Return what ``configure_optimizers`` should: the module's, completed by the configuration's.

    Raises:
        ConfigError: module and configuration both have an optimizer, or both have a schedule.
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
        names = {id(p): name for name, p in module.named_parameters()}
        result = optimizer.build([p for p in module.parameters() if p.requires_grad], auto, names)
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
    """Return the learning rate from where Lightning's learning rate finder looks for it."""
    for holder in (module, module.hparams):
        for name in ("lr", "learning_rate"):
            if hasattr(holder, name):
                return getattr(holder, name)
    return None


def took_default(strategy: Any, said: dict[str, Any]) -> list[str]:
    """Return the options that the user did not give: a LightningCLI passes every default to the constructor.

    The same command line and files are parsed again, with the DeepSpeed configuration's values as defaults. An option
    that takes the new default was not given.

    Args:
        strategy: the strategy, in its ``__init__``.
        said: the DeepSpeed configuration's values by dotted name; the constructor got the default of each.
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
    """Return a group with ``options``, and add them to ``defaults`` of its class, for files that set a part of it."""
    inner = {"tensor": TensorConfig, "pipeline": PipelineConfig}
    values = {n: _as_default(inner[n], v, defaults) if n in inner else v for n, v in options.items()}
    defaults[kind] = values
    required = [field.name for field in fields(kind) if field.default is field.default_factory]
    return kind(**values) if set(required) <= set(values) else 1


def _same_option(group: Any, option: str, value: Any) -> bool:
    """Return whether a group has this value of an option. A tier and a policy may be given by name."""
    for name in option.split("."):
        group = getattr(group, name)
    if isinstance(value, str) and not isinstance(group, str):
        return value in (getattr(group, "tier", None), getattr(group, "policy", None))
    return bool(group == value)
