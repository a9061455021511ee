"""Offloaded activations: no bit changes, bounds hold, and memory comes back however the graph ends."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from ls_strategy.activations.apply import Activations
from ls_strategy.activations.offload import ActivationOffload
from ls_strategy.activations.saved import SavedTensors, is_eligible, region_of
from ls_strategy.activations.storage import FileSpace, NVMeFolder
from ls_strategy.config import ActivationOffloadConfig, NVMeIOConfig, RecomputeConfig
from ls_strategy.distributed.axis import Axis
from ls_strategy.errors import ConfigError, LSError, StateError
from ls_strategy.tiers.buffers import PAGE
from ls_strategy.tiers.file_io import DirectFile, NVMeError

CPU = torch.device("cpu")
WIDTH = 64
TIERS = ("cpu", "nvme")
ACTIVATION = 4 * 16 * WIDTH * 4
"""Bytes of a block's input."""


class Block(nn.Module):
    """Attention whose queries, keys and values are slices of one tensor, and a wide layer; dropout in both."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH))
        self.register_buffer("shift", torch.randn(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        h = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        x = x + h.transpose(1, 2).flatten(-2) * self.shift
        return x + self.wide(x)


class Net(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def train(model: nn.Module, activations: Activations | None = None, steps: int = 2) -> list[Tensor]:
    """Losses and gradients."""
    results = []
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(4, 16, WIDTH, requires_grad=True)
        with nullcontext() if activations is None else activations.around_forward():
            loss = model(x)
        loss.backward()
        assert x.grad is not None
        results += [loss.detach(), x.grad]
    return [*results, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.fixture
def drive(tmp_path: Path) -> NVMeFolder:
    return NVMeFolder(str(tmp_path / "nvme"), NVMeIOConfig(block_bytes=PAGE, parallelism=2), allow_ram=True)


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ends the I/O threads of what a test has made."""
    made: list[ActivationOffload] = []
    make = ActivationOffload.__init__

    def remember(self: ActivationOffload, *args: Any) -> None:
        make(self, *args)
        made.append(self)

    monkeypatch.setattr(ActivationOffload, "__init__", remember)
    yield
    for offload in made:
        offload.close()
        offload.storage.close()


@pytest.fixture(autouse=True)
def inductor_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch sets this variable when it first looks for a cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def options(tier: Any = "cpu", **changes: Any) -> ActivationOffloadConfig:
    return ActivationOffloadConfig(
        **{"tier": tier, "min_bytes": 1024, "in_flight_bytes": 3 * ACTIVATION, "staging_bytes": 4 * ACTIVATION}
        | changes
    )


