"""A small model with every trait parameters can have, its data, and `run`: one Trainer, many configurations.

Many cases run one after the other in the same ranks (`run_all`), because a start of the ranks costs more than a case.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy.config import LossScaleConfig, PrecisionConfig, nested
from ls_strategy.errors import PlanError
from ls_strategy.lightning.precision import ZeROPrecision
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.precision import PrecisionPolicy
from ls_strategy.testing import spawn
from tests.dist.everywhere import check_every_rank
from tests.trainers import bare_trainer, quiet

VOCABULARY = 13
LENGTH = 5
BATCH = 4


@dataclass(frozen=True)
class Case:
    """What is trained, and how. ``stage=None`` is the trusted run: Lightning's ``strategy="ddp"``."""

    stage: int | None = None
    traits: tuple[str, ...] = ()
    """Of ``frozen tied unused unused_here uneven empty buffers private``; see `Net`."""

    optimizer: str = "adamw"
    """``adamw`` and ``sgd`` (two parameter groups each), or ``two``: both at once, by manual optimization."""

    fused: bool | None = True
    """Whether the optimizer names torch's own fused kernel, so that its rounding is the same under DDP."""

    accumulate: int = 1
    clip: str | None = None
    """``norm`` or ``value``."""

    clip_at: float = 0.0
    precision: str = "32-true"
    """One of Lightning's five, or ``32-scaled``: see `scaled_fp32`."""

    steps: int = 20
    """Optimizer steps."""

    width: int = 16
    blocks: int = 3
    min_unit_numel: int = 0
    device: str = "cpu"
    """Kind of device, as the Trainer's accelerator."""

    options: tuple[tuple[str, Any], ...] = ()
    """More arguments of `ZeROStrategy`."""

    def at(self, stage: int | None) -> Case:
        """The same run at another stage."""
        return replace(self, stage=stage)

    def __str__(self) -> str:
        clip = f"clip_{self.clip}" if self.clip else ""
        words = [self.optimizer, f"acc{self.accumulate}", clip, *self.traits, self.precision]
        return "-".join(w for w in words if w and w != "32-true")


