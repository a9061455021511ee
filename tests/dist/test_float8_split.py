"""``precision.matmul="fp8"`` with tensor parallelism, emulated: numbers of one process with torchao's conversion."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ls_strategy.config import nested
from ls_strategy.distributed.axis import Axis
from ls_strategy.distributed.comm import make_comm
from ls_strategy.errors import PlanError
from ls_strategy.lightning.float8_split import WeightSplit, split_product
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.parallel.styles import Column, Row
from ls_strategy.testing import spawn
from tests.dist.parallel_runs import Run, train_all
from tests.dist.ranks import Net, Sgd, assert_close, fit, global_batches, mean_over_ranks, on_ranks, weights
from tests.models import quiet

pytest.importorskip("torchao.float8")
pytestmark = pytest.mark.own_ranks  # torchao is imported, and replaces functions of torch

D, STEPS = 32, 4
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
PLAN = {"blocks.*.mlp.up": Column(), "blocks.*.mlp.down": Row(), "middle": Column(gather=True)}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.replicated, self.mlp = nn.LayerNorm(D), nn.Linear(D, D), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(self.replicated(x)))  # type: ignore[no-any-return]


class Plain(Sgd):
    """Column and row layers with biases, one that every rank computes, and one whose outputs are gathered."""

    def build(self) -> None:
        self.first = nn.Linear(8, D)
        self.middle = nn.Linear(D, D, bias=False)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.lm_head = nn.Linear(D, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.middle(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)  # type: ignore[no-any-return]


class Tokens(Plain):
    """The same with a dimension of tokens, as sharded sequences need."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[None])[0]


def by_hand(module: Any, recipe: str) -> Any:
    """Converted by torchao's own hand: all but the first and the last layer."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    return convert_to_float8_training(
        module, module_filter_fn=lambda _, name: name.startswith(("middle", "blocks")), config=config
    )


def by_hand_layer(weight: torch.Tensor, recipe: str) -> nn.Linear:
    layer = nn.Linear(*weight.T.shape, bias=False)
    layer.weight = nn.Parameter(weight.clone())
    return by_hand(nn.ModuleDict({"middle": layer}), recipe)["middle"]  # type: ignore[no-any-return]


def trained(rank: int, replicas: int, module: Net, strategy: Any, **trainer: Any) -> tuple[list[float], Any]:
    """Losses of all replicas and full weights."""
    data = global_batches(rank, replicas, STEPS)
    fit(strategy, module, data, **{"use_distributed_sampler": False, "max_epochs": 1, **trainer})
    strategy = module.trainer.strategy
    full = strategy.lightning_module_state_dict() if isinstance(strategy, ZeROStrategy) else weights(module)
    return mean_over_ranks(module.losses), full


def plainly(rank: int, world_size: int, recipe: str, trainer: dict[str, Any]) -> tuple[Any, Any]:
    """With as many processes as replicas: converted, and not converted."""
    quiet()
    strategy = "ddp" if world_size > 1 else "auto"
    converted = trained(rank, world_size, by_hand(Plain(), recipe), strategy, **trainer)
    return converted, trained(rank, world_size, Plain(), strategy, **trainer)[0]


def split(rank: int, world_size: int, options: Any, kind: type[Net], trainer: dict[str, Any]) -> tuple[Any, Any]:
    """On tensor-parallel ranks."""
    quiet()
    given = {"sharding.min_unit_numel": 0, "parallel.tensor.size": 2, "parallel.tensor.plan": PLAN, **options}
    return trained(rank // 2, world_size // 2, kind(), ZeROStrategy(**nested(given)), **trainer)


def compare(ranks: int, options: Any, recipe: str, kind: type[Net] = Plain, **trainer: Any) -> None:
    (losses, expected), unrounded = spawn(plainly, ranks // 2, recipe, trainer, init_process_group=False)[0]
    options = {**options, "precision.matmul": {"recipe": recipe}}
    ours, actual = spawn(split, ranks, options, kind, trainer, init_process_group=False, timeout_s=120)[0]
    assert_close(ours, losses, f"{recipe}: losses")
    assert_close(actual, expected, recipe)
    assert max(abs(a - b) for a, b in zip(losses, unrounded, strict=True)) > 1e-4  # it does round


@pytest.mark.parametrize("recipe", ["tensorwise", *(pytest.param(r, marks=pytest.mark.wide) for r in RECIPES[1:])])
def test_numbers_are_those_without_tensor_parallelism(recipe: str) -> None:
    """Scales of all ranks' parts: with those of one part, numbers would be others."""
    compare(2, {"stage": 1}, recipe)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("options", "trainer"),
    [
        ({"stage": 3}, {}),
        ({"stage": 3, "offload": "cpu"}, {"accumulate_grad_batches": 2}),
        ({"stage": 2, "activations": "full"}, {"gradient_clip_val": 0.1}),
        ({"stage": 2, "compile": {"regions": "blocks", "backend": "aot_eager"}}, {}),
    ],
)
def test_with_replicas_and_other_features(options: Any, trainer: Any) -> None:
    compare(4, options, "tensorwise", **trainer)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("of", [0, 1])
