"""Mistakes in a program's YAML and on its command line: what ends the program is one sentence of this package.

Options come from the groups, so that a new one is covered without a change here.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from ls_strategy import ZeROStrategy
from ls_strategy.config.option_names import GROUPS, nested, option_names
from ls_strategy.errors import ConfigError, LSError

ROWS = [
    "stage: 7", "stage: two", "stage: [1]", "stge: 2", "timeout: 5", "timeout: x", "explain_waits_after: -1",
    "explain_waits_after: x", "start_method: pop", "offload_optimizer: cpu", "unit_classes: [a]",
    "sharding: 5", "sharding: [1]", "sharding: {min_unit_numl: 5}", "sharding: {min_unit_numel: x}",
    "sharding: {min_unit_numel: -1}", "sharding: {prefetch_units: 1.5}", "sharding: {block_classes: Block}",
    "sharding: {block_classes: {a: 1}}", "sharding: {overlap_step: maybe}", "sharding: {rank_weights: [a]}",
    "precision: 16-mixed", "precision: {moments: int4}", "precision: {loss_scale: {static: .inf}}",
    "precision: {loss_scale: {statc: 5}}", "precision: {reduce_dtype: fp8}", "precision: {fp32_modules: 5}",
    "precision: {master_weights: {a: 1}}",
    "offload: cpuu", "offload: [cpu]", "offload: {optimizer: gpu}", "offload: {optimizer: {teir: cpu}}",
    "offload: {optimizer: {tier: cpu, ratio: 2}}", "offload: {nvme_io: {parallelism: 1000000}}",
    "offload: {nvme_io: 5}",
    "offload: {nvme_path: 5}", "offload: {optmizer: cpu}", "offload: {offload_optimizer: cpu}",
    "activations: 5", "activations: {checkpointing: fulll}", "activations: {offload: {tier: x}}",
    "activations: {checkpointing: {policy: selective, keep: []}}", "activations: {partitioning: 5}",
    "activations: {checkpointing: {policy: full, keeep: []}}",
    "parallel: 2", "parallel: {tensor: {size: x}}", "parallel: {tensor: {sizee: 2}}", "parallel: {tensor: x}",
    "parallel: {pipeline: {size: 2, schedule: x}}", "parallel: {pipeline: {size: 1, schedule: zbv}}",
    "parallel: {pipeline: {size: 2, partition: [a]}}", "parallel: {expert: 0}", "parallel: {context: x}",
    "parallel: {pipeline: {size: 2, stages_per_rank: -1}}",
    "checkpoint: tar", "checkpoint: {format: tar}", "checkpoint: {background: no way}", "checkpoint: {on_error: x}",
    "checkpoint: {frozn: true}",
]  # fmt: skip

EMPTY = [
    ("ofload: {}", "no option 'ofload'. Did you mean 'offload'"),
    ("ofload: {optimizer: {}}", "no option 'ofload'. Did you mean 'offload'"),
    ("offload: {optimiser: {}}", "no option 'optimiser'. Did you mean 'optimizer'"),
    ("offload: {optimizer: {tier: cpu, pth: {}}}", "no option 'pth'"),
    ("offload.optimiser: {}", "no option 'optimiser'. Did you mean 'optimizer'"),
    ("precision_plugin: {}", "Got precision_plugin={}"),
    ("precision: {matmul: {}}", "must not be empty: leave it out, or switch it on. Set precision.matmul='fp8'"),
    ("offload: {optimizer: {}}", "TierConfig needs tier. Add it."),
]
"""Options without a value, of which jsonargparse says nothing."""

WRONG = ["x", -1, 2.5, True, None, ["x", 5], {"x": 1}]


@pytest.fixture(autouse=True)
def plain_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["program"])
    monkeypatch.chdir(tmp_path)


def words_of(row: str, form: str) -> list[str]:
    """The command line of a program with one mistake."""
    quiet = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]
    option, _, value = row.partition(": ")
    if form == "command":
        return [*quiet, "--trainer.strategy=ls_strategy.ZeROStrategy", f"--trainer.strategy.{option}={value}"]
    path = "ls_strategy.ZeROStrategy" if form == "class" else "zero2"
    strategy = f"{{class_path: {path}, init_args: {{{row}}}}}"
    Path("program.yaml").write_text(f"trainer:\n  strategy: {strategy}\n")
    return [*quiet, "--config", "program.yaml"]


def ending(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a program says at its end; empty if it builds everything."""
    capsys.readouterr()
    try:
        LightningCLI(BoringModel, run=False, save_config_callback=None, args=words)
    except LSError as error:
        return str(error)
    except SystemExit as error:
        return f"{'' if error.code == 2 else error.code}{capsys.readouterr().err.rpartition('error: ')[2].strip()}"
    return ""