def same(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return len(actual) == len(expected) and all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


RECOMPUTE = {
    "alone": None,
    "full": RecomputeConfig(policy="full"),
    "selective": RecomputeConfig(policy="selective"),
    "every 3": RecomputeConfig(policy="full", every=3),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("in_flight", [0, 2 * ACTIVATION, 1 << 30])
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("tier", TIERS)
def test_no_bit_changes(tier: str, recompute: str, in_flight: int, drive: NVMeFolder) -> None:
    expected = train(Net())
    model = Net()
    offload = options(tier, in_flight_bytes=in_flight)
    activations = Activations(model, CPU, recompute=RECOMPUTE[recompute], offload=offload, drive=drive)
    assert same(train(model, activations), expected)
    numbers = activations.metrics()
    assert activations.saved is not None
    assert activations.saved.regions == numbers["stored_bytes"] == 0
    assert numbers["in_flight_peak_bytes"] <= max(in_flight, 4 * ACTIVATION)  # the largest goes alone
    assert (numbers["out_bytes"] > 0) == (in_flight < numbers["packed_bytes"] / 2)
    activations.remove()
    assert same(train(model)[:4], expected[:4])


@pytest.mark.wide
def test_no_bit_changes_with_autocast_and_compiled_blocks(drive: NVMeFolder) -> None:
    def run(offload: ActivationOffloadConfig | None) -> list[Tensor]:
        torch.compiler.reset()
        model = Net(2)
        for block in model.blocks:
            block.compile(backend="aot_eager")
        recompute = RecomputeConfig(policy="full")
        activations = Activations(model, CPU, recompute=recompute, offload=offload, drive=drive)
        results = train(model, activations)
        if offload is not None:
            assert activations.metrics()["out_bytes"] >= 2 * ACTIVATION
        return results

    expected = run(None)
    assert same(run(options(in_flight_bytes=0)), expected)


@pytest.mark.parametrize("tier", TIERS)
def test_accumulated_steps_and_two_losses_of_one_graph(tier: str, drive: NVMeFolder) -> None:
    def run(activations: Activations | None, model: nn.Module) -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.randn(4, 16, WIDTH, requires_grad=True)
        with nullcontext() if activations is None else activations.around_forward():
            loss = model(x)
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        return [loss.detach(), x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]

    expected = run(None, Net())
    model = Net()
    activations = Activations(model, CPU, offload=options(tier, in_flight_bytes=ACTIVATION), drive=drive)
    assert same(run(activations, model), expected)
    assert activations.metrics()["stored_bytes"] == 0
    assert activations.metrics()["in_flight_peak_bytes"] <= 4 * ACTIVATION


# what is taken -------------------------------------------------------------------------------------------------------


def test_with_recompute_only_inputs_of_blocks_are_taken(drive: NVMeFolder) -> None:
    for recompute in (RecomputeConfig(policy="full"), RecomputeConfig(policy="selective")):
        model = Net()
        activations = Activations(model, CPU, recompute=recompute, offload=options(in_flight_bytes=0))
        train(model, activations, steps=1)
        # What a selective policy keeps stays on the device: torch holds it out of reach of hooks.
        assert activations.metrics()["packed_bytes"] == len(model.blocks) * ACTIVATION
        assert activations.metrics()["stored_peak_bytes"] == len(model.blocks) * ACTIVATION


def test_parameters_and_buffers_stay() -> None:
    model = Net()
    activations = Activations(model, CPU, offload=options(min_bytes=0))
    taken: list[Tensor] = []
    assert activations.offload is not None
    keep = activations.offload.keep
    activations.offload.keep = lambda region: taken.append(region) or keep(region)  # type: ignore[method-assign]
    train(model, activations, steps=1)
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    assert taken
    assert not own & {t.untyped_storage().data_ptr() for t in taken}


def test_a_buffer_that_is_emptied_and_refilled_stays() -> None:
    """What the engine does at stage 3: the storage stays, its memory comes and goes."""
    from ls_strategy._torch import storage_key

    flat = torch.randn(WIDTH * WIDTH)
    weight = nn.Parameter(torch.empty(0))
    weight.data = flat.view(WIDTH, WIDTH)
    values = flat.clone()
    saved = SavedTensors(
        ActivationOffload(options(in_flight_bytes=0), CPU), CPU, min_bytes=0, protected=lambda: {storage_key(flat)}
    )
    x = torch.randn(8, WIDTH, requires_grad=True)
    with saved.around():
        y = functional.linear(x, weight)
    flat.untyped_storage().resize_(0)
    weight.data = torch.full((1,), float("nan")).expand(WIDTH, WIDTH)
    flat.untyped_storage().resize_(flat.numel() * 4)
    flat.copy_(values)
    weight.data = flat.view(WIDTH, WIDTH)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(8, WIDTH) @ values.view(WIDTH, WIDTH))  # type: ignore[arg-type]
    assert saved.bytes_packed == x.nbytes


def test_rules() -> None:
    plain = torch.randn(8, 8)
    assert is_eligible(plain, CPU, ())
    assert is_eligible(plain.t()[2:, ::2], CPU, ())
    assert not is_eligible(plain[:1].expand(8, 8), CPU, ())  # repeats elements
    assert not is_eligible(plain.as_strided((3, 3), (1, 1), 5), CPU, ())
    assert not is_eligible(nn.Parameter(plain), CPU, ())
    assert not is_eligible(torch.empty(0), CPU, ())
    assert not is_eligible(plain.to_sparse(), CPU, ())
    assert not is_eligible(torch.empty(8, device="meta"), CPU, ())
    assert not is_eligible(torch.randn(8, dtype=torch.complex64).conj(), CPU, ())
    with torch.inference_mode():
        assert not is_eligible(torch.randn(8), CPU, ())


VIEWS = (
    lambda t: t,
    lambda t: t.t(),
    lambda t: t[3:5],
    lambda t: t[:, 3:9],
    lambda t: t[1:, ::3],
    lambda t: t[7, 7],
    lambda t: t.view(4, 4, 16).permute(2, 0, 1),
    lambda t: t.flatten()[5:],
)


@pytest.mark.parametrize("tier", TIERS)
def test_views_come_back_with_their_layout(tier: str, drive: NVMeFolder) -> None:
    offload = ActivationOffload(options(tier, in_flight_bytes=0), CPU, drive)
    saved = SavedTensors(offload, CPU, min_bytes=0, protected=set)
    for dtype, view in itertools.product((torch.float32, torch.bfloat16, torch.bool, torch.int64), VIEWS):
        base = (torch.randn(16, 16) * 100).to(dtype)
        tensor = view(base)
        handle = saved._pack(tensor)
        assert handle is not tensor
        back = saved._unpack(handle)
        assert back.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
        assert (back.dtype, back.size(), back.stride()) == (tensor.dtype, tensor.size(), tensor.stride())
        assert torch.equal(back, tensor)
        region, offset = region_of(tensor)
        here = region.as_strided(tensor.size(), tensor.stride(), region.storage_offset() + offset)
        assert torch.equal(here, tensor)


def test_views_of_one_storage_are_kept_once_and_slices_of_large_ones_alone() -> None:
    offload = ActivationOffload(options(in_flight_bytes=0), CPU)
    saved = SavedTensors(offload, CPU, min_bytes=0, protected=set)
    x = torch.randn(64, 64)
    handles = [saved._pack(t) for t in (x, x.t(), x.view(-1), x[:, 5:], *x.chunk(2, dim=1))]
    assert (saved.regions, offload.bytes_out) == (1, x.nbytes)
    rows = torch.randn(1000, 16)
    handles += [saved._pack(rows[10:20]), saved._pack(rows[10:20])]
    assert offload.bytes_out == x.nbytes + 10 * 16 * 4
    del handles
    assert saved.regions == offload.storage.stored_bytes == 0


@pytest.fixture
def saved() -> SavedTensors:
    return SavedTensors(ActivationOffload(options(in_flight_bytes=0), CPU), CPU, min_bytes=0, protected=set)


def test_a_tensor_that_was_changed_between_two_saves_is_kept_twice(saved: SavedTensors) -> None:
    x = torch.zeros(64)
    first = saved._pack(x)
    x += 1
    second = saved._pack(x)
    assert saved._unpack(first).sum() == 0
    assert saved._unpack(second).sum() == 64


def test_an_address_that_is_used_again_is_not_taken_for_the_old_tensor(saved: SavedTensors) -> None:
    handles = [saved._pack(torch.full((1000,), float(i))) for i in range(50)]
    assert [saved._unpack(h)[0].item() for h in handles] == list(range(50))


@pytest.mark.parametrize("in_flight", [0, 1 << 20])
def test_a_change_in_place_is_refused_as_autograd_does(in_flight: int) -> None:
    saved = SavedTensors(ActivationOffload(options(in_flight_bytes=in_flight), CPU), CPU, min_bytes=0, protected=set)
    x = torch.randn(64, requires_grad=True)
    with saved.around():
        y = x.exp()
        z = y.sum()
    y.detach().mul_(2)
    if in_flight:
        with pytest.raises(StateError, match="changed in place"):
            z.backward()
    else:  # it had left before
        z.backward()
        assert torch.equal(x.grad, x.detach().exp())  # type: ignore[arg-type]


# memory --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
def test_memory_on_the_device_is_freed_in_forward(tier: str, drive: NVMeFolder) -> None:
    alive: list[StorageWeakRef] = []
    offload = ActivationOffload(options(tier, in_flight_bytes=2 * ACTIVATION), CPU, drive)
    saved = SavedTensors(offload, CPU, min_bytes=1024, protected=set)
    x = torch.randn(4, 16, WIDTH, requires_grad=True)
    with saved.around():
        y = x
        for _ in range(10):
            y = (y * 1.5).tanh()
            alive.append(StorageWeakRef(y.untyped_storage()))
        y = y.sum()
    assert [ref.expired() for ref in alive] == [True] * 8 + [False] * 2
    assert offload.storage.stored_bytes == 8 * ACTIVATION
    y.backward()
    gc.collect()
    assert all(ref.expired() for ref in alive)
    assert offload.storage.stored_bytes == 0


@pytest.mark.sample(2)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("how", ["dropped", "error", "retained"])
def test_memory_comes_back_without_a_backward_that_ends(tier: str, how: str, drive: NVMeFolder) -> None:
    model = Net()
    activations = Activations(model, CPU, offload=options(tier, in_flight_bytes=0), drive=drive)
    with activations.around_forward():
        loss = model(torch.randn(4, 16, WIDTH, requires_grad=True))
    assert activations.metrics()["stored_bytes"] > 10 * ACTIVATION
    if how == "error":
        handle = model.blocks[1].norm.weight.register_hook(lambda _: 1 / 0)  # type: ignore[union-attr]
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
    elif how == "retained":
        loss.backward(retain_graph=True)
        assert activations.metrics()["stored_bytes"] > 10 * ACTIVATION
    del loss
    gc.collect()
    if how == "error":
        activations.remove()  # torch holds what a failed backward has not reached until the next one
    assert activations.metrics()["stored_bytes"] == 0


@pytest.mark.parametrize("tier", TIERS)
def test_steps_use_the_same_memory(tier: str, drive: NVMeFolder) -> None:
    model = Net()
    activations = Activations(model, CPU, offload=options(tier, in_flight_bytes=0), drive=drive)
    train(model, activations, steps=2)
    host = activations.metrics()["host_bytes"]
    train(model, activations, steps=6)
    assert activations.metrics()["host_bytes"] <= host * (1 if tier == "cpu" else 2)
    assert activations.offload is not None
    if tier == "nvme":
        place: Any = activations.offload.storage
        # Where the file must reach: what was stored at once, in full pages.
        assert place._space.end <= activations.metrics()["stored_peak_bytes"] * 1.2
        assert activations.metrics()["host_bytes"] <= 8 * ACTIVATION  # four staged, and the largest on top
    activations.remove()
    assert activations.metrics()["host_bytes"] == 0


def test_removed_while_a_graph_is_alive(drive: NVMeFolder) -> None:
    """Nothing lies in the folder: the file has no name, and goes with the process, after ``kill -9`` too."""
    model = Net()
    activations = Activations(model, CPU, offload=options("nvme", in_flight_bytes=0), drive=drive)
    before = threading.active_count()
    with activations.around_forward():
        loss = model(torch.randn(4, 16, WIDTH, requires_grad=True))
    assert activations.metrics()["stored_bytes"] > 0
    assert list(Path(drive.path).iterdir()) == []
    activations.remove()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert threading.active_count() == before - 2  # its I/O threads have ended
    with activations.around_forward(), pytest.raises(StateError, match="was removed"):
        model(torch.randn(4, 16, WIDTH, requires_grad=True))


def test_regions_come_back_in_reverse_before_they_are_asked_for() -> None:
    offload = ActivationOffload(options(in_flight_bytes=3 * 400), CPU)
    kept = [offload.keep(torch.full((100,), float(i))) for i in range(8)]
    for k in kept:
        offload.add_use(k)
    assert [k.on_device is not None for k in kept] == [False] * 5 + [True] * 3  # the last never leave
    assert offload.bytes_out == 5 * 400
    for i in reversed(range(8)):
        assert offload.load(kept[i])[0].item() == i
        offload.drop(kept[i])
        assert offload.in_flight_bytes <= 3 * 400
        if i:
            assert kept[i - 1].on_device is not None  # backward does not wait for it
    assert offload.bytes_back == 5 * 400


# the drive -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Reads or writes fail from when the verb is in the set."""
    verbs: set[str] = set()
    move = DirectFile._move

    def fail(self: DirectFile, verb: str, view: memoryview, offset: int) -> None:
        if verb in verbs:
            raise NVMeError(5, "the drive is broken", self.name)
        move(self, verb, view, offset)

    monkeypatch.setattr(DirectFile, "_move", fail)
    return verbs  # type: ignore[return-value]


@pytest.mark.parametrize("verb", ["writing", "reading"])
def test_errors_of_the_device_are_raised_in_the_step(verb: str, broken: set[str], drive: NVMeFolder) -> None:
    model = Net()
    activations = Activations(model, CPU, offload=options("nvme", in_flight_bytes=0), drive=drive)
    train(model, activations, steps=1)
    broken.add(verb)
    with pytest.raises(NVMeError, match="the drive is broken"):
        train(model, activations, steps=1)
    gc.collect()
    activations.remove()


def test_a_full_device_is_named(drive: NVMeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    model = Net()
    activations = Activations(model, CPU, offload=options("nvme", in_flight_bytes=0), drive=drive)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(LSError, match=r"no room for the activations.*No space left.*smaller batches"):
        train(model, activations, steps=1)


def test_file_space_is_used_again_and_grows_together() -> None:
    space = FileSpace()
    places = [space.take(PAGE * (i + 1)) for i in range(4)]
    assert places == [0, PAGE, 3 * PAGE, 6 * PAGE]
    space.give(places[1], 2 * PAGE)
    space.give(places[0], PAGE)
    assert space.take(3 * PAGE) == 0  # the two together
    space.give(0, 3 * PAGE)
    space.give(places[3], 4 * PAGE)
    space.give(places[2], 3 * PAGE - 5)
    assert (space.take(10 * PAGE), space.end) == (0, 10 * PAGE)


# choices -------------------------------------------------------------------------------------------------------------


def test_the_configuration_is_described(drive: NVMeFolder) -> None:
    assert Activations(Net(), CPU).describe() == "kept on the device"
    chosen = Activations(Net(), CPU, recompute=RecomputeConfig(policy="full"), offload=options("nvme"), drive=drive)
    assert chosen.describe() == (
        "recomputed: 4 Block, full; inputs of recomputed modules of at least 0.000976562 MiB offloaded to NVMe, "
        "0.046875 MiB in flight"
    )
    assert chosen.metrics()["recomputed_modules"] == 4


def test_wrong_choices(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"without activations\.checkpointing"):
        Activations(Net(), CPU, partition=Axis("tensor"))
    with pytest.raises(ConfigError, match="without a folder"):
        Activations(Net(), CPU, offload=options("nvme"))
    with pytest.raises(ConfigError, match="tier='disk'"):
        ActivationOffloadConfig(tier="disk")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="min_bytes=-1"):
        ActivationOffloadConfig(tier="cpu", min_bytes=-1)