@dataclass
class Result:
    """What a run left behind on one rank; ``weights`` on rank 0 only, after `check_every_rank`."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """On every rank."""

    norms: list[float] = field(default_factory=list)
    """Global gradient norms before clipping, one per optimizer step."""

    largest: list[float] = field(default_factory=list)
    """Largest averaged gradient elements before clipping; the trusted run only."""

    notes: dict[str, Any] = field(default_factory=dict)


class Block(nn.Module):
    """A residual block; ``hidden`` is odd, so that no parameter's size is a multiple of the alignment."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Net(pl.LightningModule):
    """Tokens in, tokens out; labels are random and fixed, so the loss stays of order one.

    Traits: ``frozen`` a whole block left out of the optimizer and a bias that is in it; ``tied`` embedding and head;
    ``unused`` a block and a parameter no rank uses; ``unused_here`` a parameter that another rank uses at each step;
    ``uneven`` prime sizes and a scalar; ``empty`` a parameter without elements; ``buffers`` a batch norm; ``private``
    no hook of the module looks at gradients.
    """

    blocks: Any

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        traits = case.traits
        width = 7 if "uneven" in traits else case.width
        self.case = case
        self.result = Result()
        self.automatic_optimization = case.optimizer != "two"
        self.emb = nn.Embedding(VOCABULARY, width)
        blocks = [Block(width, 3 * width + 1) for _ in range(case.blocks)]
        if "unused" in traits:
            blocks.insert(1, Block(width, 5))
            self.spare = nn.Parameter(torch.randn(width, 3))
        self.skipped = 1 if "unused" in traits else -1
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, VOCABULARY)
        if "tied" in traits:
            self.head.weight = self.emb.weight
        if "uneven" in traits:
            self.scale = nn.Parameter(torch.tensor(1.1))
        if "empty" in traits:
            self.empty = nn.Parameter(torch.empty(0, 3))
        if "unused_here" in traits:
            self.guest = nn.Parameter(torch.randn(width))
        if "buffers" in traits:
            self.bn = nn.BatchNorm1d(width)
        if "frozen" in traits:
            self.blocks[0].requires_grad_(False)
            self.head.bias.requires_grad_(False)
        self._nudge()

    def _nudge(self) -> None:
        """No parameter starts at exactly 0 or 1: a bound relative to the tensor's largest element needs one."""
        with torch.no_grad():
            self.emb.weight.mul_(0.3)
            for p in self.parameters():
                p.add_(0.05 * torch.randn_like(p))

    def forward(self, x_BT: Tensor, batch_idx: int) -> Tensor:
        h = self.emb(x_BT)
        if hasattr(self, "bn"):
            h = self.bn(h.flatten(0, 1)).view_as(h)
        for i, block in enumerate(self.blocks):
            if i != self.skipped:
                h = block(h)
        if hasattr(self, "scale"):
            h = h * self.scale
        if hasattr(self, "empty"):
            h = h + self.empty.sum()
        if hasattr(self, "guest") and (batch_idx // self.case.accumulate) % self.trainer.world_size == self.global_rank:
            h = h + self.guest
        return self.head(h)

    def loss(self, batch: Any, batch_idx: int) -> Tensor:
        x_BT, y_BT = batch
        logits = self(x_BT, batch_idx).float()
        return functional.cross_entropy(logits.flatten(0, 1), y_BT.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch, batch_idx)
        self.result.losses.append(loss.item())
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss / self.case.accumulate)
        if (batch_idx + 1) % self.case.accumulate == 0:
            optimizers: Any = self.optimizers()
            for optimizer in optimizers:
                if self.case.clip:
                    self.record_norm(optimizer)
                    self.clip_gradients(optimizer, self.case.clip_at, self.case.clip)
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        return None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.case.clip and self.automatic_optimization:
            self.record_norm(optimizer)

    def record_norm(self, optimizer: Any) -> None:
        """Remember the norm of the averaged gradients before clipping."""
        if self.case.stage is not None:
            strategy: Any = self.trainer.strategy
            self.result.norms.append(strategy.grad_norm(optimizer=optimizer).item())
            return
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.result.norms.append(torch.nn.utils.get_total_norm(grads).item())
        self.result.largest.append(max(g.abs().max().item() for g in grads if g.numel()))

    def configure_optimizers(self) -> Any:
        """Decay and no-decay groups, fused kernels everywhere: the ones `ZeROStrategy` picks by itself."""
        frozen = {p for p in self.blocks[0].parameters()} if "frozen" in self.case.traits else set()
        params = [p for p in self.parameters() if p not in frozen]
        matrices, vectors = [p for p in params if p.ndim > 1], [p for p in params if p.ndim <= 1]
        if self.case.optimizer == "adamw":
            return _adamw([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], self.case.fused)
        if self.case.optimizer == "sgd":
            return _sgd([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], self.case.fused)
        head = {id(p) for p in (*self.head.parameters(), *self.emb.parameters())}
        body, rest = [p for p in params if id(p) not in head], [p for p in params if id(p) in head]
        return [_adamw(body, self.case.fused), _sgd(rest, self.case.fused)]


class Curve(pl.LightningModule):
    """Starts from the same weights each time, and keeps the losses of its steps: `loss` of a batch's first tensor."""

    def __init__(self, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make_optimizer = optimizer
        self.losses: list[Tensor] = []

    def loss(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch[0])
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())

    def results(self) -> list[Tensor]:
        """Return all losses, and the weights and buffers of now."""
        return [torch.stack(self.losses), *(value.detach().clone() for value in self.state_dict().values())]


def assert_as_ddp(ranks: Sequence[Sequence[tuple[str, list[Tensor], list[Tensor]]]]) -> None:
    """Every run of every rank, by name, has the results of DDP up to the last bits of fp64, on batches that differ."""
    assert len(ranks) == 1 or not torch.equal(ranks[0][0][2][0], ranks[1][0][2][0])
    for rank in ranks:
        for where, found, expected in rank:
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14, msg=lambda m, w=where: f"{w}: {m}")


class PrivateNet(Net):
    """As `Net`, but without a hook between backward and step: what is allowed only then takes place."""

    on_before_optimizer_step = pl.LightningModule.on_before_optimizer_step