def is_clear(text: str) -> bool:
    return len(text.splitlines()) == 1 and "jsonargparse" not in text and "Union" not in text and len(text) < 1000


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize("form", ["class", "alias", "command"])
def test_a_mistake_ends_with_a_sentence(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = {row: ending(words_of(row, form), capsys) for row in ROWS}
    assert [f"{row} -> {text}" for row, text in told.items() if not is_clear(text)] == []
    option = {row: row.partition(": ")[0] for row in ROWS}
    of_itself = ("policy=", "Got LossScaleConfig", "Got TierConfig", "Got NVMeIOConfig", "Got ActivationOffloadConfig")
    assert [row for row, text in told.items() if option[row] not in text and not text.startswith(of_itself)] == []


def test_an_unknown_option_that_is_empty_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for row, sentence in EMPTY:
        for form in ("class", "alias", "command"):
            assert sentence in ending(words_of(row, form), capsys), (row, form)
    for row in ("precision: {}", "offload: {nvme_io: {}}"):
        for form in ("class", "alias", "command"):
            assert ending(words_of(row, form), capsys) == ""


def test_an_empty_option_is_refused_or_changes_nothing() -> None:
    default = ZeROStrategy()
    for name in {*inspect.signature(ZeROStrategy).parameters, *option_names()} - {"deepspeed_config"}:
        options: dict[str, Any] = nested({name: {}})
        try:
            found = ZeROStrategy(**options)
        except ConfigError:
            continue
        same = dataclasses.replace(found.config.precision, loss_scale=None)  # whose default is an empty one
        assert dataclasses.replace(found.config, precision=same) == default.config, name


@pytest.mark.wide
def test_what_is_right_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    for row in (
        "stage: 1",
        "offload: {optimizer: {tier: cpu, ratio: 0.5}}",
        "timeout: '0:05:00'",
        "parallel: {context: 1}",
    ):
        for form in ("class", "alias"):
            assert ending(words_of(row, form), capsys) == ""


class Fails(BoringModel):
    """A module of the user, whose own error stays as jsonargparse reports it."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        if size < 0:
            raise ValueError("Got a size that is too small, but no cure")


def test_errors_of_others_stay_theirs() -> None:
    with pytest.raises(ValueError, match="Got a size that is too small"):
        LightningCLI(Fails, run=False, save_config_callback=None, args=["--model.size=-1"])
    with pytest.raises(SystemExit):
        LightningCLI(Fails, run=False, save_config_callback=None, args=["--model.size=x", "--trainer.strategy=zero2"])


def fields() -> Iterator[tuple[str, str]]:
    for group, kind in GROUPS.items():
        for field in dataclasses.fields(kind):
            yield group, field.name


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize(("group", "option"), list(fields()))
def test_a_wrong_value_is_refused_in_a_sentence_or_works(
    group: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    unclear = []
    for value in WRONG:
        row = f"{group}: {yaml.safe_dump({option: value}, default_flow_style=True).strip()}"
        text = ending(words_of(row, "class"), capsys)
        if text and not is_clear(text):
            unclear.append(f"{row} -> {text}")
        if not text:
            ZeROStrategy(**{group: {option: value}})
    assert unclear == []
