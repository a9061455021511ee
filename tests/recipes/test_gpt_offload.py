"""The offload overlays as the README gives them, on two ranks from the command line; and moments in fewer bits."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

pytest.importorskip("jsonargparse")
pytest.importorskip("tensorboard")

import yaml

from benchmarks.moments import FORMATS, compare, measure, with_moments
from tests.recipes.test_gpt_runs import CONFIGS, TINY, fit, scalars

README = CONFIGS.parent / "README.md"
SHORT = [*TINY, "--trainer.max_steps=3", "--model.sample.max_new_tokens=0"]
OVERLAYS = ("zero2_offload", "zero3_offload", "zero3_nvme", "zero3_offload_int8")


@pytest.mark.slow
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlay: str) -> None:
    monkeypatch.setenv("LS_STRATEGY_NVME_PATH", str(tmp_path / "drive"))
    fit(tmp_path, ["base", overlay], *SHORT)
    logged = scalars(tmp_path)
    assert len(logged["train/loss"]) == 3
    assert all(math.isfinite(loss) and 3.0 < loss < 8.0 for loss in logged["train/loss"])
    # States that are on a drive take no memory, and have no chart.
    masters, moments = (logged.get(f"zero_memory_mib/{kind}", [0.0])[-1] for kind in ("masters", "optimizer"))
    if "nvme" in overlay:
        assert masters < 1e-6
        assert moments == 0
        assert not list((tmp_path / "drive").iterdir())  # the file has no name, and went with its process
    else:
        assert moments / masters == pytest.approx(2.03 / 4 if "int8" in overlay else 2, rel=0.01)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_offload_changes_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit the run without it; 8-bit moments come near."""
    monkeypatch.setenv("LS_STRATEGY_NVME_PATH", str(tmp_path / "drive"))
    losses: dict[str, list[float]] = {}
    for overlay in ("zero2", "zero3", *OVERLAYS):
        fit(tmp_path / overlay, ["base", overlay], *TINY)
        losses[overlay] = scalars(tmp_path / overlay)["train/loss"]
    assert losses["zero2_offload"] == losses["zero2"]
    assert losses["zero3_offload"] == losses["zero3"]
    assert losses["zero3_nvme"] == losses["zero3"]
    assert losses["zero3_offload_int8"] != losses["zero3"]
    assert losses["zero3_offload_int8"] == pytest.approx(losses["zero3"], rel=0.02)


def test_the_readme_names_every_overlay() -> None:
    text = README.read_text()
    for overlay in OVERLAYS:
        assert re.search(rf"`{overlay}`", text), overlay
        assert yaml.safe_load((CONFIGS / f"{overlay}.yaml").read_text())["trainer"].keys() == {"strategy"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_moments_in_fewer_bits_learn_as_well() -> None:
    """Final, mean and validation loss differ from fp32's, seed by seed, by less than fp32's own over seeds."""
    table = compare(measure(FORMATS, with_moments, seeds=3, steps=100))
    for moments in ("bf16", "int8"):
        for kind in ("final", "mean", "val"):
            assert abs(table[moments][f"{kind}_difference"]) <= table[moments][f"{kind}_noise"], (moments, kind, table)
