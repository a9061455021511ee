"""Losses and gradients of sharded logits against those of full logits on one process."""

from __future__ import annotations

import copy
import functools
import importlib.util
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint

from ls_strategy.distributed.axis import Axis
from ls_strategy.distributed.comm import Comm, make_comm
from ls_strategy.errors import StateError
from ls_strategy.layout import TensorPart
from ls_strategy.parallel.logits import ShardedLogits, gather, wrap_sequence, wrap_vocabulary
from ls_strategy.testing import spawn

pytestmark = pytest.mark.wide

B, T, V, WIDTH = 2, 8, 13, 5
IGNORED = -100
HUGGING_FACE = importlib.util.find_spec("transformers") is not None


def hidden() -> Tensor:
    return torch.randn(B, T, WIDTH, generator=torch.Generator().manual_seed(1))


def head() -> Tensor:
    return torch.randn(V, WIDTH, generator=torch.Generator().manual_seed(2)) * 2


def targets() -> Tensor:
    result = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(3))
    result[0, 2] = result[1, 6] = IGNORED
    return result


# --- losses, as users write them --------------------------------------------------------------------------------------


def recipe(logits: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), targets().flatten())


def hugging_face(logits: Tensor) -> Tensor:
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss(logits, targets(), vocab_size=V)


def shifted(logits: Tensor) -> Tensor:
    shift = logits[..., :-1, :].contiguous()
    return torch.nn.CrossEntropyLoss()(shift.view(-1, shift.size(-1)), targets()[..., 1:].reshape(-1))


def classes_second(logits: Tensor) -> Tensor:
    return functional.cross_entropy(logits.transpose(1, 2), targets())


def summed(logits: Tensor) -> Tensor:
    return functional.cross_entropy(logits.reshape(-1, V), targets().view(-1), reduction="sum") / 7


def every_token(logits: Tensor) -> Tensor:
    losses = functional.cross_entropy(logits.view(-1, V), targets().view(-1), reduction="none")
    return (losses * torch.linspace(0, 1, B * T)).mean()


def smoothed(logits: Tensor) -> Tensor:
    return functional.cross_entropy(logits.view(-1, V), targets().view(-1), label_smoothing=0.1)


def weighted(logits: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2, V, dtype=logits.dtype)
    return functional.cross_entropy(logits.view(-1, V), targets().view(-1), weight)


def weighted_and_smoothed(logits: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2, V, dtype=logits.dtype)
    return functional.cross_entropy(logits.view(-1, V), targets().view(-1), weight, label_smoothing=0.2)


def probabilities(logits: Tensor) -> Tensor:
    wanted = torch.rand(B * T, V, generator=torch.Generator().manual_seed(4)).softmax(-1)
    return functional.cross_entropy(logits.flatten(0, 1), wanted)


def capped(logits: Tensor) -> Tensor:
    return recipe(torch.tanh(logits / 3.0) * 3.0 + 0.5)


def z_loss(logits: Tensor) -> Tensor:
    return recipe(logits) + 1e-2 * logits.logsumexp(-1).square().mean()


def cropped(logits: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, 1:7, :11].reshape(-1, 11), targets()[:, 1:7].clamp(-100, 10).flatten())


def last_token(logits: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, -1], targets()[:, -1])


def picked(logits: Tensor) -> Tensor:
    return logits[targets() >= 0].log_softmax(-1)[:, 3].mean() + logits.permute(2, 0, 1)[4].mean()