def _adamw(params: Any, fused: bool | None) -> torch.optim.Optimizer:
    # Adam divides by |g| + eps, and so multiplies the rounding of an element whose gradient is near zero by 1 / eps. At
    # 1e-8 DDP itself is up to 3.5e-6 away from the same run in fp64 (3 ranks, clipped by norm), and another order of
    # sums makes 1.2e-6 to 2.9e-6; at 1e-3 these are 1e-6 and 1.8e-7. A gradient wrong by a factor, which Adam without
    # eps would not notice, shows.
    return torch.optim.AdamW(params, lr=2e-3, eps=1e-3, weight_decay=0.1, fused=fused)


def _sgd(params: Any, fused: bool | None) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01, fused=fused)


def loader(case: Case, world_size: int) -> DataLoader:
    """Every batch is different and seen once."""
    generator = torch.Generator().manual_seed(1)
    shape = (case.steps * case.accumulate * BATCH * world_size, LENGTH)
    x_BT = torch.randint(0, VOCABULARY, shape, generator=generator)
    y_BT = torch.randint(0, VOCABULARY, shape, generator=generator)
    return DataLoader(TensorDataset(x_BT, y_BT), batch_size=BATCH)


def strategy_of(case: Case) -> Any:
    """The trusted strategy, or ours."""
    if case.stage is None:
        needs_search = {"unused", "unused_here"} & set(case.traits) or case.optimizer == "two"
        return "ddp_find_unused_parameters_true" if needs_search else "ddp"
    options = {"sharding.min_unit_numel": case.min_unit_numel, **dict(case.options)}
    if case.precision.startswith("16") and case.device == "cpu":  # there the Trainer turns these into bf16
        options["precision_plugin"] = ZeROPrecision(case.precision)
    if case.precision == "32-scaled":
        options.setdefault("precision.loss_scale", GROWING)
    return ZeROStrategy(**nested({"stage": case.stage, **options}))


GROWING = LossScaleConfig(initial_power=10, window=2)
"""A loss scale that doubles after every second step."""


@contextmanager
def scaled_fp32() -> Iterator[None]:
    """Inside, fp32 has the loss scale of fp16. Factors of two are exact, so it makes the bits of fp32 without."""

    asked = ZeROPrecision.asked

    def scaled(plugin: ZeROPrecision, config: PrecisionConfig) -> PrecisionPolicy:
        return replace(asked(plugin, config), loss_scaling=True)

    with mock.patch.object(ZeROPrecision, "asked", scaled):
        yield


def fp16_plugin(precision: str, *, power: int = 16) -> Precision:
    """Lightning's own fp16, which its Trainer would not give to a CPU; with the first loss scale."""
    if precision == "16-true":
        return HalfPrecision("16-true")
    return MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**power))


def trainer_of(case: Case, world_size: int, **arguments: Any) -> Any:
    """A bare Trainer for the case."""
    automatic = case.optimizer != "two"
    if automatic:
        arguments["accumulate_grad_batches"] = case.accumulate
        if case.clip:
            arguments.update(gradient_clip_val=case.clip_at, gradient_clip_algorithm=case.clip)
    if not case.precision.startswith("16") or case.device != "cpu":
        arguments["precision"] = case.precision.replace("scaled", "true")
    elif case.stage is None:
        arguments["plugins"] = [fp16_plugin(case.precision)]
    return bare_trainer(strategy_of(case), world_size, **{"accelerator": case.device, "max_epochs": 1, **arguments})


def run(rank: int, world_size: int, case: Case, **arguments: Any) -> Result:
    """Train one case, with more arguments of the Trainer; collective. Tensors of the result are on the host."""
    quiet()
    random.seed(0)
    module = PrivateNet(case) if "private" in case.traits else Net(case)
    trainer = trainer_of(case, world_size, **arguments)
    with scaled_fp32() if case.precision == "32-scaled" else nullcontext():
        trainer.fit(module, loader(case, world_size))
    weights = trainer.strategy.lightning_module_state_dict()
    module.result.buffers = {name: buffer.detach().cpu().clone() for name, buffer in module.named_buffers()}
    if case.stage is not None:
        check_every_rank(trainer.strategy, weights)
    if rank == 0:
        module.result.weights = {k: v.detach().cpu().clone() for k, v in weights.items()}
    return module.result


def run_all(rank: int, world_size: int, cases: list[Case]) -> list[Result]:
    """Train one case after the other."""
    return [run(rank, world_size, case) for case in cases]


