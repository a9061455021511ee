"""Wrong values for every option of everything public: an error that says what is wrong, or it works.

Options come from signatures, so that a new one is covered without a change here.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import logging
import math
import signal
import types
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

import ls_strategy
from ls_strategy import ZeROStrategy
from ls_strategy.config import ParallelConfig, ZeROConfig, nested
from ls_strategy.errors import LSError
from ls_strategy.extras.inference.sampling import SamplingConfig
from ls_strategy.hints import hints_of
from ls_strategy.registry import EntryOf
from tests.trainers import bare_trainer

CONFIGS = (
    ls_strategy.OffloadConfig, ls_strategy.NVMeIOConfig, ls_strategy.LossScaleConfig, ls_strategy.RecomputeConfig,
    ls_strategy.ActivationOffloadConfig, ZeROConfig, ParallelConfig, SamplingConfig,
)  # fmt: skip

REQUIRED: dict[str, dict[str, Any]] = {
    "RecomputeConfig": {"policy": "full"},
    "ActivationOffloadConfig": {"tier": "cpu"},
    "TierConfig": {"tier": "cpu"},
    "TensorConfig": {"size": 2},
    "PipelineConfig": {"size": 2},
}
"""Options without a default."""

WRONG: list[Any] = [
    "x", "", "1", "-1", "no", "auto", "a\0b", "\ud800", "type:[", "zbv", "nvme", b"x",
    True, False, None, 0, 1, 2, 3, -1, 10**6, 2**63, 10**30, 10**400, -(10**400),
    0.5, 1.0, -0.5, 1e-320, 1e308, math.nan, math.inf, -math.inf, 1j, Decimal(1), Decimal("nan"), Fraction(1, 2),
    [], [1], ["x"], ["x", 5], [[]], [None], [-1], [math.nan], (), ("x",), (1, 2, 3), set(), {"x"}, range(3), {},
    {1: 2}, {"x": object()}, {"tier": "cpu"}, {"tier": 5}, {"tier": []}, {"ratio": "1"}, {"parallelism": 10**6},
    {"block_bytes": 4097}, {"static": math.inf}, {"keep": "x"}, {"policy": "selective", "keep": []},
    object(), object, int, len, lambda *_: 1 / 0, timedelta(0), timedelta(seconds=-1), timedelta.max,
    Path("x"), Path("a\0b"), torch.device("cpu"), torch.tensor(1), torch.tensor([1.0, 2.0]), torch.float32, torch.int8,
    np.int64(2), np.float32(0.5), np.array([1]), np.bool_(True), np.str_("x"),
    *(config(**REQUIRED.get(config.__name__, {})) for config in CONFIGS),
]  # fmt: skip


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def _nothing() -> dict[str, Any]:
    return {}


ARGUMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "Lion": lambda: {"params": [nn.Parameter(torch.ones(2))]},
    "Lamb": lambda: {"params": [nn.Parameter(torch.ones(2))]},
    "Lars": lambda: {"params": [nn.Parameter(torch.ones(2))]},
    "Muon": lambda: {"params": [nn.Parameter(torch.ones(2, 2))]},
    "QKClip": lambda: {"query": "q.weight", "key": "k.weight", "head_width": 2, "num_heads": 2},
    "SOAP": lambda: {"params": [nn.Parameter(torch.ones(2, 2))]},
    "HuggingFaceExport": lambda: {"path": "export"},
    "DiLoCo": lambda: {"meet": "host:1", "island": 0, "islands": 2},
    "SequenceCurriculum": lambda: {"lengths": [8, 64], "until": [10]},
    "RandomTokenDropping": lambda: {"kept": [8, 64], "until": [10]},
    "MoE": lambda: {"hidden_size": 4, "expert": nn.Linear(4, 4)},
    "FeedForward": lambda: {"hidden_size": 4, "intermediate_size": 8},
    "GatedFeedForward": lambda: {"hidden_size": 4, "intermediate_size": 8},
    "PackedDocuments": lambda: {"documents": [[1, 2, 3]], "length": 4},
    "document_attention": lambda: {
        **dict.fromkeys(("query", "key", "value"), torch.zeros(1, 2, 3, 4)),
        "documents": torch.zeros(1, 3, dtype=torch.long),
    },
    "document_mask": lambda: {"documents": torch.zeros(1, 3, dtype=torch.long)},
    "init_inference": lambda: {"model": network()},
    "stream_blocks": lambda: {"model": network()},
    "convert_moe": lambda: {"model": network()},
    "linear_cross_entropy": lambda: {"hidden": torch.ones(3, 4), "head": torch.ones(5, 4), "target": torch.arange(3)},
    "load_safetensors": lambda: {"module": network(), "files": "not there"},
    "load_from_checkpoint": lambda: {"module_class": BoringModel, "path": "not there"},
    **{name: partial(dict, options) for name, options in REQUIRED.items()},
}
"""Arguments without a default."""

UNCHECKED = {"InferenceEngine", "moe_losses", "update_router_bias"}
"""Made by `init_inference`; called in every step with a model."""

OTHERS = {*((name, "params") for name in ("Lamb", "Lars", "Lion", "Muon", "SOAP")), ("MoE", "expert")}
"""Parameters, which torch checks for all optimizers alike; and a function of the user's, which may fail as it likes."""

