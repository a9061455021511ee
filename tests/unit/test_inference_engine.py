"""`init_inference` on one rank: options are checked however they are given, and arguments are compared by content."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ls_strategy.errors import ConfigError, StateError
from ls_strategy.extras.inference.engine import _comparable, init_inference


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": "disk"}, "offload must be 'cpu' or 'nvme'"),
        ({"quantize": "int3"}, "quantize must be 'int8' or 'int4'"),
        ({"dtype": 3}, "dtype must be"),
        ({"tensor_parallel_size": True}, "must be a whole number of at least 1"),
        ({"offload": "nvme", "nvme_path": 3}, "nvme_path must be"),
        ({"nvme_path": "/tmp"}, "needs offload='nvme'"),
        ({"dtype": "int8"}, r"Got dtype='int8'. Give a torch.dtype, or one of .* set quantize='int8'"),
        ({"tensor_parallel_size": 2}, "does not divide the 1 ranks of this run. Start torchrun"),
    ],
    ids=str,
)
@pytest.mark.parametrize("in_config", [False, True])
def test_options_are_checked_wherever_they_are_given(options: dict[str, Any], message: str, in_config: bool) -> None:
    with pytest.raises(ConfigError, match=message):
        init_inference(nn.Linear(2, 2), **({"config": options} if in_config else options))


@pytest.mark.parametrize(("dtype", "expected"), [("half", torch.float16), (torch.bfloat16, torch.bfloat16)])
def test_parameters_and_saved_buffers_are_cast_and_tables_are_not(dtype: Any, expected: torch.dtype) -> None:
    model = nn.BatchNorm1d(2)
    model.register_buffer("table", torch.ones(2), persistent=False)
    init_inference(model, dtype=dtype)
    assert {model.weight.dtype, model.running_mean.dtype} == {expected}  # type: ignore[union-attr]
    assert (model.table.dtype, model.num_batches_tracked.dtype) == (torch.float32, torch.int64)  # type: ignore[union-attr]


def test_a_model_is_frozen_and_evaluates() -> None:
    engine = init_inference(nn.Linear(2, 2))
    assert not engine.training
    assert not any(p.requires_grad for p in engine.parameters())


def test_attributes_are_those_of_the_model() -> None:
    model = nn.Linear(2, 3)
    model.config = SimpleNamespace(vocab_size=5)  # type: ignore[assignment]
    engine = init_inference(model)
    assert (engine.out_features, engine.config.vocab_size) == (3, 5)
    with pytest.raises(AttributeError, match="nothing"):
        engine.nothing  # noqa: B018


def test_notes_on_ignored_arguments_are_kept_and_described() -> None:
    engine = init_inference(nn.Linear(2, 2), use_triton=True)
    assert len(engine.notes) == 1
    assert engine.notes[0] in engine.describe()


def test_a_model_without_generate_is_refused() -> None:
    with pytest.raises(StateError, match="Linear has no method generate"):
        init_inference(nn.Linear(2, 2)).generate()


@pytest.mark.parametrize("other", [[[2, 1, 3]], [[1, 2, 4]], [[1], [2], [3]], [[1, 2, 3, 0]]])
def test_other_tokens_compare_as_different(other: list[list[int]]) -> None:
    assert _comparable(torch.tensor([[1, 2, 3]])) != _comparable(torch.tensor(other))


@pytest.mark.parametrize("value", [torch.tensor([[1, 2]]), [[1, 2]], 7, torch.tensor([True]), torch.zeros(0)])
def test_the_same_argument_compares_as_equal(value: Any) -> None:
    copy = value.clone() if isinstance(value, torch.Tensor) else value
    assert _comparable(value) == _comparable(copy)
