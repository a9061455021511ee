"""Record a step that runs on shapes: the functions that it calls with values of the model, in their order.

In such a run, values that depend on the batch alone are real, and those of the model are placeholders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

_ALIASES = {
    "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div", "negative": "neg", "concat": "cat",
    "concatenate": "cat", "hstack": "cat", "vstack": "cat", "absolute": "abs", "get": "view", "rmatmul": "matmul",
    "iadd": "add", "radd": "add", "rmul": "mul", "truediv": "div", "rtruediv": "rdiv",
    "isub": "sub", "imul": "mul", "itruediv": "div",
}  # fmt: skip

_FINITE = {"isfinite": True, "isnan": False, "isinf": False}


class Unread:
    """Stand-in for a number of the model in a run on shapes.

    A step can store it, log it, compute with it and compare it, but not read its value.
    """

    def __init__(self, record: RecordedStep, tensor: Tensor | None) -> None:
        self._record = record
        self.tensor = tensor
        """What was read; None for what was computed from it."""

    def _computed(self, *_: Any) -> Unread:
        return Unread(self._record, None)

    def _compared(self, _: Any) -> bool:
        self._record.asked = True
        return self._record.answer

    def __format__(self, _: str) -> str:
        return "?"

    def __repr__(self) -> str:
        raise ValueError("a number of the model is not known where a pipeline runs a step on shapes")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _computed
    __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = __round__ = _computed
    __lt__ = __le__ = __gt__ = __ge__ = _compared


@dataclass(frozen=True)
class RecordedCall:
    """A call of a function with a value of the model."""

    name: str
    """The function's name, the same for a method, an operator and the version in place."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: list[Tensor]
    """Values of the model among the results. For a function in place also the tensor that it changed."""

    tokens: Tensor | None = None
    """Of a loss that is a mean over tokens: their number, see `counts.tokens_of`."""


@dataclass
class RecordedStep:
    """One run of a step on shapes."""

    operations: list[RecordedCall] = field(default_factory=list)
    result: Any = None
    """What the step returned."""

    logged: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """The values that the step logged, by name."""

    batch_sizes: Mapping[str, Any] = field(default_factory=dict)
    """What the step gave as ``batch_size`` with them."""

    complete: bool = False
    """Whether the step ran to its end."""

    random: bool = False
    """Whether the step drew random numbers."""

    answer: bool = False
    """What the step gets where it asks whether a condition of the model's values holds, see `answer_to`."""

    asked: bool = False
    """Whether the step got `answer`."""

    declared: Tensor | float | None = None
    """What the step says that its loss is a mean over."""

    def add(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        results: list[Tensor],
        tokens: Tensor | None = None,
    ) -> None:
        """Note a call, unless it has no result of the model."""
        if results:
            name = getattr(func, "__name__", "").strip("_")
            self.operations.append(RecordedCall(_ALIASES.get(name, name), func, args, kwargs, results, tokens))

    def answer_to(self, condition: Tensor) -> bool:
        """Return whether a condition holds: that values are finite does, and of others the step gets `answer`."""
        self.asked = True
        holds = True
        for operation in reversed(self.operations):
            if not any(result is condition for result in operation.results):
                continue
            if operation.name in _FINITE:
                return holds == _FINITE[operation.name]
            if operation.name not in ("any", "all", "logical_not", "invert", "bitwise_not"):
                break
            holds ^= operation.name not in ("any", "all")
            condition = operation.args[0]
        return self.answer