LARGE = {("FeedForward", "hidden_size"), ("FeedForward", "intermediate_size"), ("GatedFeedForward", "hidden_size"),
         ("GatedFeedForward", "intermediate_size"), ("MoE", "hidden_size"), ("MoE", "num_experts")}  # fmt: skip
"""Sizes of tensors: what is too large for the machine is for the machine to say."""


def targets() -> dict[str, Callable[..., Any]]:
    public = {name: getattr(ls_strategy, name) for name in ls_strategy.__all__}
    found = {n: t for n, t in public.items() if callable(t) and not (isinstance(t, type) and issubclass(t, Exception))}
    return {**{n: t for n, t in found.items() if n not in UNCHECKED}, **{c.__name__: c for c in CONFIGS}}


class TooLongError(BaseException):
    """A call did not return."""


@contextmanager
def limit(seconds: int) -> Generator[None, None, None]:
    def stop(*_: Any) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(call: Callable[[], Any], seconds: int = 10) -> str | None:
    """None if it worked, or was refused as it should be."""
    try:
        with limit(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = call()
            if hasattr(result, "restore"):
                result.restore()
    except LSError as error:
        return None if len(str(error).split()) > 5 else f"says too little: {error}"
    except TooLongError:
        return "did not return"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def words(value: Any) -> str:
    try:
        return f"{value!r:.60}"
    except Exception:
        return type(value).__name__


def options(target: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, p in inspect.signature(target).parameters.items() if p.kind not in kinds]


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", targets())
def test_a_wrong_value_is_refused_or_works(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    target, bad = targets()[name], []
    for option in options(target):
        for value in WRONG:
            if (name, option) in OTHERS and not isinstance(value, (int, str, timedelta)):
                continue
            if (name, option) in LARGE and isinstance(value, int) and value > 10**5:
                continue
            given = {**ARGUMENTS.get(name, _nothing)(), option: value}
            result = outcome(lambda given=given: target(**given))
            if result is not None:
                bad.append(f"{name}({option}={words(value)}) -> {result}")
    assert not bad, "\n".join(bad)


def fits(value: Any, hint: Any) -> bool | None:
    """Whether a plain value is of a plain hint; None where this oracle cannot say."""
    if get_origin(hint) in (Union, types.UnionType):
        found = [fits(value, each) for each in get_args(hint)]
        return True if True in found else None if None in found else False
    if get_origin(hint) in (Literal, Annotated):
        choices = get_args(hint) if get_origin(hint) is Literal else _note(hint).names
        value = int(value) if isinstance(value, np.integer) else value
        return any(type(value) is type(choice) and value == choice for choice in choices)
    if hint in (None, type(None)):
        return value is None
    plain = {bool: (bool,), int: (int, np.integer), str: (str,), float: (int, float, np.number, Fraction)}
    if hint in plain:
        return isinstance(value, plain[hint]) and (hint is bool or not isinstance(value, bool))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return isinstance(value, (hint, dict))
    return isinstance(value, (list, tuple)) if get_origin(hint) in (list, tuple) else None


def _note(hint: Any) -> EntryOf:
    note = get_args(hint)[1]
    assert isinstance(note, EntryOf)
    return note


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", targets())
def test_what_has_another_type_is_not_accepted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the hint of an option does not allow is refused, also where the option is not used."""
    monkeypatch.chdir(tmp_path)
    target, accepted = targets()[name], []
    hints = hints_of(target.__init__ if isinstance(target, type) and name not in _DATACLASSES else target)
    for option in options(target):
        for value in WRONG:
            if fits(value, hints[option]) is not False:
                continue
            given = {**ARGUMENTS.get(name, _nothing)(), option: value}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    target(**given)
                except LSError:
                    continue
            accepted.append(f"{name}({option}={words(value)})")
    assert not accepted, "\n".join(accepted)


_DATACLASSES = {config.__name__ for config in CONFIGS}


def test_the_oracle_can_say_no() -> None:
    assert fits(True, int) is False
    assert fits("no", bool) is False
    assert fits(True, Literal[0, 1]) is False
    assert fits(1, float) is True


def test_every_option_of_the_strategy_has_a_hint_that_is_checked() -> None:
    hints = hints_of(ZeROStrategy.__init__)
    assert all(option in hints for option in options(ZeROStrategy))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"sharding.min_unit_numel": "1"},
            r"Got sharding\.min_unit_numel='1', but .*whole number of at least 0. Set sharding\.min_unit_numel=1\.",
        ),
        ({"timeout": 5}, r"Got timeout=5, but .*timedelta.* Set timeout=datetime\.timedelta\(seconds=5\)"),
        (
            {"checkpoint.background": "no"},
            r"Got checkpoint.background='no', but .*True or False. Set checkpoint.background=False\.",
        ),
        ({"stage": True}, r"Got stage=True, but .*0, 1, 2, 3 or 'auto'. Set stage=1\."),
        (
            {"precision.loss_scale": {"static": math.inf}},
            r"Got precision\.loss_scale=.*Got LossScaleConfig\(static=inf\).*finite number above 0",
        ),
        (
            {"parallel.pipeline": {"size": 2, "schedule": "x"}},
            r"Got parallel.pipeline.schedule='x', but .*'zbv' or 'dualpipe_v'",
        ),
        (
            {"parallel.pipeline": {"size": 1, "schedule": "zbv"}},
            r"Got parallel.pipeline.schedule='zbv', but it requires a pipeline",
        ),
        ({"offload.optimizer": {"teir": "cpu"}}, r"TierConfig has no option 'teir'. Did you mean 'tier'\?"),
        (
            {"offload.nvme_io": {"parallelism": 10**6}},
            r"Got offload\.nvme_io=.*Got NVMeIOConfig\(parallelism=1000000\).*from 1 to 1,024",
        ),
        (
            {"sharding.block_classes": "Block"},
            r"Got sharding.block_classes='Block', but .*a list of texts.* Set sharding.block_classes=\['Block'\]",
        ),
        ({"start_method": "pop"}, r"Set start_method='popen'"),
    ],
)
def test_messages_have_value_rule_and_cure(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ls_strategy.ConfigError, match=message):
        ZeROStrategy(**nested(given))


def test_a_dataclass_may_be_a_dictionary_as_in_yaml() -> None:
    by_dict = ZeROStrategy(
        offload={"optimizer": {"tier": "cpu", "ratio": 0.5}, "nvme_io": {"parallelism": np.int64(2)}}
    )
    by_class = ZeROStrategy(
        offload={
            "optimizer": ls_strategy.TierConfig(tier="cpu", ratio=0.5),
            "nvme_io": ls_strategy.NVMeIOConfig(parallelism=2),
        }
    )
    assert by_dict.config == by_class.config


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_what_is_accepted_trains_or_is_refused_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step with every value that the constructor accepts."""
    monkeypatch.chdir(tmp_path)
    for name in ("lightning.pytorch", "lightning.fabric"):
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)
    bad = []
    for option in options(ZeROStrategy):
        for value in WRONG:
            try:
                strategy = ZeROStrategy(**nested({option: value}))
            except LSError:
                continue

            def fit(strategy: ZeROStrategy = strategy) -> None:
                trainer = bare_trainer(strategy, max_steps=1, limit_val_batches=0)
                trainer.fit(BoringModel())

            result = outcome(fit, 60)
            if result is not None:
                bad.append(f"{option}={words(value)} -> {result}")
            del strategy, fit
            gc.collect()  # threads of a tier end with the engine
    assert not bad, "\n".join(bad)