class OwnCrossEntropy(torch.autograd.Function):
    """A user's own kernel, which no ``__torch_function__`` sees."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        p = logits.softmax(-1)
        ctx.save_for_backward(p, target)
        return -p.gather(-1, target[..., None]).log().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        p, target = ctx.saved_tensors
        return grad * (p - functional.one_hot(target, V)) / target.numel(), None


def own_kernel(logits: Tensor) -> Tensor:
    return OwnCrossEntropy.apply(logits, targets().clamp(min=0))


LOSSES: tuple[Callable[[Tensor], Tensor], ...] = (
    recipe, shifted, classes_second, summed, every_token, smoothed, weighted, weighted_and_smoothed,
    probabilities, capped, z_loss, cropped, last_token, picked, own_kernel,
)  # fmt: skip
if HUGGING_FACE:
    LOSSES += (hugging_face,)


# --- on the ranks -----------------------------------------------------------------------------------------------------


@dataclass
class Where:
    """The axes a test shards along."""

    tensor: Axis
    sequence: Axis

    @classmethod
    def of(cls, world_size: int, how: str) -> Where:
        comm = make_comm()
        if how == "both":  # 4 ranks: tensor neighbours, as in the mesh
            groups = [torch.distributed.new_group(r) for r in ((0, 1), (2, 3), (0, 2), (1, 3))]
            tensor, sequence = groups[comm.rank // 2], groups[2 + comm.rank % 2]
            return cls(Axis("tensor", Comm(tensor, None)), Axis("sequence", Comm(sequence, None)))
        alone = Axis("alone")
        axis = Axis(how, comm)
        return cls(axis, alone) if how == "tensor" else cls(alone, axis)

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """As the layers make them: own tokens times own columns."""
        part = TensorPart.cut((V, WIDTH), 0, self.tensor.rank, self.tensor.size)
        ((start, length),) = part.runs
        mine = x.narrow(1, self.sequence.rank * T // self.sequence.size, T // self.sequence.size)
        local = mine @ weight[start : start + length].T
        return wrap_sequence(wrap_vocabulary(local, self.tensor, V, start), self.sequence, T)

    def full_grads(self, grads: list[Tensor]) -> list[Tensor]:
        """Sum what the tensor ranks add, average over the sequence ranks."""
        summed = [self.tensor.all_reduce(g) for g in grads]
        return [self.sequence.all_reduce(g) / self.sequence.size for g in summed]


def run(where: Where | None, loss: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    x, weight = (t.to(dtype).requires_grad_() for t in (hidden(), head()))
    logits = x @ weight.T if where is None else where.logits(x, weight)
    value = loss(logits)
    assert type(value) is Tensor
    grads = list(torch.autograd.grad(value, (x, weight)))
    return [value.detach(), *(grads if where is None else where.full_grads(grads))]


def all_losses(rank: int, world_size: int, how: str) -> dict[str, list[Tensor]]:
    where = Where.of(world_size, how)
    result = {f"{loss.__name__} {d}": run(where, loss, d) for loss in LOSSES for d in (torch.float32, torch.float64)}
    result["bf16"] = run(where, recipe, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        result["autocast"] = run(where, shifted)
    return result


HOWS = [("tensor", 2), ("tensor", 4), ("sequence", 2), ("sequence", 4), ("both", 4)]


@functools.cache
def on_ranks(how: str, world_size: int) -> list[dict[str, list[Tensor]]]:
    return spawn(all_losses, world_size, how, timeout_s=100)


def worst(actual: list[Tensor], expected: list[Tensor]) -> float:
    return max(
        ((a.double() - e.double()).abs().max() / e.double().abs().max()).item()
        for a, e in zip(actual, expected, strict=True)
    )


@pytest.mark.dist
@pytest.mark.parametrize(("how", "world_size"), HOWS)
def test_losses_and_gradients_are_those_of_whole_logits(how, world_size) -> None:
    """13 columns on 2 and 4 ranks are not equally many."""
    results = on_ranks(how, world_size)
    for loss in LOSSES:
        for dtype in (torch.float32, torch.float64):
            name = f"{loss.__name__} {dtype}"
            expected = run(None, loss, dtype)
            exact = dtype == torch.float64 and loss not in (recipe, hugging_face, capped, z_loss)  # .float()
            for rank in results:
                error = worst(rank[name], expected)
                assert error <= (1e-14 if exact else 1e-6), f"{name}: {error:.3g}"
                assert torch.equal(rank[name][0], results[0][name][0]), f"{name}: ranks have different losses"


@pytest.mark.dist
@pytest.mark.parametrize(("how", "world_size"), HOWS)
def test_sixteen_bit(how, world_size) -> None:
    """The head's gradients are rounded to bf16 per rank before they are added: two roundings instead of one."""
    for rank in on_ranks(how, world_size):
        assert worst(rank["bf16"][:1], run(None, recipe, torch.bfloat16)[:1]) <= 1e-6
        assert worst(rank["bf16"], run(None, recipe, torch.bfloat16)) <= 2**-6
        with torch.autocast("cpu", torch.bfloat16):
            expected = run(None, shifted)
        assert rank["autocast"][0].dtype == expected[0].dtype
        assert worst(rank["autocast"], expected) <= 2**-6


