"""Record what the steps of micro-batches log, to log it once per batch."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ls_strategy.host.pytorch import pl, rank_zero_warn
from ls_strategy.lightning._private import metric_state, set_metric_state
from ls_strategy.parallel.pipeline.placeholder import placeholder
from ls_strategy.parallel.pipeline.shares import Shares

_METRIC_CALLS = ("forward", "update", "compute")


@contextmanager
def logging_to(module: Any, record: Callable[[str, Any, dict[str, Any]], None]) -> Generator[None, None, None]:
    """Call ``record(name, value, options)`` for what ``self.log`` and ``self.log_dict`` of a module get inside."""

    def log(name: str, value: Any, *args: Any, **options: Any) -> None:
        options |= zip(list(signature(pl.LightningModule.log).parameters)[3:], args, strict=False)
        record(name, value, options)

    def log_dict(dictionary: Any, *args: Any, **options: Any) -> None:
        options |= zip(list(signature(pl.LightningModule.log_dict).parameters)[2:], args, strict=False)
        for name, value in dictionary.items():
            log(name, value, **options)

    module.log, module.log_dict = log, log_dict
    try:
        yield
    finally:
        del module.log, module.log_dict


class Logged:
    """Records what a module logs in every micro-batch, to log it once per batch."""

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._values: dict[str, list[Any]] = {}
        self._options: dict[str, list[dict[str, Any]]] = {}
        self._metrics = {name: m for name, m in module.named_modules() if hasattr(m, "metric_state")}
        self._counts = {name: metric_state(m)[0] for name, m in self._metrics.items()}

    @contextmanager
    def recording(self) -> Generator[None, None, None]:
        """Make ``self.log`` and ``self.log_dict`` of the module record their arguments inside."""

        def log(name: str, value: Any, options: dict[str, Any]) -> None:
            # The value of this moment: code may go on with the tensor in place. On meta, the tensors themselves tell
            # which micro-batches they are of.
            kept = value.detach().clone() if type(value) is Tensor and not value.is_meta else value
            self._values.setdefault(name, []).append(kept)
            self._options.setdefault(name, []).append(options)

        with logging_to(self._module, log):
            yield

    @property
    def values(self) -> dict[str, list[Any]]:
        """The values that were logged, by name."""
        return self._values

    @property
    def batch_sizes(self) -> dict[str, Any]:
        """What was first given as ``batch_size``, by name."""
        return {name: options[0].get("batch_size") for name, options in self._options.items()}

    def summary(self, shares: Shares) -> Any:
        """Return what to log for the batch of the micro-batches, and the metrics' states: small, on the CPU."""
        summary: list[tuple[str, Any, dict[str, Any]]] = []
        for name, values in self._values.items():
            options = dict(self._options[name][0])
            given = [each.get("batch_size") for each in self._options[name]]
            if given[0] is not None:
                options["batch_size"] = shares.batch_size(name, given)
            metric = next((n for n, m in self._metrics.items() if m is values[0]), None)
            if metric is not None:
                summary.append((name, ("metric", metric), options))
            else:
                how = options.get("reduce_fx", "mean")
                summary.append((name, ("value", shares.of_batch(values, name, how)), options))
        states = {
            name: metric_state(m) for name, m in self._metrics.items() if metric_state(m)[0] != self._counts[name]
        }
        return summary, states, shares.averaged

    def replay(self, summary: Any) -> None:
        """Log a summary; called on every rank with the same one."""
        values, states, averaged = summary
        for name, reason in averaged.items():
            rank_zero_warn(
                f"The step logs {name!r}, computed by {reason}. In a pipeline that is the mean over micro-batches, "
                "which differs from the value of the batch. Compute it from logged means or sums in a hook, such as "
                "on_train_batch_end."
            )
        for name, state in states.items():
            set_metric_state(self._metrics[name], state)
        for name, (kind, value), options in values:
            shown: Any = self._metrics[value] if kind == "metric" else value
            self._module.log(name, shown, **options)


@contextmanager
def unchanged_metrics(module: nn.Module, device: torch.device) -> Generator[None, None, None]:
    """Make torchmetrics of the module take no values inside, and return one without a value."""
    metrics: list[Any] = [m for m in module.modules() if hasattr(m, "metric_state")]

    def nothing(*_: Any, **__: Any) -> Tensor:
        return placeholder((), torch.float32, device)

    before = [{name: vars(metric)[name] for name in _METRIC_CALLS if name in vars(metric)} for metric in metrics]
    for metric in metrics:
        vars(metric).update(dict.fromkeys(_METRIC_CALLS, nothing))
    try:
        yield
    finally:
        for metric, own in zip(metrics, before, strict=True):
            for name in _METRIC_CALLS:
                del vars(metric)[name]
            vars(metric).update(own)
