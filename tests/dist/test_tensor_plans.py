"""Plans for plain torch modules, resolved and applied, against the same module in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional

from ls_strategy.distributed.axis import Axis
from ls_strategy.distributed.comm import make_comm
from ls_strategy.layout import TensorPart
from ls_strategy.parallel.tensor.dtensor import parallelize
from ls_strategy.parallel.tensor.plans import resolve_tensor_plan
from ls_strategy.parallel.tensor.shard import apply_tensor_parallel
from ls_strategy.testing import spawn
from ls_strategy.zero.parts import full_of
from tests.unit.test_parallel_plan_from_names import Attention, Decoder, JointOnly

LENGTH, TOKENS = 8, 32


class Normed(Attention):
    """A norm on every head of the queries, with the same weights for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm = nn.RMSNorm(self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_norm(self.wq(x).unflatten(-1, (self.n_heads, self.head_dim))).transpose(1, 2)
        k, v = (w(x).unflatten(-1, (self.n_kv_heads, self.head_dim)).transpose(1, 2) for w in (self.wk, self.wv))
        k, v = k.repeat_interleave(self.n_rep, 1), v.repeat_interleave(self.n_rep, 1)
        return self.wo(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


TORCH = {
    "layers.*.feed_forward.w1": ColwiseParallel(),
    "layers.*.feed_forward.w2": RowwiseParallel(),
    "layers.*.feed_forward.w3": ColwiseParallel(),
}
CASES: dict[str, tuple[type[nn.Module], Any]] = {
    "heads as attributes": (Attention, "auto"),
    "norm of each head": (Normed, "auto"),
    "width as attribute": (JointOnly, "auto"),
    "torch's styles": (Attention, TORCH),
}


def loss_of(model: nn.Module) -> Tensor:
    tokens = torch.randint(TOKENS, (2, 2, LENGTH), generator=torch.Generator().manual_seed(3))
    loss = functional.cross_entropy(model(tokens[0]).flatten(0, 1), tokens[1].flatten())
    loss.backward()
    return loss.detach()


def compare_all(rank: int, world_size: int) -> None:
    axis = Axis("tensor", make_comm())
    for name in CASES:
        compare(name, axis, world_size)


def compare(name: str, axis: Axis, world_size: int) -> None:
    attention, given = CASES[name]
    reference, ours = Decoder(attention).double(), Decoder(attention).double()
    plan = resolve_tensor_plan(ours, given, world_size)
    parts: dict[int, TensorPart]
    if plan.torch_styles:
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor_parallel",))
        parts = parallelize(ours, plan.torch_styles, mesh, axis).parts
    else:
        parts = apply_tensor_parallel(ours, plan.styles, axis).parts
    assert len(parts) >= 8
    expected = loss_of(reference)
    assert abs(loss_of(ours) - expected) <= 1e-13 * expected
    gradients = {key: p.grad for key, p in reference.named_parameters()}
    largest = max(g.abs().max().item() for g in gradients.values() if g is not None)
    for key, p in ours.named_parameters():
        theirs = gradients[key]
        assert p.grad is not None
        assert theirs is not None
        error = (full_of(p.grad, parts.get(id(p)), axis) - theirs).abs().max().item()
        assert error <= 1e-12 * max(theirs.abs().max().item(), 0.01 * largest), f"{name}: {key}"


@pytest.mark.sample(1)
@pytest.mark.parametrize("world_size", [2, 4])
def test_equals_one_process(world_size: int) -> None:
    spawn(compare_all, world_size)
