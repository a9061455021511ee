"""`ExpertMonitor`: the load of experts as scalars, histograms and a plot, for TensorBoard."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ls_strategy.checked import at_least, checked
from ls_strategy.distributed.axis import Axis, Waits
from ls_strategy.extras.callbacks.step_figures import draws
from ls_strategy.extras.plots.charts import Charts
from ls_strategy.extras.plots.figure import add_legend, figure, of, pixels, short_name
from ls_strategy.host.pytorch import Callback, pl, rank_zero_info
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.moe.sparse import SparseLayer

_BUSY, _EVEN, _IDLE = (219, 68, 55), (245, 245, 245), (66, 133, 244)
_UNUSED = (40, 40, 40)


@dataclass(frozen=True)
class LayerLoad:
    """The load of one layer's experts in an interval, over all ranks; on the CPU."""

    routed: Tensor  # ``(E,)`` fp64: pairs of token and expert, before any was dropped
    kept: Tensor  # ``(E,)`` fp64: pairs that were computed
    entropy: float  # entropy of the router's probabilities in nats, mean over tokens
    balance_loss: float  # unweighted; 1 when loads are even
    z_loss: float  # unweighted

    @property
    def largest(self) -> float:
        """Pairs routed to the busiest expert over the mean of all experts; 1 when loads are even."""
        return float(self.routed.max() / self.routed.mean()) if self.routed.any() else 0.0

    @property
    def dropped(self) -> float:
        """The share of pairs that were dropped because their expert was full."""
        routed = float(self.routed.sum())
        return 1 - float(self.kept.sum()) / routed if routed else 0.0

    @property
    def unused(self) -> float:
        """The share of experts that no token chose."""
        return float((self.routed == 0).double().mean())


