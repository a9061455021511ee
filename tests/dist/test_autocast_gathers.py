"""Stage 3 gathers in 16 bits what autocast casts: the bits of gathers in fp32, with half of the bytes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from ls_strategy._torch import storage_key
from ls_strategy.config import ActivationOffloadConfig, nested
from ls_strategy.errors import StateError
from ls_strategy.lightning.precision import ZeROPrecision
from ls_strategy.lightning.strategy import ZeROStrategy
from tests.dist import gather_runs
from tests.dist.gather_runs import NVME, OFFLOAD, SETTINGS, ClampsInBlocks, Counts, compare, trained
from tests.dist.ranks import WIDTH, Block, assert_equal, fit, on_ranks, weights


class Plain(Counts):
    precision = "bf16-mixed"


class Convolution(Plain):
    def build(self) -> None:
        super().build()
        self.blocks.append(nn.Sequential(nn.Unflatten(1, (1, WIDTH)), nn.Conv1d(1, 1, 3, padding=1), nn.Flatten()))


class Tied(Plain):
    def build(self) -> None:
        super().build()
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.last.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table(torch.arange(len(x)) % WIDTH))


class Frozen(Plain):
    def build(self) -> None:
        super().build()
        self.first.requires_grad_(False)
        self.blocks[1].requires_grad_(False)


class Twice(Plain):
    """Runs every block twice in a forward, and two forwards in a step."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(block(x) / 2)
        return super().forward(x)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + super().loss([batch[0].flip(0), batch[1]])


class InItsLoss(Plain):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 1e-2 * (self.last.weight.square().mean() + self.blocks[1].wide.weight.abs().mean())


class BeforeBackward(Plain):
    def on_before_backward(self, loss: Tensor) -> None:
        for layer in (self.last, self.blocks[2].wide, self.blocks[0].narrow):
            self.note(layer.weight.norm())


class AfterSteps(Plain):
    """Reads in hooks, and computes without autocast there: a model in fp32."""

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end()
        with torch.no_grad():
            self.note(self(torch.ones(1, WIDTH)).sum())
        self.note(sum(value.sum() for value in self.state_dict().values()))  # type: ignore[arg-type]
        self.note(copy.deepcopy(self.blocks[1]).wide.weight.sum())
        with self.strategy.gathered_parameters(modify=True), torch.no_grad():
            self.blocks[0].wide.weight.mul_(0.5)


class InOtherWays(Plain):
    """A product of autograd's own, a scaled weight, a layer without autocast, a write in the forward."""

    def forward(self, x: Tensor) -> Tensor:
        one, two, three = self.blocks
        with torch.no_grad():
            self.first.weight.clamp_(-0.2, 0.2)
        x = functional.linear(x, one.wide.weight * 0.5, one.wide.bias) @ two.wide.weight
        with torch.autocast("cpu", enabled=False):
            x = three.narrow(three.wide(x.float()))
        return super().forward(x)


class KeepsCasts(Plain):
    """Runs blocks twice where autocast keeps its casts, so that it sums the gradients of both in 16 bits."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
            for block in self.blocks:
                x = block(block(x) / 2)
            return super().forward(x)


class Transformed(Plain):
    """Runs a block inside of `torch.func`."""

    def loss(self, batch: Any) -> Tensor:
        self.note(torch.func.grad(lambda x: self.blocks[0](x).sum())(batch[0]).sum())
        tangent = torch.func.jvp(self.blocks[1], (batch[0],), (torch.ones_like(batch[0]),))[1]
        return super().loss(batch) + tangent.square().mean()


class WritesInBlocks(ClampsInBlocks, Plain):
    """Of weights that autocast casts."""


class HeldInOneCall(Plain):
    """Runs a block twice, once while it is held in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(self.blocks[1](x))
        with self.strategy.gathered_parameters(self.blocks[1]):
            return self.blocks[1](x)


class HeldInBackward(Plain):
    """Holds a block in fp32 in the backward of a forward that has read it in 16 bits."""

    manual = True

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with self.strategy.gathered_parameters(self.blocks[1]):
            super().manual_backward(loss, *args, **kwargs)


class Reparametrized(Plain):
    def build(self) -> None:
        super().build()
        parametrizations.weight_norm(self.blocks[0].wide)


class CompiledBlock(Plain):
    def build(self) -> None:
        super().build()
        self.blocks[0].compile(backend="eager")
        self.blocks[1] = torch.compile(self.blocks[1], backend="eager")


class ByHand(Plain):
    manual = True


ALL = [Plain, Convolution, Tied, Frozen, Twice, InItsLoss, BeforeBackward, AfterSteps, InOtherWays, WritesInBlocks,
       Reparametrized, CompiledBlock]  # fmt: skip


