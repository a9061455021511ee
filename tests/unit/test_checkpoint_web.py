"""Checkpoints on a web server: files load as under Lightning, a folder is refused with the cure."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.demos.boring_classes import BoringModel

from ls_strategy import ZeROStrategy, load_from_checkpoint
from ls_strategy.checkpoint.consolidate import consolidate
from ls_strategy.checkpoint.source import read_checkpoint
from ls_strategy.config.checkpoint import CheckpointFormat
from ls_strategy.errors import CheckpointError
from ls_strategy.fabric.strategy import ZeROFabricStrategy
from tests.pickles import Runs
from tests.trainers import bare_trainer


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder, with a page that lists it, and logs nothing."""

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    served = tmp_path / "served"
    served.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(served))) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def trainer(strategy: Any, steps: int) -> pl.Trainer:
    return bare_trainer(strategy, max_steps=steps, limit_val_batches=0)


def save(path: Path, form: CheckpointFormat) -> BoringModel:
    model, runner = BoringModel(), trainer(ZeROStrategy(1, checkpoint=form), 2)
    runner.fit(model)
    runner.save_checkpoint(path)
    return model


def resume(strategy: Any, path: str) -> BoringModel:
    model, runner = BoringModel(), trainer(strategy, 3)
    runner.fit(model, ckpt_path=path, weights_only=False)
    assert runner.global_step == 3
    return model


def through_fabric(path: str, weights_only: bool | None = False) -> Any:
    fabric = Fabric(accelerator="cpu", devices=1, strategy=ZeROFabricStrategy(1))
    fabric.launch()
    return fabric.load(path, weights_only=weights_only)


READERS: dict[str, Callable[[str], Any]] = {
    "Lightning": lambda path: BoringModel.load_from_checkpoint(path, weights_only=False),
    "ours": lambda path: load_from_checkpoint(BoringModel, path, weights_only=False),
    "ddp": partial(resume, "ddp"),
    "zero1": lambda path: resume(ZeROStrategy(1), path),
    "fabric": through_fabric,
    "dictionary": partial(read_checkpoint, weights_only=False),
}


def test_a_file_is_loaded_by_every_reader(url: str, tmp_path: Path) -> None:
    model = save(tmp_path / "served" / "file.ckpt", "file")
    loaded = [READERS[name](f"{url}/file.ckpt") for name in ("Lightning", "ours")]
    assert all(torch.equal(m.layer.weight, model.layer.weight) for m in loaded)
    for name in ("fabric", "dictionary"):
        checkpoint = READERS[name](f"{url}/file.ckpt")
        assert torch.equal(checkpoint["state_dict"]["layer.weight"], model.layer.weight)
    torch.manual_seed(0)
    expected = READERS["ddp"](f"{url}/file.ckpt")
    torch.manual_seed(0)
    assert torch.allclose(READERS["zero1"](f"{url}/file.ckpt").layer.weight, expected.layer.weight, rtol=0, atol=1e-6)


WITHOUT_A_NAME = {("Lightning", "/"), ("ddp", "/")}
"""Addresses that torch itself refuses."""


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("reader", "end"),
    [pair for pair in itertools.product(READERS, ("", "/", "?download=1")) if pair not in WITHOUT_A_NAME],
)
def test_a_folder_is_refused_by_every_reader(url: str, tmp_path: Path, reader: str, end: str) -> None:
    save(tmp_path / "served" / "folder.ckpt", "sharded")
    with pytest.raises(CheckpointError, match=r"which is a folder, but over HTTP .* ls-strategy consolidate FOLDER"):
        READERS[reader](f"{url}/folder.ckpt{end}")


def test_after_the_cure_it_loads(url: str, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    save(folder, "sharded")
    served = tmp_path / "served" / "x.ckpt"
    folder.rename(served)
    with pytest.raises(CheckpointError, match=r"torch has cached the server's answer: remove .*x\.ckpt too") as caught:
        READERS["Lightning"](f"{url}/x.ckpt")
    served.rename(folder)
    consolidate(folder, served)
    Path(str(caught.value).split("remove ")[1].removesuffix(" too.")).unlink()
    assert isinstance(READERS["Lightning"](f"{url}/x.ckpt"), BoringModel)


def test_what_is_not_there_or_no_checkpoint_stays_the_error_that_it_was(url: str, tmp_path: Path) -> None:
    (tmp_path / "served" / "text.ckpt").write_text("<html>")
    (tmp_path / "served" / "other").mkdir()
    (tmp_path / "served" / "other" / "manifest.json").write_text('["of", "another", "program"]')
    for name in ("nothing.ckpt", "text.ckpt", "other"):
        with pytest.raises(Exception, match=r"404|invalid load key") as caught:
            READERS["Lightning"](f"{url}/{name}")
        assert not isinstance(caught.value, CheckpointError)


ON_THE_WEB: dict[str, Callable[[str], Any]] = {
    "fit": lambda path: trainer(ZeROStrategy(1), 3).fit(BoringModel(), ckpt_path=path),
    "validate": lambda path: trainer(ZeROStrategy(1), 3).validate(BoringModel(), ckpt_path=path, verbose=False),
    "ours": lambda path: load_from_checkpoint(BoringModel, path),
    "fabric": lambda path: through_fabric(path, weights_only=None),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("reader", ON_THE_WEB)
def test_a_file_runs_no_code_unless_it_is_told_to(url: str, tmp_path: Path, reader: str) -> None:
    """As on a disk. Lightning's own default for addresses builds whatever the file names."""
    served, marker = tmp_path / "served" / "file.ckpt", tmp_path / "ran"
    save(served, "file")
    checkpoint = torch.load(served, weights_only=False)
    torch.save({**checkpoint, "hyper_parameters": {"x": Runs(marker)}}, served)
    with pytest.raises(Exception, match="weights_only"):
        ON_THE_WEB[reader](f"{url}/file.ckpt")
    assert not marker.exists()
