"""Ranks that wait for each other in different places say where they are; what could never go on ends within seconds.

The reference is time: below `LIMIT_S` nothing but the explanation ends a wait; the strategy's ``timeout`` is longer.
"""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from ls_strategy import ZeROStrategy
from ls_strategy.config import nested
from ls_strategy.errors import OutOfStepError
from ls_strategy.testing import spawn
from tests.dist.parallel_runs import Module, Run
from tests.dist.ranks import Net, batches, on_ranks, quiet, trainer_of
from tests.limits import wall
from tests.marks import slow

pytestmark = [pytest.mark.wide, pytest.mark.dist]

AFTER_S = 1.0
LIMIT_S = 40.0


class OnRank0(pl.Callback):
    """Runs code at the end of the second batch, on rank 0 alone."""

    def __init__(self, act: Callable[..., Any]) -> None:
        self.act = act

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, i: int) -> None:
        if i == 1 and trainer.is_global_zero:
            self.act(trainer, module, batch)


def forward(trainer: pl.Trainer, module: Net, batch: Any) -> None:
    with torch.no_grad():
        module(batch[0])


def state_dict(trainer: pl.Trainer, module: Net, batch: Any) -> None:
    module.state_dict()


def barrier(trainer: pl.Trainer, module: Net, batch: Any) -> None:
    trainer.strategy.barrier()


def torch_barrier(trainer: pl.Trainer, module: Net, batch: Any) -> None:
    torch.distributed.barrier()


def save(trainer: pl.Trainer, module: Net, batch: Any) -> None:
    trainer.save_checkpoint("out_of_step.ckpt")


def validate(trainer: pl.Trainer, module: Net, batch: Any) -> None:
    with torch.no_grad():
        for i, one in enumerate(batches()):
            module.validation_step(one, i)


def sleep(trainer: pl.Trainer, module: Net, batch: Any) -> None:
    time.sleep(4 * AFTER_S)


class LogsOnOneRank(Net):
    def training_step(self, batch: Any, i: int) -> Any:
        loss = super().training_step(batch, i)
        if i == 1 and self.trainer.is_global_zero:
            self.log("loss", loss, on_step=True, sync_dist=True)
        return loss


class LeavesABlockOut(Net):
    """On rank 1, in the third batch."""

    def forward(self, x: Any) -> Any:
        h = self.first(x)
        for i, block in enumerate(self.blocks):
            if (i, self.global_rank, len(self.losses)) != (1, 1, 2):
                h = block(h)
        return self.last(h)


class SkipsAStep(Net):
    """On rank 1, which catches an exception of the second batch."""

    manual = True

    def training_step(self, batch: Any, i: int) -> None:
        optimizer = self.optimizers()
        try:
            loss = self.noted_loss(batch)
            if i == 1 and self.global_rank == 1:
                raise ValueError("a bad sample")
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        except ValueError:
            pass


def run(module: Net, act: Callable[..., Any] | None = None, **options: Any) -> tuple[BaseException | None, str, float]:
    """The error that ends training on this rank, what was printed, and the seconds it took."""
    settings = {"sharding.min_unit_numel": 0, "timeout": timedelta(seconds=3 * LIMIT_S), "explain_waits_after": AFTER_S}
    trainer_options = {"max_epochs": 1, "callbacks": [] if act is None else [OnRank0(act)]}
    trainer = trainer_of(ZeROStrategy(**nested({**settings, **options})), **trainer_options)
    error: BaseException | None = None
    printed, sys.stderr = sys.stderr, io.StringIO()
    started = time.monotonic()
    try:
        trainer.fit(module, batches())
    except Exception as raised:
        error = raised
    seconds = time.monotonic() - started
    text, sys.stderr = sys.stderr.getvalue(), printed
    return error, text, seconds


CASES: dict[str, tuple[int, type[Net], Callable[..., Any] | None, str, str]] = {
    "forward": (3, Net, forward, "all_gather of 'first.weight'", "on_train_batch_end"),
    "state_dict": (3, Net, state_dict, "all_gather of 'first.weight'", "state_dict"),
    "barrier": (2, Net, barrier, "barrier", "barrier"),
    "torch's barrier": (2, Net, torch_barrier, "torch.distributed.barrier", "torch_barrier"),
    "save_checkpoint": (2, Net, save, "all_gather of 'objects'", "save"),
    "save_checkpoint, stage 3": (3, Net, save, "all_gather of 'objects'", "save"),
    "log": (1, LogsOnOneRank, None, "reduce", "training_step"),
    "log, stage 3": (3, LogsOnOneRank, None, "reduce", "training_step"),
    "branch, stage 3": (3, LeavesABlockOut, None, "all_gather of 'blocks.1.norm.weight'", "backward"),
    "skipped step, stage 1": (1, SkipsAStep, None, "reduce_scatter of 'first.weight'", "training_step"),
    "skipped step, stage 2": (2, SkipsAStep, None, "reduce_scatter of 'last.weight'", "training_step"),
    "skipped step, stage 3": (3, SkipsAStep, None, "all_gather of 'blocks", "training_step"),
    "validation": (2, Net, validate, "reduce", "on_train_batch_end"),
    "validation, stage 3": (3, Net, validate, "all_gather of 'first.weight'", "on_train_batch_end"),
}  # fmt: skip
QUICK = ("forward", "branch, stage 3", "skipped step, stage 1")


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in CASES])
@on_ranks(2)
def test_what_could_never_go_on_ends_with_the_cause(rank: int, world_size: int, name: str) -> None:
    stage, module, act, collective, place = CASES[name]
    error, printed, seconds = run(module(), act, stage=stage)
    lines = [line for line in printed.splitlines() if line.startswith(f"ls_strategy: rank {rank} ")]
    assert "test_out_of_step.py:" in lines[-1], printed  # an earlier one only where the machine is slow
    assert AFTER_S < seconds < wall(LIMIT_S)
    words = str(error)
    if name == "torch's barrier" and rank == 0:
        assert isinstance(error, RuntimeError)  # raised in the user's own call, so the cause is printed
        words = printed
    else:
        assert isinstance(error, OutOfStepError), repr(error)
    assert "rank 0 has waited" in words or "rank 0 is in torch.distributed" in words
    assert "; rank 1 has waited" in words
    assert collective in words
    assert place in words
    assert "same branch" in words if "branch" in name else "trainer.is_global_zero" in words


