"""Trainers of tests and benchmarks."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning.pytorch as pl


def bare_trainer(strategy: Any, devices: int = 1, **options: Any) -> Any:
    """Return a Trainer on CPUs that logs, saves and prints nothing, unless options say otherwise."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(strategy=strategy, devices=devices, **{**defaults, **options})


def quiet() -> None:
    """Lightning's advice and progress, not here."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
