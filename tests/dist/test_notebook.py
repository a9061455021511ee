"""The notebook aliases in a real Jupyter kernel: ranks are forked from it, and it goes on when they have ended."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.limits import wall
from tests.marks import slow
from tests.processes import is_running

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.wide, pytest.mark.timeout(300)]

PRELUDE = """
import os, time, lightning as L, torch
from tests.dist.ranks import Net, batches, quiet
from ls_strategy import ZeROStrategy
quiet()

def trainer(strategy, **options):
    return L.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False,
                     enable_progress_bar=False, enable_model_summary=False, max_epochs=1, **options)

class Failing(Net):
    def training_step(self, batch, i):
        if i == 1 and self.global_rank == 1:
            raise KeyError("rank 1 has a bad batch")
        return super().training_step(batch, i)

class Slow(Net):
    def training_step(self, batch, i):
        open(f"rank{self.global_rank}", "w").write(str(os.getpid()))
        time.sleep(0.2)
        return super().training_step(batch, i)
"""

FIT = """
model = Net()
before = [p.detach().clone() for p in model.parameters()]
first = trainer("{strategy}")
first.fit(model, batches())
assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters())), "weights come back into the notebook"
"""

TEST = """
(tested,) = first.test(model, batches(), verbose=False)
assert tested["test_loss"] > 0
"""

AGAIN = """
reference = Net()
trainer("ddp_notebook").fit(reference, batches())
for a, b in zip(reference.parameters(), model.parameters()):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
second = trainer(ZeROStrategy(2, start_method="fork"))
second.fit(model, batches())
assert torch.isfinite(next(model.parameters())).all()
"""


PLAIN = """
def losses_of(strategy, devices, **options):
    module = Net()
    made = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, logger=False, enable_checkpointing=False,
                     enable_progress_bar=False, enable_model_summary=False, max_epochs=1, **options)
    made.fit(module, batches())
    return module, made

def same(a, b):
    for p, q in zip(a.parameters(), b.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)

here, alone = losses_of("{strategy}", 1)
assert alone.strategy.launcher is None, "one device trains in the notebook's process"
assert alone.test(here, batches(), verbose=False)
forked, _ = losses_of("{strategy}", 2)
same(forked, losses_of("ddp_notebook", 2)[0])
same(here, losses_of("ddp_notebook", 1)[0])
again, _ = losses_of("{strategy}", 1)
same(again, here)
further = L.Trainer(accelerator="cpu", devices=2, strategy="{strategy}", logger=False, enable_checkpointing=False,
                    enable_progress_bar=False, enable_model_summary=False, max_epochs=1)
further.fit(here, batches())  # trained before in this process, now by forked ranks
assert torch.isfinite(next(here.parameters())).all()
assert alone.test(here, batches(), verbose=False)
"""

PROGRESS = """
import logging
logging.getLogger("lightning.pytorch").setLevel(logging.INFO)
shown = L.Trainer(accelerator="cpu", devices={devices}, strategy="zero3", logger=False, enable_checkpointing=False,
                  max_epochs=1, callbacks={callbacks})
