"""Derive what the result of a function is, see `values`, from what its arguments are.

The rules are exact for functions that treat every sample on its own. The result of a function without a rule is
`Unclear`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

from ls_strategy.parallel.pipeline.values import Constant, Factor, Part, SampleRows, Scale, Unclear, Value, close


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SELECTS = _names("getitem index_select masked_select select narrow take")
"""Functions whose other arguments say where, and not what."""

_SAME = SELECTS | _names(
    "view reshape flatten unflatten squeeze unsqueeze transpose permute t T mT movedim swapaxes to float double half "
    "bfloat16 type type_as clone contiguous detach neg positive expand expand_as view_as reshape_as "
    "requires_grad cpu cuda unbind nan_to_num ravel"
)
"""Functions that give the multiple of a result for the multiple of their argument, element by element."""

_PRODUCTS = _names("mul div matmul mm bmm mv dot vdot inner einsum tensordot")
_SUMS = _PRODUCTS | _names("sum nansum linear count_nonzero")
_JOINS = _names("add sub rsub stack cat setitem")
_NOT_LINEAR = _names(
    "exp exp2 expm1 log log2 log10 log1p logsumexp sqrt rsqrt pow rpow square abs clamp clamp_min clamp_max clip relu "
    "gelu sigmoid logsigmoid tanh softplus softmax log_softmax max min amax amin maximum minimum std var norm "
    "vector_norm prod median quantile topk sort reciprocal rdiv"
)

_LONGEST = SELECTS | _names("pad block")
"""Functions whose result may be as long as the longest sequence of the micro-batch."""

_ALONG: dict[str, tuple[int, int | None]] = {
    "softmax": (1, -1), "log_softmax": (1, -1), "softmin": (1, -1), "normalize": (2, 1), "cumsum": (1, -1),
    "cumprod": (1, -1), "logcumsumexp": (1, -1), "cummax": (1, -1), "cummin": (1, -1), "sort": (1, -1),
    "argsort": (1, -1), "topk": (2, -1), "flip": (1, None), "roll": (2, None), "diff": (2, -1), "chunk": (2, 0),
    "split": (2, 0), "tensor_split": (2, 0), "unbind": (1, 0), "narrow": (1, None), "select": (1, None),
}  # fmt: skip
"""Functions along a dimension: the place of that argument, and its default."""


@dataclass(frozen=True)
class Input:
    """A tensor or a number that a function got."""

    value: Value
    shapes: Sequence[tuple[int, ...]]
    """In the runs of the micro-batches, and of the batch."""

    @property
    def numels(self) -> list[int]:
        """Its elements in these runs."""
        return [math.prod(shape) for shape in self.shapes]


@dataclass(frozen=True)
class Call:
    """The call of a function in all runs."""

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: Sequence[Input]
    tokens: Value | None
    """What the number of tokens is that the result is a mean over, if it is."""

    shapes: Sequence[tuple[int, ...]]
    """Of the result in the runs of the micro-batches, and of the batch."""

    samples: Sequence[int]
    """In the micro-batches and in the batch."""

    @property
    def ones(self) -> Factor:
        """The factors of a sum."""
        return (1.0,) * (len(self.samples) - 1)

    @property
    def has_rows(self) -> bool:
        """Return whether the size of the result depends on the number of samples."""
        return any(shape != self.shapes[-1] for shape in self.shapes)

    def inputs_of(self, kind: type[Any]) -> list[Any]:
        """Return the arguments that are of one kind."""
        return [each.value for each in self.inputs if isinstance(each.value, kind)]


def result_of(call: Call) -> Value:
    """Return what a result of the call is."""
    unclear: list[Unclear] = call.inputs_of(Unclear)
    if unclear:
        return next((each for each in unclear if each.certain), unclear[0])
    if call.inputs_of(Part):
        return _of_sums(call)
    if call.inputs_of(SampleRows):
        return _of_rows(call)
    if call.has_rows:
        return SampleRows(call.ones)
    return _unknown(call) if call.inputs_of(Scale) else Constant()


# values over all samples ----------------------------------------------------------------------------------------------


def _of_sums(call: Call) -> Value:
    if call.inputs_of(SampleRows) or call.has_rows:
        return Unclear(f"{call.name}() of single samples and of a value over all samples")
    parts: list[Part] = call.inputs_of(Part)
    if call.name in _JOINS:
        return _joined(call, parts)
    if len(parts) == 1 and (call.name in _SAME or call.name in ("sum", "mean")):
        return parts[0]
    divides = call.name == "div" and isinstance(call.inputs[0].value, Part)
    if len(parts) == 1 and (divides or call.name == "mul"):
        return _scaled(parts[0], call)
    if len(parts) > 1 or call.name in _NOT_LINEAR or call.name == "div":
        return Unclear(f"{call.name}() of a value over all samples")
    return _unknown(call)


def _joined(call: Call, parts: list[Part]) -> Value:
    if call.inputs_of(Scale):
        return Unclear(f"{call.name}() of a value over all samples and a number that depends on the batch")
    constant = any(not each.zero for each in call.inputs_of(Constant))
    factors = tuple(factor for part in parts for factor in part.factors)
    return Part(factors, constant or any(part.constant for part in parts))


def _scaled(part: Part, call: Call) -> Value:
    scales: list[Scale] = call.inputs_of(Scale)
    if not scales or (call.name == "mul" and scales[0].random):
        return part
    by = _inverse(scales[0]) if call.name == "mul" else _ratio(scales[0])
    if by is None or part.constant:
        return Unclear("a sum of terms that are multiplied by a number that depends on the batch")
    return Part(tuple(_times(factor, by) for factor in part.factors))


def _ratio(scale: Scale) -> Factor | None:
    return scale.ratio() if scale.of_batch else None


def _inverse(scale: Scale) -> Factor | None:
    ratio = _ratio(scale)
    return tuple(1 / each for each in ratio) if ratio is not None and all(ratio) else None


def _times(left: Factor, right: Factor) -> Factor:
    return tuple(a * b for a, b in zip(left, right, strict=True))


# values of single samples ---------------------------------------------------------------------------------------------


def _of_rows(call: Call) -> Value:
    if _mixes(call):
        return Unclear(f"{call.name}() of different samples")
    factor = _product(call) if call.name in _PRODUCTS else _common_factor(call)
    if isinstance(factor, Unclear):
        return factor
    return SampleRows(factor) if call.has_rows else _reduced(call, factor)


def _mixes(call: Call) -> bool:
    """Return whether rows of the result depend on several samples, or on which place a sample has in the batch."""
    rows = [each for each in call.inputs if isinstance(each.value, SampleRows)]
    if call.has_rows and call.name not in _LONGEST:
        # (samples, samples), for example: of a batch these are more than of its micro-batches.
        numels = [math.prod(shape) for shape in call.shapes]
        pairs = sum(numels[:-1]) != numels[-1]
        if pairs and all(sum(each.numels[:-1]) == each.numels[-1] for each in rows):
            return True
    if call.name == "getitem":
        index = call.args[1][0] if isinstance(call.args[1], tuple) and call.args[1] else call.args[1]
        is_part = (isinstance(index, slice) and index != slice(None)) or (isinstance(index, int) and index is not True)
        return is_part and 0 in _sample_dims(call.inputs[0].shapes, call.samples)
    if call.name not in _ALONG:
        return False
    place, default = _ALONG[call.name]
    given = call.kwargs.get("dim", call.kwargs.get("dims", call.args[place] if len(call.args) > place else default))
    dims = given if isinstance(given, tuple | list) else [given]
    along = _sample_dims(rows[0].shapes, call.samples)
    return any(dim is None or dim % len(rows[0].shapes[0]) in along for dim in dims if along)


def _sample_dims(shapes: Sequence[tuple[int, ...]], samples: Sequence[int]) -> list[int]:
    """Return the dimensions whose length is proportional to the number of samples."""
    *parts, whole = shapes
    *sizes, all_samples = samples
    return [
        dim
        for dim, length in enumerate(whole)
        if all(
            len(part) == len(whole) and part[dim] != length and part[dim] * all_samples == length * size
            for part, size in zip(parts, sizes, strict=True)
        )
    ]


def _common_factor(call: Call) -> Factor | Unclear:
    """Return the factor of the arguments' rows, which must all have the same one unless they are multiplied."""
    factors = [rows.factor for rows in call.inputs_of(SampleRows)]
    if call.inputs_of(Scale) and call.name != "block":  # blocks pass on the number of tokens, for the loss
        return Unclear(f"{call.name}() of samples and a number that depends on the batch", certain=False)
    if all(close(factor, call.ones) for factor in factors):
        return call.ones
    constants = any(not each.zero for each in call.inputs_of(Constant))
    if len(factors) == 1 and (call.name in _SAME or call.name in ("sum", "mean")):
        return factors[0]
    if call.name in _JOINS and not constants and all(close(factor, factors[0]) for factor in factors):
        return factors[0]
    return Unclear(f"{call.name}() of samples that were scaled over the batch", certain=call.name in _NOT_LINEAR)