class ExpertMonitor(Callback):
    """Logs the routing of all `MoE` layers, summed over all ranks. Works under every strategy.

    ==================================== ===============================================================================
    scalar                               meaning
    ==================================== ===============================================================================
    ``zero_experts/largest_load``        tokens routed to the busiest expert over the mean of all experts, worst layer
    ``zero_experts/unused``              share of experts that no token chose
    ``zero_experts/dropped``             share of tokens' choices dropped because the expert was full
    ``zero_experts/entropy``             entropy of the routers' probabilities in nats, mean over layers; log(E) when
                                         all are equal
    ``zero_experts/balance_loss``        mean over layers, unweighted; 1 when loads are even
    ``zero_experts/z_loss``              mean over layers, unweighted
    ``zero_experts/sent_mib_per_step``   MiB that a rank sent in expert-parallel exchanges, mean over ranks
    ``zero_experts/wait_ms_per_step``    ms that computation waited for these exchanges, mean over ranks
    ``zero_expert_largest_load/*``       and ``zero_expert_unused``, ``zero_expert_dropped``, ``zero_expert_entropy``,
                                         ``zero_expert_balance_loss``: the same by layer
    ==================================== ===============================================================================

    Loggers with TensorBoard's interface also get a histogram of the tokens per expert for each layer,
    ``zero_expert_tokens/*``, and a plot of all layers, ``zero_experts/load`` (see `draw`). A scalar gets a chart when
    it is not 0 for the first time: drops have none without a capacity limit.

    The training step does not change. Ranks sum their counts once per interval, in one all-reduce of a few numbers per
    expert.
    """

    @checked(every_n_steps=at_least(1), picture_every_n_steps=at_least(1))
    def __init__(self, every_n_steps: int | None = None, picture_every_n_steps: int = 100) -> None:
        """Set the intervals.

        Args:
            every_n_steps: optimizer steps per interval of the scalars. None: the Trainer's ``log_every_n_steps``.
            picture_every_n_steps: the least number of optimizer steps between two plots, and between two histograms.

        Raises:
            ConfigError: a number is below 1.
        """
        self.every_n_steps = every_n_steps
        self.picture_every_n_steps = picture_every_n_steps
        self._layers: dict[str, SparseLayer] = {}
        self._since_step = 0
        self._picture_step: int | None = None
        self._sent_before = 0
        self._charts = Charts()
        self._draws = False

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._layers = {name: m for name, m in pl_module.named_modules() if isinstance(m, SparseLayer)}
        self._picture_step, self._charts = None, Charts()
        self._draws = draws(trainer, "ExpertMonitor")
        if not self._layers:
            rank_zero_info("ExpertMonitor: the model has no MoE layer, so nothing is logged.")
        self._restart(trainer)

    def _restart(self, trainer: pl.Trainer) -> None:
        for layer in self._layers.values():
            layer.reset_statistics()
        self._since_step = trainer.global_step
        self._sent_before = _sent_bytes(trainer)
        axis = _axis(trainer)
        if axis is not None:
            axis.waits = Waits()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        axis = _axis(trainer)
        if axis is not None:
            axis.waits = None

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log at the end of an interval. Collective, at the same steps on every rank."""
        every: int = self.every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        steps = trainer.global_step - self._since_step
        if not self._layers or not trainer.loggers or every < 1 or steps < every:
            return
        loads, sent, waited = self._over_all_ranks(trainer, pl_module.device)
        step = trainer.global_step
        draw = self._picture_step is None or step >= self._picture_step + self.picture_every_n_steps
        if draw:
            self._picture_step = step
        if trainer.is_global_zero:
            metrics = scalars(loads)
            if _axis(trainer) is not None:
                metrics["zero_experts/sent_mib_per_step"] = sent / steps / (1 << 20)
                metrics["zero_experts/wait_ms_per_step"] = waited / steps * 1e3
            shown = self._charts.of(metrics)
            for logger in trainer.loggers:
                logger.log_metrics(shown, step=step)
                if draw:
                    _show(getattr(logger, "experiment", None), loads, step, picture=self._draws)
        self._restart(trainer)

    def _over_all_ranks(self, trainer: pl.Trainer, device: torch.device) -> tuple[dict[str, LayerLoad], float, float]:
        """Return loads by layer, and bytes sent and seconds waited per rank, since the last call. Collective.

        A layer of another pipeline stage, which is on meta here, adds zeros.
        """
        rows: list[Tensor] = []
        for layer in self._layers.values():
            s = layer.statistics()
            values = torch.stack([s.entropy, s.balance_loss, s.z_loss, torch.ones_like(s.entropy)]) * s.calls
            for row in (s.routed, s.kept, values):
                here = torch.zeros_like(row, device=device) if row.is_meta else row.to(device)
                rows.append(here.double())
        sent = _sent_bytes(trainer) - self._sent_before
        axis = _axis(trainer)
        waited = 0.0 if axis is None or axis.waits is None else axis.waits.take()
        mine = torch.cat([*rows, torch.tensor([sent, waited, 1.0], dtype=torch.double, device=device)])
        group: Any = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        total: Any = trainer.strategy.reduce(mine, group=group, reduce_op="sum")
        sent, waited = (total[-3:-1] / total[-1]).tolist()
        return self._split(total.cpu(), _copies(trainer)), sent, waited

    def _split(self, total: Tensor, copies: int) -> dict[str, LayerLoad]:
        """Split the sums over all ranks by layer; ``copies`` ranks counted each token."""
        sizes = [size for layer in self._layers.values() for size in (layer.num_experts, layer.num_experts, 4)]
        parts = iter(total[:-3].split(sizes))
        loads: dict[str, LayerLoad] = {}
        for name, routed, kept, values in zip(self._layers, parts, parts, parts, strict=False):
            calls = max(float(values[3]), 1.0)
            entropy, balance, z = (values[:3] / calls).tolist()
            loads[name] = LayerLoad(routed / copies, kept / copies, entropy, balance, z)
        return loads


def _axis(trainer: pl.Trainer) -> Axis | None:
    """Return the expert-parallel ranks, None without expert parallelism."""
    strategy = trainer.strategy
    if not isinstance(strategy, ZeROStrategy) or strategy.parallel.config.expert == 1:
        return None
    return strategy.require_engine().mesh.expert


def _sent_bytes(trainer: pl.Trainer) -> int:
    """Return the bytes that this rank has sent in expert-parallel exchanges."""
    axis = _axis(trainer)
    return 0 if axis is None else sum(axis.traffic.bytes.values())


def _copies(trainer: pl.Trainer) -> int:
    """Return how many ranks count each token: several, if tensor-parallel ranks route the same tokens."""
    strategy = trainer.strategy
    if not isinstance(strategy, ZeROStrategy) or strategy.parallel.config.tp.sequence_parallel:
        return 1
    return strategy.parallel.config.tp.size


def scalars(loads: dict[str, LayerLoad]) -> dict[str, float]:
    """Return the scalars that `ExpertMonitor` logs, by tag."""
    layers = list(loads.values())
    routed, kept = (torch.cat([getattr(load, key) for load in layers]) for key in ("routed", "kept"))
    values = ("entropy", "balance_loss", "z_loss")
    means = {key: statistics.fmean(getattr(load, key) for load in layers) for key in values}
    total = LayerLoad(routed, kept, **means)
    result = {f"zero_experts/{key}": getattr(total, key) for key in ("unused", "dropped", *means)}
    result["zero_experts/largest_load"] = max(load.largest for load in layers)
    for name, load in loads.items():
        result[f"zero_expert_largest_load/{name}"] = load.largest
        for key in ("unused", "dropped", "entropy", "balance_loss"):
            result[f"zero_expert_{key}/{name}"] = getattr(load, key)
    return result


def _show(experiment: Any, loads: dict[str, LayerLoad], step: int, *, picture: bool) -> None:
    """Log histograms and the plot to a logger's ``experiment``, if it supports them."""
    if picture and hasattr(experiment, "add_image"):
        experiment.add_image("zero_experts/load", draw({name: load.routed for name, load in loads.items()}), step)
    if not hasattr(experiment, "add_histogram_raw"):
        return
    for name, load in loads.items():
        tokens = load.routed
        number = torch.arange(len(tokens), dtype=torch.double)
        experiment.add_histogram_raw(
            f"zero_expert_tokens/{name}",
            min=-0.5,
            max=len(tokens) - 0.5,
            num=float(tokens.sum()),
            sum=float((tokens * number).sum()),
            sum_squares=float((tokens * number.square()).sum()),
            bucket_limits=(number + 0.5).tolist(),
            bucket_counts=tokens.tolist(),
            global_step=step,
        )