def loss_difference(trusted: list[Result], ours: list[Result]) -> float:
    """Largest relative difference of any rank's loss at any step."""
    pairs = [(a, b) for t, o in zip(trusted, ours, strict=True) for a, b in zip(t.losses, o.losses, strict=True)]
    return max(abs(a - b) / abs(a) for a, b in pairs)


def weight_difference(trusted: Result, ours: Result) -> float:
    """Largest difference of any weight, relative to its tensor's largest element."""
    assert trusted.weights.keys() == ours.weights.keys()
    pairs = [(v.double(), ours.weights[k].double()) for k, v in trusted.weights.items() if v.numel()]
    assert all(a.shape == b.shape for a, b in pairs)
    return max(((a - b).abs().max() / a.abs().max()).item() for a, b in pairs)


def buffer_difference(trusted: Result, ours: Result) -> float:
    """Largest difference of any element of a buffer, relative to the buffer's largest."""
    assert trusted.buffers.keys() == ours.buffers.keys()
    pairs = [(v.double(), ours.buffers[k].double()) for k, v in trusted.buffers.items()]
    return max((((a - b).abs().max() / a.abs().max()).item() for a, b in pairs), default=0.0)


def same_bits(a: Result, b: Result) -> bool:
    """Whether losses, weights and buffers are equal bit for bit."""
    return (
        a.losses == b.losses
        and a.buffers.keys() == b.buffers.keys()
        and all(torch.equal(v, b.buffers[k]) for k, v in a.buffers.items())
        and a.weights.keys() == b.weights.keys()
        and all(torch.equal(v, b.weights[k]) for k, v in a.weights.items())
    )


# --- runs of the same bits --------------------------------------------------------------------------------------------


def placed(case: Case, folder: Path | None) -> Case:
    """Return the case with a place for what it has on a drive, if it has anything there."""
    on_drive = dict(case.options).get("offload.nvme_allow_ram")
    return replace(case, options=(*case.options, ("offload.nvme_path", str(folder)))) if on_drive else case


def assert_same_bits(
    world_size: int, groups: Iterable[Sequence[Case]], folder: Path | None = None, *, timeout_s: float = 500
) -> None:
    """Every case has the bits and the norms of the first one of its group, on every rank."""
    groups = [[placed(case, folder) for case in group] for group in groups]
    runs = [case for group in groups for case in group]
    for results in spawn(run_all, world_size, runs, init_process_group=False, timeout_s=timeout_s):
        found = iter(results)
        for first, *others in groups:
            expected = next(found)
            assert len(expected.losses) == first.steps * first.accumulate
            for case in others:
                ours = next(found)
                assert same_bits(expected, ours), f"stage {case.stage} {case} {case.options}"
                assert expected.norms == ours.norms, f"stage {case.stage} {case} {case.options}"


class SaveOnce(pl.Callback):
    """Saves after three steps, inside the epoch."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


def changed_in_between(
    rank: int, world_size: int, folder: Path, whole: Case, changes: dict[str, tuple[Case, Case]]
) -> dict[str, bool]:
    """Whether three steps as one case, saved, and the rest as another end with the bits of ``whole``. Collective."""
    quiet()

    def trained(case: Case, path: str | None = None, *callbacks: pl.Callback) -> Net:
        net = Net(case)
        trainer_of(case, world_size, callbacks=list(callbacks)).fit(net, loader(case, world_size), ckpt_path=path)
        return net

    def weights(net: Net) -> dict[str, Tensor]:
        return {k: v.clone() for k, v in net.state_dict().items()}

    expected, found = weights(trained(whole)), {}
    for name, (before, after) in changes.items():
        path = str(folder / f"{whole.stage} {name}")
        trained(before, None, SaveOnce(path))
        resumed = trained(after, path)
        assert len(resumed.result.losses) == whole.steps - 3
        ours = weights(resumed)
        found[f"{whole.stage} {name}"] = all(torch.equal(value, ours[k]) for k, value in expected.items())
    return found


def refused(case: Case, world_size: int) -> str:
    """Return what the plan of the case says against it. Collective."""
    try:
        trainer_of(case, world_size).fit(Net(case), loader(case, world_size))
    except PlanError as error:
        return str(error)
    raise AssertionError(f"{case} {case.options} was not refused")