# --- what a rank holds ------------------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = [t.numel() for t in tree_iter(result) if type(t) is Tensor and t.device.type != "meta"]
        self.numel = max([self.numel, *made])
        return result


def memory_and_traffic(rank: int, world_size: int) -> dict[str, Any]:
    comm = make_comm()
    axis = Axis("tensor", comm)
    tokens, columns = 64, 4096
    local = torch.randn(tokens, columns // world_size, requires_grad=True)
    target = torch.randint(columns, (tokens,), generator=torch.Generator().manual_seed(0))
    logits = wrap_vocabulary(local, axis, columns, rank * columns // world_size)
    comm.traffic.reset()
    with LargestTensor() as largest:
        loss = functional.cross_entropy(logits.float(), target)
        sent = dict(comm.traffic.elements)
        loss.backward()
    logits.softmax(-1)
    return {"largest": largest.numel, "sent": sent, "after": dict(comm.traffic.elements)}


@pytest.mark.dist
def test_no_rank_holds_all_logits() -> None:
    for n in (2, 4):
        for rank in spawn(memory_and_traffic, n, timeout_s=60):
            assert rank["largest"] == 64 * 4096 // n
            assert rank["sent"] == {"all_gather": 64 * (n - 1), "all_reduce": 3 * 64 * 2 * (n - 1) // n}
            assert rank["after"]["all_gather"] == rank["sent"]["all_gather"] + 64 * 4096 // n * (n - 1)


# --- the tensor itself ------------------------------------------------------------------------------------------------


def looks_whole(rank: int, world_size: int) -> None:
    where = Where.of(world_size, "tensor")
    full = hidden() @ head().T
    logits = where.logits(hidden(), head().requires_grad_())
    assert isinstance(logits, ShardedLogits)
    assert (tuple(logits.shape), logits.size(-1), logits.dim(), len(logits), logits.numel()) == (
        (B, T, V), V, 3, B, B * T * V,
    )  # fmt: skip
    assert logits.requires_grad
    assert not logits.detach().requires_grad
    with torch.no_grad():
        assert not logits.float().requires_grad
    assert (logits.dtype, logits.bfloat16().dtype, logits.device.type) == (torch.float32, torch.bfloat16, "cpu")
    for kept in (
        logits.float(),
        logits * 2,
        1 - logits,
        logits.view(-1, V),
        logits[:, :-1],
        logits[..., None, :],
        -logits,
    ):
        assert isinstance(kept, ShardedLogits), kept
    close = functools.partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6)
    for f in (
        lambda x: x * 2, lambda x: 1 - x, lambda x: x.view(-1, V)[3], lambda x: x[:, 1:-1], lambda x: x[0, 2:4],
        lambda x: x[..., 3:9], lambda x: x[..., 5], lambda x: x.softmax(-1), lambda x: x.transpose(0, 2),
        lambda x: x.T if x.dim() == 2 else x.mT, lambda x: x.permute(1, 2, 0)[:, None], lambda x: x.flatten(),
        lambda x: x.argmax(-1), lambda x: x.argmax(), lambda x: x.argmax(dim=1, keepdim=True), lambda x: x.max(-1)[0],
        lambda x: torch.cat([x, x], 1), lambda x: x + x, lambda x: torch.zeros(B, T, V) + x, lambda x: x**2,
        lambda x: x.data, lambda x: x.topk(3).values, lambda x: x[:, ::2], lambda x: x[torch.tensor([1])],
        lambda x: x.unflatten(-1, (13, 1)), lambda x: x.unsqueeze(0).squeeze(0), lambda x: torch.stack([x[0], x[1]]),
    ):  # fmt: skip
        actual = gather(f(logits))
        assert type(actual) is Tensor
        close(actual, f(full))
    close(torch.as_tensor(logits.detach().numpy()), full)
    close(torch.tensor(logits.detach().tolist()), full)
    assert logits[0, 0, 3].item() == pytest.approx(full[0, 0, 3].item(), rel=1e-5)


def leaves_no_trap(rank: int, world_size: int) -> None:
    where = Where.of(world_size, "tensor")
    logits = where.logits(hidden(), head().requires_grad_())
    mask = logits > 0
    if rank == 0:  # printing alone must not wait for the others
        assert f"{logits}" == str(logits) == repr(logits)
        assert "shape=(2, 8, 13)" in repr(logits)
        assert hash(logits) == hash(logits)
        for bad in (
            lambda: pickle.dumps(logits), lambda: torch.save(logits, io.BytesIO()), lambda: logits.mul_(2),
            lambda: logits.__setitem__(0, 0), lambda: logits.retain_grad(), lambda: logits.masked_fill_(mask, 0),
            lambda: functional.relu(logits, inplace=True), lambda: torch.mul(logits, 2, out=logits),
            lambda: logits.data_ptr(), lambda: torch.autograd.grad(torch.zeros(()), logits),
        ):  # fmt: skip
            with pytest.raises(StateError, match=r"sharded over ranks"):
                bad()
        x = logits.detach()
        with pytest.raises(StateError, match="out of place"):
            x += 1
    copied = copy.deepcopy(logits.detach())
    assert torch.equal(gather(copied), gather(logits))
    with pytest.raises(IndexError, match="out of bounds"):
        functional.cross_entropy(logits.view(-1, V), torch.full((B * T,), V))
    seen: list[Tensor] = []
    logits.register_hook(seen.append)
    recipe(logits).backward()
    assert len(seen) == 1


def gathers_trees(rank: int, world_size: int) -> None:
    where = Where.of(world_size, "tensor")
    logits = where.logits(hidden(), head())
    tree = gather({"a": [logits, 3], "holder": Holder(logits), "s": "text"})
    found_all = [tree["a"][0], tree["holder"].logits]
    if HUGGING_FACE:
        from transformers.modeling_outputs import CausalLMOutput

        out = gather(CausalLMOutput(logits=logits))
        found_all += [out.logits, out["logits"]]
    for found in found_all:
        assert type(found) is Tensor
        torch.testing.assert_close(found, hidden() @ head().T)
    assert (tree["a"][1], tree["s"]) == (3, "text")


@dataclass(frozen=True)
class Holder:
    """A step's result."""

    logits: Tensor


def odd_surroundings(rank: int, world_size: int) -> None:
    where = Where.of(world_size, "tensor")
    expected = run(None, recipe)
    with torch.inference_mode():
        assert torch.allclose(recipe(where.logits(hidden(), head())), expected[0])
    x, weight = hidden().requires_grad_(), head().requires_grad_()
    loss = recipe(where.logits(checkpoint(lambda h: (h * 2).div(2), x, use_reentrant=False), weight))
    grads = where.full_grads(list(torch.autograd.grad(loss, (x, weight))))
    assert worst([loss.detach(), *grads], expected) <= 1e-6
    x, weight = hidden().requires_grad_(), head().requires_grad_()
    loss = checkpoint(lambda h: recipe(where.logits(h, weight)), x, use_reentrant=False)
    grads = where.full_grads(list(torch.autograd.grad(loss, (x, weight))))
    assert worst([loss.detach(), *grads], expected) <= 1e-6


def compiled(rank: int, world_size: int) -> None:
    where = Where.of(world_size, "tensor")
    expected = run(None, recipe)
    compile_ = functools.partial(torch.compile, backend="aot_eager")
    assert worst(run(where, compile_(recipe)), expected) <= 1e-6
    assert worst(run(where, compile_(z_loss)), run(None, z_loss)) <= 1e-6
    x, weight = hidden().requires_grad_(), head().requires_grad_()

    def everything(h: Tensor) -> Tensor:
        return recipe(where.logits(h.sin(), weight))

    loss = compile_(everything)(x)
    assert torch.allclose(loss, everything(x))


@pytest.mark.dist
@pytest.mark.parametrize(
    "body",
    [looks_whole, leaves_no_trap, gathers_trees, odd_surroundings, pytest.param(compiled, marks=pytest.mark.slow)],
)
def test_the_tensor(body) -> None:
    spawn(body, 2, timeout_s=100)
