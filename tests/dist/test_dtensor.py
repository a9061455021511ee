"""Modules sharded by torch's `parallelize_module`, against the same module in one process."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ls_strategy.distributed.comm import make_comm
from ls_strategy.distributed.mesh import MeshShape, make_mesh
from ls_strategy.errors import PlanError, StateError
from ls_strategy.parallel.tensor.dtensor import Localized, has_dtensors, localize
from ls_strategy.testing import spawn
from ls_strategy.zero.parts import full_of, part_of
from tests.dist.ranks import on_ranks

pytestmark = pytest.mark.wide

WIDTH, HEADS, HIDDEN, TOKENS, LENGTH = 16, 4, 24, 32, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.wk = nn.Linear(WIDTH, WIDTH, bias=False)  # the gradient of a bias is zero but for rounding

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, hidden, bias=False)
        self.w2 = nn.Linear(hidden, WIDTH)
        self.w3 = nn.Linear(WIDTH, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.attention = Attention()
        self.feed_forward = FeedForward(hidden)
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.ffn_norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    """Llama's shape."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList([Layer(hidden) for _ in range(2)])
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, TOKENS, bias=False)
        self.recompute = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.output(self.norm(x))


# --- ways to shard it -------------------------------------------------------------------------------------------------


def column_row(model: Decoder, mesh: DeviceMesh) -> None:
    """Norms and embedding stay plain tensors."""
    column, row = ColwiseParallel, RowwiseParallel
    for layer in model.layers:
        parallelize_module(
            layer,
            mesh,
            {
                **{f"attention.{name}": column() for name in ("wq", "wk", "wv")},
                "attention.wo": row(),
                "feed_forward.w1": column(),
                "feed_forward.w2": row(),
                "feed_forward.w3": column(),
            },
        )


def sequence(model: Decoder, mesh: DeviceMesh) -> None:
    """Everything is a DTensor, norms work on parts of the sequence, and the logits stay sharded."""
    plan: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    for layer in model.layers:
        inputs = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        parallelize_module(
            layer,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(**inputs),
                **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(**inputs),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward.w3": ColwiseParallel(),
            },
        )


def uneven(model: Decoder, mesh: DeviceMesh) -> None:
    """Rows whose number is not divisible by the ranks."""
    for layer in model.layers:
        parallelize_module(
            layer.get_submodule("feed_forward"),
            mesh,
            {
                "w1": ColwiseParallel(use_local_output=False),
                "w2": RowwiseParallel(),
                "w3": ColwiseParallel(use_local_output=False),
            },
        )


def tied(model: Decoder, mesh: DeviceMesh) -> None:
    """One parameter in two modules."""
    plan: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    model.output.weight = model.embed.weight


DIVISIONS: dict[str, tuple[Callable[[Decoder, DeviceMesh], None], int]] = {
    "column_row": (column_row, HIDDEN),
    "sequence": (sequence, HIDDEN),
    "uneven": (uneven, 10),
    "tied": (tied, HIDDEN),
}