@on_ranks(2)
def test_a_slow_rank_is_explained_and_waited_for(rank: int, world_size: int) -> None:
    module = Net()
    error, printed, seconds = run(module, sleep, stage=2)
    assert error is None
    assert len(module.losses) == 4
    assert seconds > 4 * AFTER_S
    (line,) = [line for line in printed.splitlines() if ("in sleep" if rank == 0 else "'last.weight'") in line]
    if rank == 0:
        assert "rank 0 is in no collective (batch 2 of this training epoch, at tests/dist/test_out_of_step.py:" in line
        assert re.search(r" in sleep, from tests/dist/test_out_of_step.py:\d+ in .*on_train_batch_end\)$", line)
    else:
        assert re.search(
            r"rank 1 has waited \d+ s in reduce_scatter .*\(batch 3 of this training epoch, .* rank 0$", line
        )


@on_ranks(2)
def test_a_rank_may_leave_modules_out_at_stage_2(rank: int, world_size: int) -> None:
    module = LeavesABlockOut()
    error, _, _ = run(module, stage=2)
    assert error is None
    assert len(module.losses) == 4


@pytest.mark.slow
@on_ranks(2, timeout_s=90)
def test_within_25_seconds_by_default(rank: int, world_size: int) -> None:
    error, printed, seconds = run(Net(), barrier, stage=3, explain_waits_after=20.0)
    assert isinstance(error, OutOfStepError)
    assert re.search(rf"rank {rank} has waited 2\d s", printed)
    assert 20 < seconds < wall(30)


@pytest.mark.slow
@on_ranks(2)
def test_none_switches_it_off(rank: int, world_size: int) -> None:
    error, printed, _ = run(Net(), sleep, stage=2, explain_waits_after=None)
    assert (error, printed) == (None, "")
    assert not [t for t in threading.enumerate() if t.name == "ls_wait_report"]


def own_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("ls_"))