@on_ranks(2, init_process_group=True)
def test_products_are_those_of_the_full_layer(rank: int, world_size: int, of: int, recipe: str) -> None:
    """With numbers so different that a scale of one part would round the others to other digits, or to zero."""
    axis, generator = Axis("tensor", make_comm()), torch.Generator().manual_seed(0)
    x, weight, dy = (
        torch.randn(shape, generator=generator) * 10 ** (12 * torch.rand(shape, generator=generator) - 6)
        for shape in ((3, 16, 2 * D), (2 * D, 2 * D), (3, 16, 2 * D))
    )
    full: Any = by_hand_layer(weight, recipe)
    expected = full(x.requires_grad_())
    expected.backward(dy)

    mine = slice(rank * D, (rank + 1) * D)
    part = (weight[mine] if of == 0 else weight[:, mine]).clone().requires_grad_()
    own = (x[..., mine] if of else x).detach().clone().requires_grad_()
    output = split_product(own, part, WeightSplit(axis, of, of == 1), full.linear_mm_config, full.config)
    output.backward(dy[..., mine] if of == 0 else dy)

    assert x.grad is not None
    assert own.grad is not None
    if of == 0:
        assert_close(output.detach(), expected.detach()[..., mine], "output")
        assert_close(axis.all_reduce(own.grad), x.grad, "to input")
        assert_close(part.grad, full.weight.grad[mine], "to weight")
    else:
        assert_close(axis.all_reduce(output.detach()), expected.detach(), "output")
        assert_close(own.grad, x.grad[..., mine], "to input")
        assert_close(part.grad, full.weight.grad[:, mine], "to weight")


@on_ranks(2, init_process_group=True)
def test_nan_of_one_rank_reaches_the_other(rank: int, world_size: int) -> None:
    full: Any = by_hand_layer(torch.ones(D, 2 * D), "tensorwise")
    x = torch.full((16, D), float("nan") if rank else 1.0)
    split = WeightSplit(Axis("tensor", make_comm()), 1, True)
    assert split_product(x, torch.ones(D, D), split, full.linear_mm_config, full.config).isnan().all()


@pytest.mark.wide
def test_with_sharded_tokens() -> None:
    compare(2, {"stage": 3, "parallel.tensor.sequence_parallel": True}, "rowwise_with_gw_hp", Tokens)


@pytest.mark.wide
@pytest.mark.parametrize(
    "options",
    [
        {"parallel.pipeline": {"size": 2, "micro_batches": 2}},
        {"parallel.context": 2},
        {"parallel.tensor.sequence_parallel": True},
    ],
)
def test_with_other_kinds_of_parallelism(options: dict[str, Any]) -> None:
    """A GPT's losses are those of data parallelism alone."""
    rows: dict[str, Any] = {"stage": 1, "precision.matmul": {"recipe": "rowwise_with_gw_hp"}}
    runs = [rows, {**rows, **options, "parallel.tensor.size": 2}]
    shape, losses = {"width": 64, "num_heads": 4}, []
    for ranks, given in zip((2, 4), runs, strict=True):
        found = spawn(train_all, ranks, [Run(given, shape, steps=6)], init_process_group=False, timeout_s=120)
        losses.append(found[0][0].losses)
    assert_close(losses[1], losses[0], str(options))


@pytest.mark.wide
@on_ranks(2, timeout_s=120)
def test_what_would_depend_on_the_number_of_ranks_is_refused(rank: int, world_size: int) -> None:
    def run(plan: Any, kind: type[Net] = Plain, **options: Any) -> None:
        given = {"stage": 1, "parallel.tensor.size": 2, "parallel.tensor.plan": plan, "precision.matmul": "fp8"}
        trained(rank // 2, 1, kind(), ZeROStrategy(**nested({**given, **options})))

    with pytest.raises(PlanError, match=r"'blocks.0.replicated' on different tokens or heads.*rowwise_with_gw_hp"):
        run(PLAN, Tokens, **{"parallel.tensor.sequence_parallel": True})
    with pytest.raises(PlanError, match=r"2 tensor-parallel ranks share a part of layer 'blocks.0.mlp.up'"):
        run({"blocks.*.mlp.up": Column(copies=2), "blocks.*.mlp.down": Row()})
    with pytest.raises(PlanError, match=r"'middle' .* 8 of 16 outputs .* multiple of 16"):
        run({"middle": Column(gather=True)}, Narrow)
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    with pytest.raises(PlanError, match="plan in torch's styles"):
        run({"blocks.*.mlp.up": ColwiseParallel(), "blocks.*.mlp.down": RowwiseParallel()})


class Narrow(Plain):
    def build(self) -> None:
        super().build()
        self.first, self.middle = nn.Linear(8, 16), nn.Linear(16, 16)
        self.blocks = nn.ModuleList()
        self.lm_head = nn.Linear(16, 8)