class Divided:
    """A model over the tensor-parallel ranks, and what its gradients are in full."""

    def __init__(self, name: str, world_size: int, tensor: int) -> None:
        divide, hidden = DIVISIONS[name]
        self.axis = make_mesh(MeshShape.of(world_size, tensor=tensor), make_comm()).tensor
        shape = (world_size // tensor, tensor)
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data_parallel", "tensor_parallel"))
        self.model = Decoder(hidden).double()
        if name == "tied":
            self.model.output.weight = self.model.embed.weight
        divide(self.model, self.mesh["tensor_parallel"])
        assert has_dtensors(self.model)
        self.localized: Localized = localize(self.model, self.axis)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Of a batch; backward has run."""
        with loss_parallel():
            loss = functional.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
        return loss.full_tensor() if isinstance(loss, DTensor) else loss.detach()

    def gradients(self) -> dict[str, Tensor]:
        """Whole ones."""
        found: dict[str, Tensor] = {}
        for name, param in self.model.named_parameters():
            assert param.grad is not None, name
            found[name] = full_of(param.grad, self.localized.parts.get(id(param)), self.axis)
        return found


def batch(seed: int = 3) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(TOKENS, (2, 2, LENGTH), generator=torch.Generator().manual_seed(seed))
    return tokens[0], tokens[1]


def trusted(name: str) -> Decoder:
    model = Decoder(DIVISIONS[name][1]).double()
    if name == "tied":
        model.output.weight = model.embed.weight
    return model


def error(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


def compare(rank: int, world_size: int, name: str, tensor: int) -> None:
    """Loss and gradients, a step, loss and gradients again; fp64, so that a missing term cannot pass for rounding."""
    reference, ours = trusted(name), Divided(name, world_size, tensor)
    assert list(dict(ours.model.named_parameters())) == list(dict(reference.named_parameters()))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (reference, ours.model)]
    losses: list[float] = []
    for _ in range(2):
        expected = functional.cross_entropy(reference(batch()[0]).flatten(0, 1), batch()[1].flatten())
        expected.backward()
        loss = ours.loss(*batch())
        assert abs(loss.item() - expected.item()) <= 1e-13 * expected.item()
        found = ours.gradients()
        for key, param in reference.named_parameters():
            assert param.grad is not None
            assert error(found[key], param.grad) <= 1e-12, key
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert losses[1] < losses[0] - 0.01
    for model in (reference, ours.model):
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        assert not any("weight" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("name", DIVISIONS)
@pytest.mark.parametrize("tensor", [2, 4])
def test_equals_one_process(name: str, tensor: int) -> None:
    spawn(compare, tensor, name, tensor)


def test_two_by_two() -> None:
    spawn(compare, 4, "sequence", 2)


@on_ranks(2, timeout_s=120, init_process_group=True)
def test_what_else_a_module_goes_through(rank: int, world_size: int) -> None:
    """Replicated gradients, recomputation, copies, exceptions, going back."""
    ours = Divided("sequence", world_size, world_size)
    loss = ours.loss(*batch())
    first = {name: p.grad for name, p in ours.model.named_parameters()}
    replicated = [n for n, p in ours.model.named_parameters() if id(p) not in ours.localized.parts]
    assert len([n for n in replicated if "norm" in n]) == 7  # 2 RMS norms, 2 layer norms with bias, the last norm
    for name in replicated:
        grad = first[name]
        assert grad is not None
        everyones = ours.axis.all_gather(grad[None].contiguous(), 0)
        assert all(torch.equal(g, grad) for g in everyones), name

    ours.model.zero_grad()
    ours.model.recompute = True
    assert torch.equal(ours.loss(*batch()), loss)
    for name, p in ours.model.named_parameters():
        assert torch.equal(p.grad, first[name]), name  # type: ignore[arg-type]
    ours.model.recompute = False

    twin = copy.deepcopy(ours.model)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert twin(batch()[0]).full_tensor().abs().max() == 0
    assert ours.model(batch()[0]).full_tensor().abs().max() > 0
    layer = nn.Linear(4, 4)  # torch.save refuses the hooks of parallelize_module by itself
    layer.weight = nn.Parameter(distribute_tensor(layer.weight, ours.mesh["tensor_parallel"], [Shard(0)]))
    localize(layer, ours.axis)
    with pytest.raises(StateError, match="cannot be pickled"):
        torch.save(layer, io.BytesIO())

    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    handle = ours.model.output.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        ours.model(batch()[0])
    assert "weight" not in ours.model.output.__dict__
    handle.remove()

    values = {name: p.detach().clone() for name, p in ours.model.named_parameters()}
    ours.localized.remove()
    assert all(isinstance(p, DTensor) for p in ours.model.parameters())
    for name, p in ours.model.named_parameters():
        assert torch.equal(p.detach().to_local(), values[name]), name  # type: ignore[attr-defined]
    assert torch.equal(ours.loss(*batch()), loss)


def parts(rank: int, world_size: int) -> list[tuple[int, ...]]:
    """Shapes of uneven shards; every part is what torch cut."""
    ours, whole = Divided("uneven", world_size, world_size), dict(trusted("uneven").named_parameters())
    for name, p in ours.model.named_parameters():
        assert torch.equal(part_of(whole[name], ours.localized.parts.get(id(p))), p)
    return [tuple(p.shape) for n, p in ours.model.named_parameters() if n.startswith("layers.0.feed")]


def test_parts_are_those_of_torch() -> None:
    shapes = spawn(parts, 4)
    assert shapes[0] == [(3, WIDTH), (WIDTH, 3), (WIDTH,), (3, WIDTH)]
    assert shapes[3] == [(1, WIDTH), (WIDTH, 1), (WIDTH,), (1, WIDTH)]


@on_ranks(4, timeout_s=120, init_process_group=True)
def test_layouts_without_a_counterpart_are_refused(rank: int, world_size: int) -> None:
    """Every layout that is not supported is refused, and the module stays as it was."""
    axis = make_mesh(MeshShape.of(world_size, tensor=2), make_comm()).tensor
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    weight = torch.ones(4, 4)

    def both() -> nn.Module:
        model = parallelize_module(nn.Linear(4, 4), mesh["tensor_parallel"], ColwiseParallel())
        fully_shard(model, mesh=mesh["data_parallel"])
        return model

    def on(where: DeviceMesh, *placements: Any) -> nn.Module:
        model = nn.Linear(4, 4)
        model.weight = nn.Parameter(distribute_tensor(weight, where, placements))
        return model

    def partial() -> nn.Module:
        model = nn.Linear(4, 4)
        model.weight = nn.Parameter(DTensor.from_local(weight, mesh["tensor_parallel"], [Partial()]))
        return model

    def listed() -> nn.Module:
        return nn.ParameterList([nn.Parameter(distribute_tensor(weight, mesh["tensor_parallel"], [Shard(0)]))])

    cases: list[Callable[[], nn.Module]] = [
        both,
        lambda: on(mesh["data_parallel"], Shard(0)),
        lambda: on(mesh, Replicate(), Shard(0)),
        partial,
        listed,
    ]
    messages: list[str] = []
    for case in cases:
        model = case()
        with pytest.raises(PlanError) as caught:
            localize(model, axis)
        assert has_dtensors(model)
        messages.append(str(caught.value))
    dist.barrier()
    expected = ("fully_shard", "leave the data-parallel", "along that one dimension", "Partial", "ParameterList")
    for message, part in zip(messages, expected, strict=True):
        assert part in message