shown.fit(Net(), batches())
"""


class Kernel:
    """A kernel that runs one cell after another."""

    def __init__(self, folder: Path) -> None:
        import nbformat  # here, so that a run which leaves these tests out does not import it
        from nbclient import NotebookClient

        self._new_cell = nbformat.v4.new_code_cell
        self.client = NotebookClient(
            nbformat.v4.new_notebook(), timeout=200, resources={"metadata": {"path": str(folder)}}
        )
        self.client.create_kernel_manager()
        environment = {k: v for k, v in os.environ.items() if k not in ("MASTER_PORT", "RANK", "LOCAL_RANK")}
        self.client.start_new_kernel(env={**environment, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"})
        self.client.start_new_kernel_client()

    def run(self, source: str) -> str:
        """Run a cell; its text output."""
        return "".join(out.get("text", "") for out in self.outputs(source))

    def outputs(self, source: str) -> list[Any]:
        """Run a cell; all that it shows."""
        cell = self._new_cell(source)
        self.client.nb.cells = [cell]
        done: Any = self.client.execute_cell(cell, 0)
        return done.outputs

    def error(self, source: str) -> str:
        """Run a cell that fails; the error as the user sees it."""
        from nbclient.exceptions import CellExecutionError

        with pytest.raises(CellExecutionError) as error:
            self.run(source)
        return str(error.value)

    def interrupt_when(self, is_time: Callable[[], bool]) -> None:
        """Press the stop button, in the background, once ``is_time()``."""

        def press() -> None:
            while not is_time():
                time.sleep(0.05)
            kernel: Any = self.client.km
            os.killpg(os.getpgid(kernel.provisioner.pid), signal.SIGINT)  # what Jupyter does

        threading.Thread(target=press, daemon=True).start()


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    started = Kernel(tmp_path)
    started.run(PRELUDE)
    yield started
    started.client._cleanup_kernel()


@pytest.mark.parametrize("stage", [slow(0), slow(1), 2, slow(3)])
def test_fit_test_and_a_second_fit_in_the_same_kernel(kernel: Kernel, stage: int) -> None:
    kernel.run(FIT.format(strategy=f"zero{stage}_notebook"))
    kernel.run(TEST)
    kernel.run(AGAIN)


@pytest.mark.parametrize("strategy", [slow("zero1"), "zero3", "zero3_offload"])
def test_plain_aliases_work(kernel: Kernel, strategy: str) -> None:
    """One device in the notebook's process, several forked from it, in any order."""
    kernel.run(PLAIN.replace("{strategy}", strategy))


@pytest.mark.parametrize(
    "callbacks", ["[]", "[L.pytorch.callbacks.TQDMProgressBar()]", "[L.pytorch.callbacks.RichProgressBar()]"]
)
def test_progress_of_forked_ranks_is_shown(kernel: Kernel, callbacks: str) -> None:
    """As text: what rich and widgets send from a forked process does not arrive."""
    output = kernel.run(PROGRESS.replace("{devices}", "2").replace("{callbacks}", callbacks))
    assert "over 2 ranks" in output, output
    assert "Epoch 0: 100%" in output, output
    assert "Trainable params" in output, output


def test_progress_of_a_rank_in_the_notebook_is_left_to_the_callback(kernel: Kernel) -> None:
    """As text, or as a widget where ipywidgets is installed."""
    callbacks = "[L.pytorch.callbacks.TQDMProgressBar()]"
    outputs = kernel.outputs(PROGRESS.replace("{devices}", "1").replace("{callbacks}", callbacks))
    assert "over 1 ranks" in str(outputs)
    # A widget's text changes after it is shown, and has spaces that do not break lines.
    shown = [str(state.get("value")) for state in kernel.client.widget_state.values()]
    assert "Epoch 0" in " ".join(" ".join([str(outputs), *shown]).split())


@pytest.mark.parametrize("stage", [slow(0), 3])
def test_a_ranks_error_arrives_in_the_cell_and_the_next_fit_works(kernel: Kernel, stage: int) -> None:
    assert "rank 1 has a bad batch" in kernel.error(f'trainer("zero{stage}_notebook").fit(Failing(), batches())')
    kernel.run(FIT.format(strategy=f"zero{stage}_notebook"))


def test_the_stop_button_ends_the_ranks_and_the_next_fit_works(kernel: Kernel, tmp_path: Path) -> None:
    files = [tmp_path / "rank0", tmp_path / "rank1"]
    kernel.interrupt_when(lambda: all(f.exists() and f.read_text() for f in files))
    before = time.monotonic()
    assert "SystemExit" in kernel.error(
        'trainer("zero2_notebook").fit(Slow(), batches(40000))'
    )  # Lightning's, for DDP too
    assert time.monotonic() - before < wall(60)
    ended = [int(f.read_text()) for f in files]
    deadline = time.monotonic() + wall(20)
    while any(is_running(pid) for pid in ended):
        assert time.monotonic() < deadline, f"of the ranks {ended} one still runs"
        time.sleep(0.1)
    kernel.run(FIT.format(strategy="zero2_notebook"))