def draw(loads: Mapping[str, Tensor], *, width: int = 960) -> Tensor:
    """Return a plot of loads, ``(3, H, W)`` uint8, for TensorBoard's ``add_image``: a row per layer, a cell per expert.

    White is the mean load of the layer, red twice the mean or more, blue less; black is an expert that no token chose.

    Args:
        loads: ``(E,)`` tokens per expert, by layer name; E may differ.
        width: of the image, in pixels.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    sizes = {len(load) for load in loads.values()}
    colours = LinearSegmentedColormap.from_list("load", [of(c) for c in (_IDLE, _EVEN, _BUSY)], N=257)
    colours = colours.with_extremes(bad=of(_UNUSED))
    scale = ScalarMappable(Normalize(0, 2), colours)
    with figure(width, 26 * len(loads) + 130, layout="constrained") as drawn:
        axes = drawn.add_subplot(xlim=(0, 1), ylim=(len(loads), 0))
        axes.set_title("tokens routed to each expert, by MoE layer", loc="left")
        for row, load in enumerate(loads.values()):
            relative = load.double() / load.double().mean().clamp(min=1e-9)
            cells = relative.masked_fill(load == 0, torch.nan)[None].numpy()
            line = "white" if 8 * len(load) <= width else "face"  # room for lines between cells
            edges = torch.linspace(0, 1, len(load) + 1).numpy()
            axes.pcolormesh(edges, [row + 0.08, row + 0.92], cells, cmap=colours, norm=scale.norm, edgecolors=line)
        names = [name if len(sizes) == 1 else f"{name}, {len(load)} experts" for name, load in loads.items()]
        axes.set_yticks([row + 0.5 for row in range(len(loads))], map(short_name, names))
        axes.set_xlabel("number of the expert" if len(sizes) == 1 else "experts of the layer, number 0 at the left")
        experts = sizes.pop()
        shown = range(0, 0 if sizes else experts, -(-experts // 16))
        axes.set_xticks([(e + 0.5) / experts for e in shown], map(str, shown))
        label = "load over the layer's mean load"
        bar = drawn.colorbar(scale, ax=axes, location="bottom", aspect=60, label=label)
        bar.set_ticks([0, 1, 2], labels=["0", "1", "2 or more"])
        add_legend(drawn, [(_UNUSED, "no token")])
        return pixels(drawn)
