"""The overlays about activations and about models on several ranks, from the command line."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

pytest.importorskip("jsonargparse")
pytest.importorskip("tensorboard")

from tests.recipes.test_gpt_runs import CONFIGS, TINY, fit, scalars

README = CONFIGS.parent / "README.md"
SHORT = [*TINY, "--trainer.max_steps=3", "--data.batch_size=8", "--model.sample.max_new_tokens=0"]
TWO_RANKS = ("tp2", "sp2", "pp2")
FOUR_RANKS = ("tp2_zero3", "pp2_zero1", "pp2_zero2", "pp2_tp2")
ACTIVATIONS = ("recompute", "recompute_selective", "offload_activations")


@pytest.mark.slow
@pytest.mark.parametrize("overlay", TWO_RANKS)
def test_one_model_on_two_ranks_learns_as_on_one(tmp_path: Path, overlay: str) -> None:
    """The two see the same batches as a single rank does: the losses are its own."""
    alone = ["--trainer.devices=1", "--trainer.strategy=zero0"]
    fit(tmp_path / "one", ["base"], *SHORT, *alone)
    fit(tmp_path / overlay, ["base", overlay], *SHORT)
    expected, found = scalars(tmp_path / "one"), scalars(tmp_path / overlay)
    assert len(found["train/loss"]) == 3
    for name in ("train/loss", "val/loss", "zero/grad_norm"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("overlay", [*ACTIVATIONS, *FOUR_RANKS])
def test_runs(tmp_path: Path, overlay: str) -> None:
    fit(tmp_path, ["base", overlay], *SHORT)
    logged = scalars(tmp_path)
    assert len(logged["train/loss"]) == 3
    assert all(math.isfinite(loss) and 3.0 < loss < 8.0 for loss in logged["train/loss"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_recomputed_and_offloaded_activations_change_no_loss(tmp_path: Path) -> None:
    for overlay in ("zero3", *ACTIVATIONS):
        fit(tmp_path / overlay, ["base", overlay], *SHORT, "--model.config.dropout=0.1")
    expected = scalars(tmp_path / "zero3")["train/loss"]
    for overlay in ACTIVATIONS:
        assert scalars(tmp_path / overlay)["train/loss"] == expected, overlay


def test_the_readme_names_every_overlay() -> None:
    text = README.read_text()
    for overlay in (*TWO_RANKS, *FOUR_RANKS, *ACTIVATIONS):
        assert re.search(rf"`{overlay}`", text), overlay
