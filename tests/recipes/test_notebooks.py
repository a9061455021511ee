"""The recipes' notebooks run from beginning to end, as in Jupyter, and show what their text says."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import lightning.pytorch  # noqa: F401  (sets environment variables when it is imported)
import pytest

nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "recipes").glob("*/notebook.ipynb"))
IDS = [path.parent.name for path in NOTEBOOKS]


def test_the_recipes_have_them() -> None:
    assert IDS == ["cifar", "gpt", "moe"]
    page = (ROOT / "recipes" / "README.md").read_text()
    assert all(f"({name}/notebook.ipynb)" in page for name in IDS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_a_notebook_is_valid_and_holds_no_results(path: Path) -> None:
    """What ran where is the business of whoever runs it; and results of an older version would stay."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) >= 5
    assert not [cell for cell in code if cell.outputs or cell.execution_count is not None]
    for cell in code:
        compile(cell.source, str(path), "exec")


# --- run --------------------------------------------------------------------------------------------------------------


def executed(path: Path, folder: Path) -> list[Any]:
    """The code cells of a notebook after they ran, in order, in ``folder``."""
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=400, resources={"metadata": {"path": str(folder)}})
    client.create_kernel_manager()
    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "XDG_CACHE_HOME": str(folder)}
    client.execute(env={**kept, **own})
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text(cells: list[Any]) -> str:
    return "".join(out.get("text", "") for cell in cells for out in cell.outputs)


def pictures(cells: list[Any]) -> int:
    return sum("image/png" in out.get("data", {}) for cell in cells for out in cell.outputs)


def reports(cells: list[Any]) -> list[str]:
    found = [out.get("data", {}).get("text/html", "") for cell in cells for out in cell.outputs]
    return [each for each in found if "<iframe srcdoc=" in each]


def numbers(pattern: str, cells: list[Any]) -> list[float]:
    return [float(found) for found in re.findall(pattern, text(cells))]


@pytest.mark.wide
@pytest.mark.dist
@pytest.mark.timeout(500)
def test_gpt(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    cells = executed(ROOT / "recipes" / "gpt" / "notebook.ipynb", tmp_path)
    shown = text(cells)
    assert "ZeROStrategy(stage=3)" in shown
    assert "over 2 ranks; sharded: optimizer, gradients, parameters" in shown
    assert re.search(r"Epoch 0: *\d+%", shown), "the ranks' progress is not in the notebook"
    first, longer = numbers(r"validation loss: ([\d.]+) nats", cells)
    assert longer < first < 3.0  # 3.2 is what the frequencies of bytes give
    assert pictures(cells) == 2
    (report,) = reports(cells)
    assert "train/loss" in report
    assert "def " in text(cells[-2:-1])


@pytest.mark.wide
@pytest.mark.dist
@pytest.mark.timeout(500)
def test_cifar(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("torchvision")
    cells = executed(ROOT / "recipes" / "cifar" / "notebook.ipynb", tmp_path)
    sharded, ddp = numbers(r"accuracy: ([\d.]+)", cells)
    assert sharded > 0.5  # a guess is right once in ten times
    assert sharded == ddp
    sharded, ddp = numbers(r"loss: ([\d.]+)\n", cells)
    assert sharded == pytest.approx(ddp, abs=2e-6)  # printed with six digits
    assert "over 2 ranks; sharded: optimizer, gradients" in text(cells)
    assert pictures(cells) == 2
    assert len(reports(cells)) == 1


@pytest.mark.wide
@pytest.mark.dist
@pytest.mark.timeout(500)
def test_moe(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    cells = executed(ROOT / "recipes" / "moe" / "notebook.ipynb", tmp_path)
    spread, replicated = numbers(r"validation loss: ([\d.]+) nats", cells)
    assert spread < 3.1
    assert abs(spread - replicated) < 0.05  # capacities, and which tokens are dropped, are per rank
    assert pictures(cells) == 1
    (report,) = reports(cells)
    assert "Tokens routed to each expert" in report


def test_the_stand_in_is_read_and_replaces_nothing(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    from recipes.cifar import stand_in
    from recipes.cifar.data import TEST_FILES, TRAIN_FILES, read_images

    stand_in.write(tmp_path, per_file=30)
    train, test = (read_images(str(tmp_path), names) for names in (TRAIN_FILES, TEST_FILES))
    assert (len(train), len(test)) == (150, 30)
    assert sorted(train.labels_N.unique().tolist()) == list(range(10))
    with pytest.raises(FileExistsError):
        stand_in.write(tmp_path)