def _product(call: Call) -> Factor | Unclear:
    factor = call.ones
    for place, each in enumerate(call.inputs):
        divides = call.name == "div" and place == 1
        if isinstance(each.value, SampleRows):
            by: Factor | None = each.value.factor
            if divides:
                by = tuple(1 / one for one in by) if all(by) else None
        elif isinstance(each.value, Scale) and (divides or not each.value.random):
            by = _ratio(each.value) if divides else _inverse(each.value)
        else:
            continue
        if by is None or not all(math.isfinite(one) for one in by):
            return Unclear(f"{call.name}() of samples and a number that is 0 for some micro-batch")
        factor = _times(factor, by)
    return factor


def _reduced(call: Call, factor: Factor) -> Value:
    if call.tokens is not None:
        return Part((_times(factor, _share(call.tokens, call)),))
    if call.name in _SUMS:
        return Part((factor,))
    if call.name == "mean":
        return _mean(call, factor)
    if call.name in _NOT_LINEAR:
        return Unclear(f"{call.name}() over all samples")
    how = _reduction(call)
    if how == "sum":
        return Part((factor,))
    return _mean(call, factor) if how in ("mean", "batchmean") else _unknown(call)


def _share(tokens: Value, call: Call) -> Factor:
    if isinstance(tokens, Scale) and tokens.of_batch:
        return tokens.ratio()
    *sizes, samples = call.samples  # not a single token in the batch
    return tuple(size / samples for size in sizes)


def _mean(call: Call, factor: Factor) -> Value:
    *numels, numel = next(each.numels for each in call.inputs if isinstance(each.value, SampleRows))
    if call.name == "ctc_loss":  # divided by the length of each target first
        *numels, numel = call.samples
    if sum(numels) != numel or not numel:
        return Unclear(f"{call.name}() over elements whose number depends on the other samples")
    return Part((_times(factor, tuple(each / numel for each in numels)),))


def _reduction(call: Call) -> str | None:
    """Return the argument ``reduction`` of a loss function."""
    try:
        bound = signature(call.func).bind(*call.args, **call.kwargs)
    except (TypeError, ValueError):
        return None
    bound.apply_defaults()
    given = bound.arguments
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return None
    return given.get("reduction")


def _unknown(call: Call) -> Unclear:
    return Unclear(f"{call.name}(), for which the pipeline has no rule", certain=False)