class Fails(Net):
    """On all ranks, or on one."""

    def __init__(self, hook: str, error: type[BaseException], ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.hook, self.error, self.ranks = hook, error, ranks

    def fail(self, hook: str) -> None:
        if hook == self.hook and torch.distributed.get_rank() in self.ranks:
            raise self.error("on purpose")

    def setup(self, stage: str) -> None:
        self.fail("setup")

    def on_train_batch_end(self, *_: Any) -> None:
        self.fail("on_train_batch_end")

    def teardown(self, stage: str) -> None:
        self.fail("teardown")


@on_ranks(2)
def test_the_threads_end_with_the_run(rank: int, world_size: int) -> None:
    before = own_threads()
    for stage in (0, 3):
        module = Net()
        assert run(module, stage=stage)[0] is None
        assert own_threads() == before
        trainer = module.trainer
        trainer.validate(module, batches(), verbose=False)
        assert own_threads() == before
        module.state_dict()  # waits for the other rank
        trainer.strategy.barrier()
        assert own_threads() == before


@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["all ranks", "one rank"])
@pytest.mark.parametrize("hook", ["setup", "on_train_batch_end", "teardown"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@on_ranks(2)
def test_the_threads_end_with_a_run_that_fails(
    rank: int, world_size: int, error: type[BaseException], hook: str, ranks: tuple[int, ...]
) -> None:
    before = own_threads()
    with suppress(BaseException):
        run(Fails(hook, error, ranks), stage=3)
    assert own_threads() == before


@on_ranks(2)
def test_a_rank_that_has_left_is_named_to_those_that_wait(rank: int, world_size: int) -> None:
    """Rank 1 has ended the run, and its thread with it, when rank 0 begins to wait for it."""

    class ReadsAtTheEnd(Net):
        def on_validation_end(self) -> None:
            if self.trainer.is_global_zero:
                time.sleep(2.0)
                self.state_dict()

    started = time.monotonic()
    trainer = trainer_of(ZeROStrategy(3, explain_waits_after=AFTER_S, sharding={"min_unit_numel": 0}))
    with nullcontext() if rank == 1 else pytest.raises(OutOfStepError) as raised:
        trainer.validate(ReadsAtTheEnd(), batches(), verbose=False)
    assert not own_threads()
    if rank == 1:
        time.sleep(10 * AFTER_S)
        return
    assert "rank 1 is in no collective (after the run" in str(raised.value)
    assert time.monotonic() - started < wall(LIMIT_S)


@on_ranks(2)
def test_waits_after_the_run_are_explained(rank: int, world_size: int) -> None:
    """Ranks that wait for each other in different places, each after its run."""
    module = Net()
    assert run(module, stage=3)[0] is None
    with pytest.raises((OutOfStepError, RuntimeError)) as raised:
        module.state_dict() if rank == 0 else module.trainer.strategy.barrier()
    assert isinstance(raised.value, OutOfStepError)
    assert "none can continue" in str(raised.value)
    assert not own_threads()


def stops(rank: int, world_size: int, folder: str) -> str:
    """Rank 0's lines, while rank 1 is stopped as by a debugger of the system."""
    quiet()
    if rank == 0:
        threading.Timer(6 * AFTER_S, lambda: os.kill(int(Path(folder, "pid").read_text()), signal.SIGCONT)).start()

    class Stops(Net):
        def training_step(self, batch: Any, i: int) -> Any:
            if rank == 1 and i == 1:
                Path(folder, "pid").write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
            return super().training_step(batch, i)

    error, printed, _ = run(Stops(), stage=2)
    assert error is None
    return printed


@pytest.mark.slow
def test_a_process_that_is_stopped_is_named(tmp_path: Path) -> None:
    printed, _ = spawn(stops, 2, str(tmp_path), init_process_group=False, timeout_s=60)
    assert "it waits for rank 1 (rank 1 did not answer: ended, stopped, or" in printed


class Alone(Module):
    """Rank 0 runs the model once more by itself."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.trainer.is_global_zero:
            with torch.no_grad():
                self.model(batch[0])


class WaitsInABlock(Module):
    """Of a pipeline, on rank 0."""

    def configure_model(self) -> None:
        super().configure_model()
        self.model.blocks[0].register_forward_pre_hook(_wait_on_rank_0)


def _wait_on_rank_0(_block: Any, _inputs: Any) -> None:
    if torch.distributed.get_rank() == 0:
        torch.distributed.barrier()


LAYOUTS: dict[str, tuple[type[Module], dict[str, Any], str]] = {
    "tensor": (Alone, {"parallel.tensor.size": 2}, "tensor all_reduce .*on_train_batch_end"),
    "sequence": (Alone, {"parallel.context": 2}, "sequence all_to_all .*on_train_batch_end"),
    "experts": (Alone, {"parallel.expert": 2}, "expert counts .*on_train_batch_end"),
    "pipeline": (
        WaitsInABlock,
        {"parallel.pipeline.size": 2, "parallel.pipeline.micro_batches": 2},
        r"torch.distributed.barrier .* in _wait_on_rank_0.* in transfer of shapes from rank 0 to 1",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_ranks_that_share_layers(rank: int, world_size: int, layout: str) -> None:
    kind, options, words = LAYOUTS[layout]
    experts = {"num_experts": 4, "drop_tokens": False} if layout == "experts" else None
    module = kind(Run(None, {"num_layers": 2}, experts, steps=4))
    strategy = ZeROStrategy(1, explain_waits_after=AFTER_S, **nested({"sharding.min_unit_numel": 0, **options}))
    started = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        trainer_of(strategy, max_epochs=1, use_distributed_sampler=False).fit(module)
    assert time.monotonic() - started < wall(LIMIT_S)
    if (rank, layout) != (0, "pipeline"):  # there it is raised in the user's own call
        assert isinstance(error.value, OutOfStepError)
        assert re.search(words, str(error.value)), str(error.value)


@on_ranks(2)
def test_a_rank_that_has_ended_is_named(rank: int, world_size: int) -> None:
    """The weights are read after the fit, on rank 0 alone; rank 1 has nothing more to do."""
    module = Net()
    error, _, _ = run(module, stage=3)
    assert error is None
    if rank == 1:
        torch.distributed.barrier()
        module.trainer.strategy._break_connections()  # as when its process ends
        return
    torch.distributed.barrier()
    words = r"this rank has waited .* of 'first.weight', and rank 1 has ended the run.*is_global_zero"
    with pytest.raises(OutOfStepError, match=words):
        module.state_dict()


@on_ranks(2)
def test_code_on_one_rank_at_the_end_of_a_run(rank: int, world_size: int) -> None:
    class ReadsAtTheEnd(Net):
        def on_train_end(self) -> None:
            if self.trainer.is_global_zero:
                self.state_dict()

    error, _, _ = run(ReadsAtTheEnd(), stage=3)
    assert isinstance(error, OutOfStepError)
    assert "none can continue" in str(error)
    assert "on_train_end" in str(error)
    assert "in barrier" in str(error)