@on_ranks(2)
def test_bits_are_those_of_gathers_in_fp32_and_bytes_are_half(rank: int, world_size: int) -> None:
    fp32, cast = compare(Plain)
    norms = sum(p.numel() for block in cast.blocks for p in block.norm.parameters())
    total = sum(p.numel() for p in cast.parameters())
    # Each rank sends its half; blocks are gathered twice, but the last one, from which backward begins, and the root.
    root = sum(p.numel() for layer in (cast.first, cast.last) for p in layer.parameters())
    block = (total - root) // 3
    sent = (2 * (root + 5 * (block - norms // 3)) + 4 * 5 * norms // 3) // 2
    assert cast.bytes == [pytest.approx(sent, abs=2 * 64 * 4)] * len(cast.bytes)  # padding of each buffer
    assert max(cast.bytes) < 0.6 * min(fp32.bytes)


@on_ranks(2, timeout_s=120)
def test_every_other_use_of_a_weight_has_its_fp32_bits(rank: int, world_size: int) -> None:
    for kind in (InItsLoss, BeforeBackward, AfterSteps, InOtherWays, KeepsCasts, Transformed):
        compare(kind)
    compare(WritesInBlocks, {"activations": "full"}, accumulate_grad_batches=2)
    compare(InOtherWays, NVME)


@on_ranks(2)
def test_forwards_that_run_again_find_weights_that_are_held_in_fp32(rank: int, world_size: int) -> None:
    for kind in (HeldInOneCall, HeldInBackward):
        compare(kind, {"activations": "selective"}, max_epochs=1)


@pytest.mark.wide
@on_ranks(2, timeout_s=120)
def test_weights_that_are_held_in_fp32_have_the_same_bits(rank: int, world_size: int) -> None:
    for options in ({}, {"activations": "full"}, {"activations": "selective", **OFFLOAD}):
        for kind in (HeldInOneCall, HeldInBackward, InOtherWays, WritesInBlocks):
            compare(kind, options)


@pytest.mark.wide
@pytest.mark.parametrize("options", [*SETTINGS, {"parallel.virtual_ranks": 4}], ids=str)
@on_ranks(2, timeout_s=240)
def test_bits_are_the_same_in_every_setting(rank: int, world_size: int, options: dict[str, Any]) -> None:
    for kind in ALL:
        compare(kind, options, gradient_clip_val=0.1)
    if "parallel.virtual_ranks" not in options:  # which refuse it
        compare(ByHand, options)


@pytest.mark.wide
@pytest.mark.parametrize(
    "options",
    [{"sharding.hpz": 2}, {"sharding.shard_size": 2},
     {"parallel.tensor": {"size": 2, "plan": {"blocks.*.wide": "column", "blocks.*.narrow": "row"}}}],
    ids=str,
)  # fmt: skip
@on_ranks(4, timeout_s=240)
def test_bits_are_the_same_over_groups_of_ranks(rank: int, world_size: int, options: dict[str, Any]) -> None:
    if "parallel.tensor" in options:
        compare(EvenWidths, options)
        return
    for kind in (Plain, InItsLoss, Frozen) if "sharding.hpz" in options else (Plain,):
        compare(kind, options)


class EvenWidths(Plain):
    def build(self) -> None:
        super().build()
        for block in self.blocks:
            block.wide, block.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)


@pytest.mark.wide
@on_ranks(2)
def test_bits_are_the_same_with_a_loss_scale(rank: int, world_size: int) -> None:
    for kind in (Plain, InItsLoss):
        runs = []
        for gather in ("fp32", "compute"):
            module = kind()
            options = nested({"sharding.min_unit_numel": 0, "precision.gather": gather})
            fit(ZeROStrategy(3, precision_plugin=ZeROPrecision("16-mixed"), **options), module)
            runs.append((module.losses, weights(module)))
        assert runs[0][0] == runs[1][0]
        assert_equal(runs[1][1], runs[0][1], str(kind))


class Measured(Plain):
    """Looks at the memory of a block in its forward, and at what autograd saves."""

    def build(self) -> None:
        super().build()
        self.blocks[0].register_forward_hook(self.look)

    def look(self, block: nn.Module, _: Any, output: Tensor) -> None:
        flats = [f for f in self.strategy.engine.flats if "blocks.0" in f.name]
        self.held = {f.layout.slots[0].name: f.full.untyped_storage().nbytes() for f in flats}
        self.gathered = {storage_key(f.wire.values) for f in flats if f.wire is not None}
        self.saved = list(saved_matrices(output.grad_fn))


def saved_matrices(node: Any) -> Iterator[Tensor]:
    """Yield the weights that products behind a node have saved."""
    if getattr(node, "_saved_mat2", None) is not None:
        yield node._saved_mat2
    for before, _ in () if node is None else node.next_functions:
        yield from saved_matrices(before)


@on_ranks(2)
def test_a_block_holds_16_bits_and_autograd_saves_no_copy(rank: int, world_size: int) -> None:
    module = trained(Measured(), "compute", max_steps=1)
    assert sorted(size > 0 for size in module.held.values()) == [False, True]  # linear layers; the norm
    shapes = {(WIDTH, 2 * WIDTH + 1), (2 * WIDTH + 1, WIDTH)}  # of no other layer
    saved = [t for t in module.saved if tuple(t.shape) in shapes]
    assert {tuple(t.shape) for t in saved} == shapes
    assert all(storage_key(t) in module.gathered for t in saved)


class OldGraph(gather_runs.OldGraph, Plain):
    """Of these weights."""


@on_ranks(2)
def test_a_backward_through_weights_of_before_a_step_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(StateError, match="weights were changed"):
        trained(OldGraph(), "compute")
    trained(OldGraph(), "fp32")  # which keeps a copy of every weight


class Gated(Block):
    """Leaves a second result in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.extra = self.gate(x).softmax(-1).square().mean()
        return out


class InAttributes(Plain):
    def build(self) -> None:
        super().build()
        self.blocks = nn.ModuleList([Gated() for _ in range(3)])

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + sum(block.extra for block in self.blocks)


class WritesBeforeBackward(Plain):
    def on_before_backward(self, loss: Tensor) -> None:
        with torch.no_grad():
            self.blocks[1].wide.weight.mul_(0.5)
            self.last.weight.mul_(0.5)


class OwnHooks(gather_runs.OwnHooks, WritesBeforeBackward):
    """Of weights that are written to meanwhile."""


class OwnHooksOldGraph(OwnHooks, OldGraph):
    """Goes back through an old graph besides."""


class OwnHooksOutOfBlocks(OwnHooks, InAttributes):
    """A result leaves a block by an attribute, so that backward does not gather the block again."""


class Packs(Plain):
    def on_train_end(self) -> None:
        self.packed = self.strategy.activations.metrics()["zero_activations/packed_bytes"]


@on_ranks(2)
def test_hooks_of_users_on_what_autograd_saves_get_copies(rank: int, world_size: int) -> None:
    for kind in (OwnHooks, OwnHooksOldGraph, OwnHooksOutOfBlocks):
        compare(kind)
    for precision in ("32-true", "bf16-true"):
        sharded, replicated = OwnHooksOutOfBlocks(), OwnHooksOutOfBlocks()
        trained(sharded, "compute", precision=precision)
        fit(ZeROStrategy(2), replicated, precision=precision)
        assert sharded.losses == replicated.losses
        assert_equal(weights(sharded), weights(replicated), precision)


@on_ranks(2)
def test_offloaded_activations_keep_the_check_of_versions(rank: int, world_size: int) -> None:
    """And weights in 16 bits are not copied to the host with them."""
    offload = {"activations.offload": ActivationOffloadConfig(tier="cpu", min_bytes=0, in_flight_bytes=0)}
    with pytest.raises(StateError, match="weights were changed"):
        trained(WritesBeforeBackward(), "compute", offload)
    fp32, cast = (trained(Packs(), gather, offload).packed for gather in ("fp32", "compute"))
    assert 0 < cast < fp32


@on_ranks(2)
def test_a_backward_while_its_weights_are_in_flight_is_refused(rank: int, world_size: int) -> None:
    """Its block is prefetched, so that there is memory, but not yet its values."""
    for precision in ("bf16-mixed", "32-true", "bf16-true"):
        for prefetch in (0, 1, 3):
            with pytest.raises(StateError, match="already released"):
                trained(InAttributes(), "compute", {"sharding.prefetch_units": prefetch}, precision=precision)
    trained(InAttributes(), "fp32")


@on_ranks(2)
def test_gradients_in_16_bits_are_exact_and_half_of_the_bytes(rank: int, world_size: int) -> None:
    """A weight that is used once in a backward pass has a gradient of 16 bits, and sums are in fp32."""
    for trainer in ({}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}):
        runs = []
        for dtype in ("fp32", "compute"):
            module = trained(Plain(), "compute", {"precision.reduce_dtype": dtype}, **trainer)
            runs.append((module.losses, weights(module), module.traffic["reduce_scatter"]))
        assert runs[0][0] == runs[1][0]
        assert_equal(runs[1][1], runs[0][1], str(trainer))
        assert runs[1][2] < 0.6 * runs[0][2]
    twice = [trained(Twice(), "compute", {"precision.reduce_dtype": dtype}) for dtype in ("fp32", "compute")]
    assert twice[0].losses != twice[1].losses  # rounded
    assert twice[0].losses == pytest.approx(twice[1].losses, rel=2**-7)
