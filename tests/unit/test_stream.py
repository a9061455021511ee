"""Streamed models: the same bits as resident ones, and nothing that is read in silence while it is away."""

from __future__ import annotations

import copy
import gc
import io
import json
import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.stream_inference import Case, build, config, generated, limited
from ls_strategy.checkpoint.files import as_bytes
from ls_strategy.checkpoint.safetensors import DTYPES, export_safetensors
from ls_strategy.config import NVMeIOConfig
from ls_strategy.errors import CheckpointError, ConfigError, PlanError, StateError
from ls_strategy.extras.inference import stream
from ls_strategy.extras.inference.fill import open_weights
from ls_strategy.extras.inference.storage import DeviceBuffers, StoredBlocks
from ls_strategy.layout import TensorPart
from ls_strategy.tiers.file_io import DirectFile, NVMeError
from ls_strategy.tiers.link import Link
from tests.unit.checkpoint_folders import write_folder

WIDTH = 16
IO = NVMeIOConfig(block_bytes=4096, parallelism=2, queue_depth=8)


class Packed(nn.Module):
    """A linear layer of integers with a scale, as quantised ones are."""

    weight: Tensor
    scale: Tensor
    table: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 128, (width, width), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(width) / 127)
        self.register_buffer("table", torch.arange(width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.to(x.dtype) * self.scale[:, None])[..., self.table]


class Block(nn.Module):
    """Parameters, integers, a transposed weight, and one in 16 bits."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.down.weight = nn.Parameter(self.down.weight.detach().t().contiguous().t())
        self.packed = Packed(width)
        self.gain = nn.Parameter(torch.rand(width).bfloat16())
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x)))) * self.gain
        if self.fails:
            raise ArithmeticError("in the middle of a forward")
        return x + self.packed(x)


class Net(nn.Module):
    """A table, blocks, a tied head."""

    blocks: Any
    order: Any

    def __init__(self, blocks: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(32, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


TOKENS = torch.arange(12).view(2, 6)


@pytest.fixture(params=["cpu", "nvme", "nvme, 3 ahead"])
def options(request, tmp_path):
    if request.param == "cpu":
        return {"tier": "cpu"}
    prefetch = 3 if "3" in request.param else 1
    return {"tier": "nvme", "path": tmp_path / "drive", "io": IO, "allow_ram": True, "prefetch": prefetch}


@pytest.fixture
def drive(tmp_path):
    return {"tier": "nvme", "path": tmp_path / "drive", "io": IO, "allow_ram": True}


MADE: list[Any] = []


def stream_blocks(*args: Any, **options: Any) -> Any:
    MADE.append(stream.stream_blocks(*args, **options))
    return MADE[-1]


@pytest.fixture(autouse=True)
def closed():
    """Every handle is closed at the end of its test."""
    yield
    while MADE:
        MADE.pop().close()


def run(model: nn.Module, tokens: Tensor = TOKENS) -> Any:
    with torch.no_grad():
        return model(tokens)


def repeat(model: nn.Module, times: int) -> None:
    for _ in range(times):
        run(model)


# --- the same bits ----------------------------------------------------------------------------------------------------


def test_streamed_forwards_equal_resident_ones_bit_for_bit(options):
    model, expected = Net(), run(Net())
    handle = stream_blocks(model, **options)
    assert handle.names == [f"blocks.{i}" for i in range(4)]
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            for _ in range(3):
                assert torch.equal(model(TOKENS), expected)
    assert torch.equal(model(TOKENS), expected)  # parameters are frozen: nothing asks for gradients


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_are_kept(drive, dtype):
    model = Net().to(dtype)
    expected = run(model)
    stream_blocks(model, **drive)
    assert torch.equal(run(model), expected)
    assert model.blocks[0].up.weight.dtype == dtype


def with_parameters_as_buffers() -> Net:
    """Buffers that are an ``nn.Parameter``: copies of weights, and integers."""
    model = Net()
    for module in (model.norm, *(block.norm for block in model.blocks)):
        module.register_buffer("mean", nn.Parameter(torch.rand(WIDTH)))
        module.register_buffer("count", nn.Parameter(torch.arange(WIDTH), requires_grad=False))
        module.register_forward_hook(lambda m, _, out: out * m.mean + m.count)
    return model


def names_in(model: nn.Module) -> tuple[list[str], list[str]]:
    return [n for n, _ in model.named_parameters()], [n for n, _ in model.named_buffers()]


def test_buffers_that_are_parameters_stay_buffers(drive):
    torch.manual_seed(1)
    model = with_parameters_as_buffers()
    names, expected = names_in(model), run(model)
    stream_blocks(model, **drive)
    for _ in range(2):
        assert torch.equal(run(model), expected)
        assert names_in(model) == names


def test_buffers_that_are_parameters_stay_buffers_where_they_are_moved_and_cast(drive):
    from ls_strategy.extras.inference.engine import _cast
    from ls_strategy.extras.inference.stream import _move_rest

    for change in (lambda m: _cast(m, torch.float32), lambda m: _cast(m, torch.bfloat16)):
        model = with_parameters_as_buffers()
        names = names_in(model)
        change(model)
        assert names_in(model) == names
        assert model.norm.mean.dtype == model.norm.weight.dtype
        assert not model.norm.mean.requires_grad
    _move_rest(model, torch.device("meta"))
    assert names_in(model) == names
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"meta"}
    assert not model.norm.mean.requires_grad


def test_blocks_may_run_in_any_order_and_be_left_out(drive):
    resident, model = Net(), Net()
    stream_blocks(model, **drive)
    for order in ([3, 1, 0], [2], [0, 1, 2, 3], [1, 1, 1], [3, 2, 1, 0]):
        for net in (resident, model):
            net.order = order
        with torch.no_grad():
            x = y = torch.ones(2, WIDTH)
            for i in order:
                x, y = resident.blocks[i](x), model.blocks[i](y)
        assert torch.equal(x, y), order


def test_the_order_of_the_last_pass_is_expected_again(drive):
    """Encoder and decoder: the encoder runs once, then the decoder for every token."""
    model = nn.Module()
    model.encoder = nn.ModuleList([Block() for _ in range(2)])
    model.decoder = nn.ModuleList([Block() for _ in range(3)])
    handle = stream_blocks(model, **drive)
    handle.trace = []
    x = torch.ones(2, WIDTH)
    with torch.no_grad():
        for block in (*model.encoder, *model.decoder, *model.decoder, *model.decoder):
            block(x)
    read = [i for what, i in handle.trace if what == "read"]
    assert read == [0, 1, *(2, 3, 4) * 3, 2, 3]  # nothing twice, and the decoder's first blocks under way


def test_the_next_block_is_read_before_one_has_computed(drive):
    model = Net()
    handle = stream_blocks(model, **drive)
    handle.trace = []
    run(model)
    run(model)
    position = {}
    for at, event in enumerate(handle.trace):
        position.setdefault(event, []).append(at)
    for i in range(4):
        for turn in range(2):
            following = (i + 1) % 4
            later = turn + (following == 0)
            assert position["read", following][later] < position["done", i][turn]
    assert handle.waited_s > 0
    size = sum(-(-4096 // 4096) * -(-b.nbytes // 4096) * 4096 for b in handle._blocks)
    assert handle.bytes_read >= 2 * size


def test_starting_to_read_does_not_wait_for_the_drive(drive, monkeypatch):
    """However many blocks of the drive one of the model has, and however few may be under way otherwise."""
    model, expected = Net(), run(Net())
    drive["io"] = NVMeIOConfig(block_bytes=4096, parallelism=1, queue_depth=1)
    handle = stream_blocks(model, **drive)
    run(model)
    assert handle._blocks[0].nbytes > 2 * 4096
    read, may_read, computed = DirectFile.read, threading.Event(), []

    def wait(self, view, offset):
        assert may_read.wait(10)
        read(self, view, offset)

    def note(*_: object) -> None:
        computed.append(may_read.is_set())
        may_read.set()

    # Blocks 0 and 1 are there; when 0 has computed, 2 begins to be read, and does not get anywhere.
    for _, lease in handle._ahead._in_flight:
        lease.wait()
    model.blocks[1].up.register_forward_hook(note)
    monkeypatch.setattr(DirectFile, "read", wait)
    assert torch.equal(run(model), expected)
    assert computed == [False]


@pytest.mark.wide
def test_reading_and_computing_take_the_longer_of_both_and_not_the_sum(drive, monkeypatch):
    read_s, compute_s, blocks = 0.03, 0.025, 6
    model = Net(blocks)
    drive["io"] = NVMeIOConfig(block_bytes=1 << 20, parallelism=1)  # a block is one read
    handle = stream_blocks(model, **drive)
    read = DirectFile.read

    def slowly(self, view, offset):
        time.sleep(read_s)
        read(self, view, offset)

    monkeypatch.setattr(DirectFile, "read", slowly)
    for block in model.blocks:
        block.up.register_forward_hook(lambda *_: time.sleep(compute_s))
    run(model)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        run(model)
        times.append(time.perf_counter() - begin)
    assert min(times) > 0.9 * blocks * read_s
    assert min(times) < 0.85 * blocks * (read_s + compute_s), times
    assert handle.waited_s > 0


def test_everything_can_be_streamed(options):
    """The tied table and head come as one, each for its own forward."""
    model, expected = Net(), run(Net())
    handle = stream_blocks(model, stream_all=True, **options)
    assert handle.names == ["table", *(f"blocks.{i}" for i in range(4)), "norm"]
    for _ in range(2):
        assert torch.equal(run(model), expected)
    assert model.table.weight is model.head.weight
    assert model.table.weight.isnan().all()


def test_a_block_that_calls_itself_stays_until_it_is_done(drive):
    class Twice(Block):
        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            inner = self(x, False) if again else x
            return super().forward(inner)

    torch.manual_seed(0)
    model = nn.ModuleList([Twice() for _ in range(2)])
    x = torch.ones(1, WIDTH)
    with torch.no_grad():
        expected = model[1](model[0](x))
        stream_blocks(nn.ModuleDict({"blocks": model}), **drive)
        assert torch.equal(model[1](model[0](x)), expected)


def test_what_blocks_share_stays(drive):
    model, resident = Net(), Net()
    for net in (model, resident):
        for block in net.blocks:
            block.norm = net.norm
            block.up.weight = net.blocks[0].up.weight
    stream_blocks(model, **drive)
    assert not model.norm.weight.isnan().any()
    assert not model.blocks[2].up.weight.isnan().any()
    assert model.blocks[2].up.bias.isnan().all()
    assert torch.equal(run(model), run(resident))


def test_blocks_without_weights_of_their_own_are_refused(drive):
    model = plain(2)
    for name in ("linear", "norm"):
        setattr(model.blocks[1], name, getattr(model.blocks[0], name))
    with pytest.raises(PlanError, match="nothing to stream"):
        stream_blocks(model, **drive)


def test_two_models_at_the_same_time(drive):
    one, other = Net(), Net(3)
    expected = run(one), run(other)
    handles = [stream_blocks(one, **drive), stream_blocks(other, **drive)]
    for _ in range(2):
        assert torch.equal(run(one), expected[0])
        assert torch.equal(run(other), expected[1])
    handles[0].close()
    assert torch.equal(run(other), expected[1])
    handles[1].close()


def test_two_models_in_two_threads(drive):
    models = [Net(), Net(3)]
    expected = [run(model) for model in models]
    handles = [stream_blocks(model, **drive) for model in models]
    found: list[list[bool]] = [[], []]

    def work(i: int) -> None:
        found[i] += [torch.equal(run(models[i]), expected[i]) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[True] * 5] * 2
    for handle in handles:
        handle.close()


# --- while they are away ----------------------------------------------------------------------------------------------


def test_weights_outside_of_the_forward_are_no_numbers_or_errors(options):
    model = Net()
    shapes = {name: (p.shape, p.dtype, p.device) for name, p in model.named_parameters()}
    stream_blocks(model, **options)
    run(model)
    block = model.blocks[1]
    assert {name: (p.shape, p.dtype, p.device) for name, p in model.named_parameters()} == shapes
    assert block.up.weight.isnan().all()
    assert block.gain.isnan().all()
    assert block.packed.scale.isnan().all()
    assert block.packed.weight.shape == (WIDTH, WIDTH)
    with pytest.raises(StateError, match=r"blocks\.1\.packed\.weight is stored on a tier"):
        block.packed.weight.float()
    with pytest.raises(StateError, match="is stored on a tier"):
        block.packed(torch.ones(1, WIDTH))
    assert block.packed.table.tolist() == list(range(WIDTH))  # a table that is not saved stays
    assert not model.table.weight.isnan().any()


def test_the_state_dict_reads_what_rests(options):
    model, resident = Net(), Net().state_dict()
    handle = stream_blocks(model, **options)
    run(model)
    state = model.state_dict()
    assert list(state) == list(resident)
    for name, value in resident.items():
        assert state[name].dtype == value.dtype
        assert torch.equal(state[name], value), name
    assert torch.equal(model.blocks[2].packed.state_dict()["weight"], resident["blocks.2.packed.weight"])
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for name, value in torch.load(file, weights_only=True).items():
        assert torch.equal(value, resident[name]), name
    assert torch.equal(run(model), run(Net()))
    handle.close()
    with pytest.raises(StateError, match="closed"):
        state["blocks.0.up.weight"].sum()


def test_changes_are_refused(options):
    changes = {
        "in place": lambda model: model.blocks[2].up.weight.zero_(),
        "through data": lambda model: model.blocks[2].up.weight.data.zero_(),
        "other data": lambda model: setattr(model.blocks[2].up.weight, "data", torch.zeros(4 * WIDTH, WIDTH)),
        "another buffer": lambda model: setattr(
            model.blocks[2].packed, "weight", torch.zeros(WIDTH, WIDTH, dtype=torch.int8)
        ),
        "another dtype": lambda model: model.blocks[2].up.half(),
    }
    for what, change in changes.items():
        model = Net()
        handle = stream_blocks(model, **options)
        with torch.no_grad():
            change(model)
        with pytest.raises(StateError, match="cannot be changed"):
            run(model)
        handle.close()
        assert what


def test_changes_in_the_forward_are_refused(drive):
    class Counts(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.packed.weight += 1
            return super().forward(x)

    model = Net()
    model.blocks[1] = Counts()
    stream_blocks(model, **drive)
    for context in (torch.no_grad, torch.inference_mode):
        with context(), pytest.raises(StateError, match=r"packed\.weight was written to.*in its forward"):
            model(TOKENS)


def test_loading_copying_and_gradients_are_refused(drive):
    model = Net()
    state = model.state_dict()
    stream_blocks(model, **drive)
    with pytest.raises(StateError, match="Load them before"):
        model.load_state_dict(state)
    with pytest.raises(StateError, match="cannot be pickled"):
        copy.deepcopy(model)
    with pytest.raises(StateError, match="cannot be pickled"):
        pickle.dumps(model)
    with pytest.raises(StateError, match=r"no_grad"):
        model.blocks[0](torch.ones(1, WIDTH, requires_grad=True))
    assert torch.equal(run(model), run(Net()))


def test_what_is_no_plain_tensor_is_refused(drive):
    class Special(Tensor):
        pass

    model = Net()
    model.blocks[1].up.weight = nn.Parameter(torch.ones(4 * WIDTH, WIDTH).as_subclass(Special))
    with pytest.raises(PlanError, match=r"blocks\.1\.up\.weight is a Special"):
        stream_blocks(model, **drive)
    with torch.inference_mode():
        model = Net()
    with pytest.raises(PlanError, match="inference_mode"):
        stream_blocks(model, **drive)


def test_the_way_back(options):
    model, resident = Net(), Net()
    model.blocks[0].gain.requires_grad_(False)
    kept = dict(model.named_parameters())
    handle = stream_blocks(model, **options)
    expected = run(model)
    handle.restore()
    assert all(p is kept[name] for name, p in model.named_parameters())
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["blocks.0.gain"]
    for name, value in resident.state_dict().items():
        found = model.state_dict()[name]
        assert torch.equal(found, value), name
        assert found.stride() == value.stride(), name
        assert found.untyped_storage().nbytes() == value.untyped_storage().nbytes(), name
    assert torch.equal(run(copy.deepcopy(model)), expected)
    model(TOKENS).sum().backward()
    assert model.blocks[3].up.weight.grad is not None
    with pytest.raises(StateError, match="gone"):
        handle.restore()


def test_after_close_the_model_says_that_its_weights_are_gone(options):
    model = Net()
    handle = stream_blocks(model, **options)
    handle.close()
    handle.close()
    with pytest.raises(StateError, match="gone"):
        run(model)


# --- failures ---------------------------------------------------------------------------------------------------------


def test_an_exception_in_the_middle_of_a_forward_leaves_the_model_usable(options):
    model, expected = Net(), run(Net())
    stream_blocks(model, **options)
    for i in (0, 2, 3):
        model.blocks[i].fails = True
        with pytest.raises(ArithmeticError):
            run(model)
        assert model.blocks[i].up.weight.isnan().all()
        model.blocks[i].fails = False
        assert torch.equal(run(model), expected)


def test_an_interrupt_in_the_middle_of_a_forward_leaves_the_model_usable(options):
    """KeyboardInterrupt goes past the hooks of torch."""
    model, expected = Net(), run(Net())
    stream_blocks(model, **options)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for i in (0, 2):
        hook = model.blocks[i].up.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(model)
        hook.remove()
        assert torch.equal(run(model), expected)
        assert model.blocks[i].up.weight.isnan().all()


def test_a_drive_that_fails_is_an_error_and_the_next_forward_reads_again(drive, monkeypatch):
    model, expected = Net(), run(Net())
    stream_blocks(model, **drive)
    move, left = DirectFile.read, [3]

    def fail(self, view, offset):
        left[0] -= 1
        if left[0] == 0:
            raise NVMeError(5, "Input/output error", "drive")
        move(self, view, offset)

    monkeypatch.setattr(DirectFile, "read", fail)
    with pytest.raises(NVMeError):
        repeat(model, 3)
    assert model.blocks[0].up.weight.isnan().all()
    for _ in range(2):
        assert torch.equal(run(model), expected)


def test_bytes_that_changed_on_the_drive_are_an_error_if_asked_for(drive):
    model, expected = Net(), run(Net())
    handle = stream_blocks(model, verify=True, **drive)
    assert torch.equal(run(model), expected)
    storage: Any = handle._storage
    fd = os.open(f"/proc/self/fd/{storage.tier._file.fd}", os.O_RDWR)
    os.pwrite(fd, b"x" * 8, storage.tier._offsets[1, "block"] + 64)
    os.close(fd)
    with pytest.raises(StateError, match="is not what was written"):
        repeat(model, 2)


@pytest.mark.wide
def test_files_and_threads_end_with_the_model(drive):
    before = set(threading.enumerate())
    model = Net()
    handle: Any = stream.stream_blocks(model, **drive)
    run(model)
    fd = handle._storage.tier._file.fd
    assert os.fstat(fd).st_blocks > 0
    del model, handle
    gc.collect()
    assert {t for t in threading.enumerate() if t not in before} == set()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert list(drive["path"].iterdir()) == []


def test_another_thread_in_the_middle_is_refused(drive):
    model = Net()
    stream_blocks(model, **drive)
    errors = []

    def other(*_: object) -> None:
        def call() -> None:
            try:
                run(model)
            except StateError as error:
                errors.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    hook = model.blocks[1].up.register_forward_hook(other)
    expected = run(Net())
    assert torch.equal(run(model), expected)
    assert "one thread at a time" in errors[0]
    hook.remove()


def test_options_that_make_no_sense(tmp_path, monkeypatch):
    monkeypatch.delenv("LS_STRATEGY_NVME_PATH", raising=False)
    with pytest.raises(ConfigError, match="tier='disk'"):
        stream_blocks(Net(), "disk")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="LS_STRATEGY_NVME_PATH"):
        stream_blocks(Net(), "nvme")
    with pytest.raises(ConfigError, match="prefetch=0"):
        stream_blocks(Net(), prefetch=0)
    with pytest.raises(PlanError, match="no list of blocks"):
        stream_blocks(nn.Linear(2, 2))
    with pytest.raises(PlanError, match="not a module of the model"):
        stream_blocks(Net(), blocks=[Block()])
    model = Net()
    with pytest.raises(PlanError, match=r"is inside 'blocks\.0'"):
        stream_blocks(model, blocks=[model.blocks[0], model.blocks[0].up])
    with pytest.raises(PlanError, match="has its weights already"):
        stream_blocks(Net(), fill_from=tmp_path)


def test_blocks_can_be_named(drive):
    model, expected = Net(), run(Net())
    handle = stream_blocks(model, blocks=[model.blocks[2], model.blocks[0]], **drive)
    assert handle.names == ["blocks.2", "blocks.0"]
    assert torch.equal(run(model), expected)
    assert not model.blocks[1].up.weight.isnan().any()


def test_a_block_may_be_prepared_before_it_is_stored(drive):
    seen = []

    def halve(name: str, block: nn.Module) -> None:
        seen.append(name)
        block.bfloat16()

    model = Net()
    for block in model.blocks:
        block.bfloat16()
    expected = run(model.bfloat16())
    model = Net()
    handle = stream_blocks(model, prepare=halve, **drive)
    model.table.bfloat16()
    model.norm.bfloat16()
    assert torch.equal(run(model), expected)
    assert seen == [f"blocks.{i}" for i in range(4)]
    handle.close()
    with pytest.raises(PlanError, match="larger"):
        stream_blocks(Net(), prepare=lambda _, block: block.double(), **drive)  # pyright: ignore[reportArgumentType]


# --- filling ----------------------------------------------------------------------------------------------------------


class Filled(nn.Module):
    """A table that is not saved, which the module itself fills."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(WIDTH), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.table.copy_(torch.arange(WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table


class Simple(nn.Module):
    """A block all of which can fill itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.filled = Filled()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.filled(self.linear(x)))


def plain(blocks: int = 3) -> Any:
    """All of it can fill itself."""
    model: Any = nn.Module()
    model.first = nn.Linear(WIDTH, WIDTH)
    model.blocks = nn.ModuleList([Simple() for _ in range(blocks)])
    model.last = nn.Linear(WIDTH, WIDTH)
    model.last.weight = model.first.weight
    model.forward = lambda x: model.last(nn.Sequential(model.first, *model.blocks)(x))
    return model


def on_meta() -> Any:
    with torch.device("meta"):
        return plain()


X = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    header, position, data = {}, 0, b""
    for name, tensor in tensors.items():
        mine = bytes(as_bytes(tensor.contiguous()))
        offsets = [position, position + len(mine)]
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        position, data = offsets[1], data + mine
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def saved(model: nn.Module, kind: str, folder: Path) -> Path:
    state = model.state_dict()
    if kind == "one file":
        state.pop("last.weight")  # tied
        write_safetensors(folder / "model.safetensors", state)
        return folder / "model.safetensors"
    if kind == "folder with an index":
        names = sorted(state)
        files = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
        for file in set(files.values()):
            write_safetensors(folder / file, {n: state[n] for n in names if files[n] == file})
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        return folder
    wrapped = {"state_dict": {f"network.{n}": t for n, t in state.items()}}
    torch.save(wrapped if kind == "checkpoint" else state, folder / "file.ckpt")
    if kind == "exported":
        torch.save(wrapped, folder / "file.ckpt")
        export_safetensors(folder / "file.ckpt", folder / "exported", max_shard_bytes=2048)
        return folder / "exported"
    return folder / "file.ckpt"


@pytest.mark.parametrize("kind", ["one file", "folder with an index", "checkpoint", "state dict", "exported"])
def test_models_on_meta_are_filled_from_files(kind, tmp_path, drive):
    torch.manual_seed(3)
    resident = plain()
    model = on_meta()
    handle = stream_blocks(model, fill_from=saved(resident, kind, tmp_path), **drive)
    assert torch.equal(run(model, X), run(resident, X))
    assert model.last.weight is model.first.weight
    handle.restore()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resident.parameters(), strict=True))


def test_models_on_meta_fill_themselves_as_the_constructor_would(drive):
    torch.manual_seed(3)
    resident = plain()
    resident.last.reset_parameters()  # as the constructor, which fills it before it is tied: the draws are spent
    model = on_meta()
    torch.manual_seed(3)
    handle = stream_blocks(model, **drive)
    expected = {n: p for n, p in resident.named_parameters() if n.startswith("blocks.")}
    handle.restore()
    found = {n: p for n, p in model.named_parameters() if n.startswith("blocks.")}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], expected[n]) for n in expected)


def test_a_module_that_cannot_fill_itself_is_named(drive):
    with torch.device("meta"):
        model = Net()
    with pytest.raises(PlanError, match=r"'blocks\.0' \(Block\)"):
        stream_blocks(model, **drive)


def test_divided_models_are_filled_with_their_parts(tmp_path, drive):
    torch.manual_seed(3)
    resident = plain()
    path = saved(resident, "one file", tmp_path)
    model = on_meta()
    parts = {}
    for block in model.blocks:
        block.linear.weight = nn.Parameter(torch.empty(WIDTH // 2, WIDTH, device="meta"))
        block.linear.bias = nn.Parameter(torch.empty(WIDTH // 2, device="meta"))
        for p in (block.linear.weight, block.linear.bias):
            full = (WIDTH, *p.shape[1:])
            parts[id(p)] = TensorPart(full, 0, ((WIDTH // 2, WIDTH // 2),))
    handle = stream_blocks(model, fill_from=path, parts=parts, **drive)
    for mine, whole in zip(model.blocks, resident.blocks, strict=True):
        assert torch.equal(mine.state_dict()["linear.weight"], whole.linear.weight[WIDTH // 2 :])
    handle.close()
    model = on_meta()
    with pytest.raises(PlanError, match="sharded over ranks"):
        stream_blocks(model, parts={id(model.blocks[0].linear.weight): TensorPart((4, 4), 0, ((0, 2),))}, **drive)


def test_files_that_are_not_whole_or_not_of_the_model_are_refused(tmp_path, drive):
    resident = plain()
    with pytest.raises(CheckpointError, match="does not exist"):
        stream_blocks(on_meta(), fill_from=tmp_path / "nothing", **drive)
    with pytest.raises(CheckpointError, match="missing"):
        stream_blocks(on_meta(), fill_from=tmp_path / "nothing.safetensors", **drive)
    path = saved(resident, "one file", tmp_path)
    whole = path.read_bytes()
    for content, message in (
        (whole[:-1], "is damaged"),
        (whole[:50], "not a safetensors file"),
        (b"", "not a safetensors file"),
        (whole[:8] + b"[" + whole[9:], "not a safetensors file"),
        (whole.replace(b'"F32"', b'"F33"', 1), "has the dtype 'F33'"),
        (whole.replace(b"blocks.1.linear.weight", b"blocks.9.linear.weight"), r"has no blocks\.1\.linear\.weight"),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            stream_blocks(on_meta(), fill_from=path, **drive)
    other = nn.Module()
    with torch.device("meta"):
        other.blocks = nn.ModuleList([Simple() for _ in range(2)])
        other.blocks[1].linear = nn.Linear(WIDTH, 2 * WIDTH)
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"\(16, 16\).*\(32, 16\)"):
        stream_blocks(other, fill_from=path, **drive)
    found = open_weights(path)
    path.write_bytes(whole[: len(whole) // 2])  # changed after it was opened
    with pytest.raises(CheckpointError, match="ends inside"):
        found["last.bias"].sum()
    folder = tmp_path / "folder"
    folder.mkdir()
    saved(resident, "folder with an index", folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        stream_blocks(on_meta(), fill_from=folder, **drive)
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match="index"):
        stream_blocks(on_meta(), fill_from=folder, **drive)


# --- models of others -------------------------------------------------------------------------------------------------


def llama(**changes):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**{**sizes, **heads, "pad_token_id": 0, **changes})
    return transformers, config


def generate(model, **options):
    tokens = torch.arange(1, 13).view(2, 6)
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0
    return model.generate(tokens, attention_mask=mask, max_new_tokens=6, do_sample=False, **options)


@pytest.mark.parametrize("stream_all", [False, True])
def test_llama_generates_the_same_tokens(stream_all, drive):
    transformers, config = llama()
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    expected, logits = generate(model), run(model, torch.arange(1, 7).view(1, 6)).logits
    handle = stream_blocks(model, stream_all=stream_all, **drive)
    assert len(handle.names) == (7 if stream_all else 4)
    assert torch.equal(generate(model), expected)
    assert torch.equal(run(model, torch.arange(1, 7).view(1, 6)).logits, logits)


def test_llama_on_meta_is_filled_from_its_folder_or_fills_itself(tmp_path, drive):
    pytest.importorskip("safetensors")
    transformers, config = llama(tie_word_embeddings=True)
    torch.manual_seed(0)
    resident = transformers.LlamaForCausalLM(config).eval()
    resident.save_pretrained(tmp_path / "llama", max_shard_size="20KB")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).eval()
    handle = stream_blocks(model, fill_from=tmp_path / "llama", **drive)
    assert torch.equal(generate(model), generate(resident))
    handle.close()
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).eval()
    handle = stream_blocks(model, **drive)
    assert run(model, torch.arange(6).view(1, 6)).logits.isfinite().all()


def test_encoder_and_decoder_generate_the_same_tokens(drive):
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, decoder_start_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    expected = generate(model)
    handle = stream_blocks(model, **drive)
    assert len(handle.names) == 6
    for _ in range(2):
        assert torch.equal(generate(model), expected)


def test_the_gpt_of_the_recipe_is_filled_by_itself(drive):
    from recipes.gpt.network import GPT, GPTConfig

    config = GPTConfig(num_layers=3, width=32, num_heads=4, vocab_size=64, block_size=32)
    torch.manual_seed(1)
    resident = GPT(config)
    tokens = torch.arange(10).view(2, 5)
    with torch.device("meta"):
        model = GPT(config)
    torch.manual_seed(1)
    handle = stream_blocks(model, **drive)
    first = resident.generate(tokens, 5, temperature=0)
    with torch.no_grad():
        assert model(tokens).isfinite().all()
    for p, q in zip(model.parameters(), resident.parameters(), strict=True):
        assert p.shape == q.shape
    handle.close()
    model = copy.deepcopy(resident)
    handle = stream_blocks(model, **drive)
    assert torch.equal(model.generate(tokens, 5, temperature=0), first)


# --- other ways -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_folder_fills_the_network_of_its_module(tmp_path, drive):
    """Saved by three ranks, under the names of the LightningModule around it."""
    torch.manual_seed(3)
    resident = plain()
    tensors = {("state_dict", f"network.{name}"): t for name, t in resident.state_dict().items()}
    write_folder(tmp_path / "folder.ckpt", tensors, {}, {})
    model = on_meta()
    stream_blocks(model, fill_from=tmp_path / "folder.ckpt", **drive)
    assert torch.equal(run(model, X), run(resident, X))


def test_a_device_with_memory_of_its_own_gets_blocks_through_buffers(drive, monkeypatch):
    """The way of CUDA, on the CPU: a thread copies what the drive lends into buffers, which go round."""
    made = StoredBlocks.__init__

    def with_buffers(self, sizes, place, device, prefetch):
        made(self, sizes, place, device, prefetch)
        self._on_device = DeviceBuffers(Link(device), self.capacity, self.buffer_nbytes)

    monkeypatch.setattr(StoredBlocks, "__init__", with_buffers)
    several: list[dict[str, Any]] = [drive, {**drive, "prefetch": 3}, {"tier": "cpu"}]
    for options in several:
        model, expected = Net(), run(Net())
        handle: Any = stream_blocks(model, **options)
        buffers = handle._storage._on_device
        for _ in range(3):
            assert torch.equal(run(model), expected)
        assert len(buffers.free) == 0  # the next blocks are there, or on their way
        with torch.no_grad():
            model.blocks[3](torch.ones(1, WIDTH))  # not the one that was expected
        assert torch.equal(run(model), expected)
        model.blocks[1].fails = True
        with pytest.raises(ArithmeticError):
            run(model)
        model.blocks[1].fails = False
        assert torch.equal(run(model), expected)
        assert torch.equal(model.state_dict()["blocks.2.up.weight"], Net().blocks[2].up.weight)
        handle.restore()
        assert torch.equal(run(model), expected)
        buffers.worker.shutdown()


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [1, 3])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_blocks_come_to_a_gpu(tier, prefetch, drive):
    options = {**drive, "prefetch": prefetch} if tier == "nvme" else {"tier": tier, "prefetch": prefetch}
    torch.manual_seed(0)
    model = Net(6, width=512)
    expected = run(copy.deepcopy(model).cuda(), TOKENS.cuda())
    handle = stream_blocks(model, device="cuda", **options)
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    for _ in range(5):
        assert torch.equal(run(model, TOKENS.cuda()), expected)
    taken = torch.cuda.memory_allocated()
    assert taken < 0.8 * handle.stored_nbytes + handle.buffers_nbytes
    handle.restore()
    assert torch.equal(run(model, TOKENS.cuda()), expected)


@pytest.mark.wide
def test_compiled_blocks_are_streamed(drive):
    model, expected = Net(), run(Net())
    for block in model.blocks:
        block.compile(backend="eager")
    stream_blocks(model, **drive)
    for _ in range(3):
        assert torch.allclose(run(model), expected, atol=1e-6)
    assert model.blocks[0].up.weight.isnan().all()


@pytest.mark.parametrize("wanted", ["int8", "int4"])
def test_quantised_models_are_streamed(wanted, drive):
    from ls_strategy.extras.inference.quantize import Quantizer
    from recipes.gpt.network import GPT, GPTConfig

    torch.manual_seed(0)
    resident = GPT(GPTConfig(num_layers=3, width=128, num_heads=4, vocab_size=64, block_size=32)).eval()
    size = sum(p.nbytes for p in resident.blocks.parameters())
    Quantizer(resident, wanted).apply(resident)
    model = copy.deepcopy(resident)
    handle = stream_blocks(model, **drive)
    assert handle.stored_nbytes < size / {"int8": 3.5, "int4": 6}[wanted]
    tokens = torch.arange(10).view(2, 5)
    for _ in range(2):
        assert torch.equal(run(model, tokens), run(resident, tokens))
    handle.restore()
    assert torch.equal(run(model, tokens), run(resident, tokens))


def test_blocks_are_quantised_one_by_one_while_they_are_filled(drive):
    from ls_strategy.extras.inference.quantize import Quantizer
    from recipes.gpt.network import GPT, GPTConfig

    def build() -> GPT:
        with torch.device("meta"):
            return GPT(GPTConfig(num_layers=3, width=128, num_heads=4, vocab_size=64, block_size=32)).eval()

    tokens = torch.arange(10).view(2, 5)
    torch.manual_seed(0)
    resident = build()
    stream_blocks(resident, **drive).restore()
    Quantizer(resident, "int8").apply(resident)
    model = build()
    quantizer = Quantizer(model, "int8")
    torch.manual_seed(0)
    stream_blocks(model, prepare=lambda _, block: quantizer.apply(block), **drive)
    assert torch.equal(run(model, tokens), run(resident, tokens))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_of_three_times_the_memory_generates_from_a_drive(tmp_path):
    """Filled and run under a limit of the kernel; the tokens are those of the resident model."""
    allowed = 256 << 20
    case = Case(30, 768, str(tmp_path), allowed_bytes=allowed)
    result = limited(case)
    assert result["weights_bytes"] > 3 * allowed
    assert result["peak_bytes"] < allowed
    resident, handle = build(config(case.blocks, case.width), "cpu", None)
    handle.restore()
    assert result["tokens"] == generated(resident, case)
