"""Derive how the values that a step computes for a batch follow from those for its micro-batches.

::

    per_token = cross_entropy(logits, targets, reduction="none")      SampleRows  1, 1
    total = (per_token * mask).sum()                                  Part        1, 1
    tokens = mask.sum()                                               Scale       2, 4 of 6
    loss = total / tokens                                             Part        2/6, 4/6

The step runs on shapes, once for each micro-batch and once for the batch (`record`), and `rules` are applied to the
functions that it calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ls_strategy._torch import tree_iter
from ls_strategy.parallel.pipeline.batches import with_sample_lists
from ls_strategy.parallel.pipeline.placeholder import is_meta
from ls_strategy.parallel.pipeline.record import RecordedCall, RecordedStep, Unread
from ls_strategy.parallel.pipeline.rules import SELECTS, Call, Input, result_of
from ls_strategy.parallel.pipeline.values import Constant, KnownValues, Scale, Unclear, Value

UNKNOWN = Unclear("a value that the pipeline cannot follow on shapes", certain=False)
_BINARY = ("add", "sub", "rsub", "mul", "div", "rdiv")


class Derivation:
    """Derivation of how every value in the records of a step relates the batch to its micro-batches."""

    def __init__(self, parts: Sequence[RecordedStep], whole: RecordedStep, sizes: Sequence[int]) -> None:
        """Apply the rules.

        Args:
            parts: Runs for the micro-batches.
            whole: Run for the batch.
            sizes: Samples of the micro-batches.
        """
        self._runs = runs = [*parts, whole]
        self._samples = [*sizes, sum(sizes)]
        self._known = KnownValues(random=any(run.random for run in runs))
        self._values: dict[tuple[int, ...], Value] = {}
        self._indices: dict[int, list[Tensor]] = {}
        names = [[operation.name for operation in run.operations] for run in runs]
        self.complete = all(run.complete for run in runs) and all(each == names[0] for each in names)
        """Whether the runs called the same functions to their end. Otherwise every value is unclear."""

        if self.complete:
            calls = list(zip(*(run.operations for run in runs), strict=True))
            for operations in calls:
                self._note_known(operations)
            for operations in calls:
                self._derive(operations)

    @cached_property
    def _leaves(self) -> list[list[Any]]:
        """The leaves of the results of all runs; empty if the results have different structures."""
        results = [with_sample_lists(r.result, n, top=False) for r, n in zip(self._runs, self._samples, strict=True)]
        leaves = [list(tree_iter(result)) for result in results]
        return leaves if self.complete and len({len(each) for each in leaves}) == 1 else []

    def of(self, leaves: Sequence[Any]) -> Value:
        """Return what a value is, of which every run has one."""
        if not self.complete or len(leaves) != len(self._samples):
            return UNKNOWN
        leaves = [leaf.tensor if isinstance(leaf, Unread) else leaf for leaf in leaves]
        found = self._values.get(tuple(map(id, leaves)))
        if found is not None:
            return found
        if all(leaf is leaves[0] for leaf in leaves) and isinstance(leaves[0], Tensor):
            return Constant()
        if all(isinstance(leaf, Tensor) and not is_meta(leaf) for leaf in leaves):
            return self._known.of(leaves)
        return self._of_numbers(leaves) if all(isinstance(leaf, int | float) for leaf in leaves) else UNKNOWN

    def declared(self) -> list[float] | None:
        """Return what the step says that the losses of the micro-batches are means over, if it says it."""
        numbers = [run.declared for run in self._runs[:-1]]
        return None if any(number is None for number in numbers) else [float(number) for number in numbers]  # type: ignore[arg-type]

    def of_results(self, pick: Callable[[Any], Any]) -> Value:
        """Return what a part of the step's result is."""
        return self.of([pick(run.result) for run in self._runs]) if self.complete else UNKNOWN

    def of_leaf(self, place: int) -> Value:
        """Return what the leaf at a place of the step's result is, where lists of samples count as one."""
        return self.of([leaves[place] for leaves in self._leaves]) if self._leaves else UNKNOWN

    def of_logged(self, name: str) -> Value:
        """Return what the step logs as ``name``, if it logs it once."""
        logged = [run.logged.get(name, ()) for run in self._runs]
        return self.of([values[0] for values in logged]) if all(len(each) == 1 for each in logged) else UNKNOWN

    def logged_of_batch(self, name: str) -> Tensor | float | None:
        """Return what the step logs for the batch, where that does not depend on the model."""
        values = self._runs[-1].logged.get(name, ())
        return self._known_number(values[0]) if len(values) == 1 else None

    def batch_size_of(self, name: str) -> Tensor | float | None:
        """Return the ``batch_size`` that the step gives for the batch, where that does not depend on the model."""
        return self._known_number(self._runs[-1].batch_sizes.get(name))

    def leaf_of_batch(self, place: int) -> Tensor | float | None:
        """Return the leaf at a place of the step's result for the batch, where it does not depend on the model."""
        return self._known_number(self._leaves[-1][place]) if self._leaves else None

    def _known_number(self, value: Any) -> Tensor | float | None:
        if self._known.random or not self.complete:  # numbers that were drawn here differ
            return None
        if isinstance(value, Tensor):
            return None if is_meta(value) or value.requires_grad else value
        return value if isinstance(value, int | float) else None

    def _of_numbers(self, leaves: Sequence[float]) -> Value:
        if len(set(leaves)) == 1:
            return Constant(zero=leaves[0] == 0)
        *parts, whole = map(float, leaves)
        random = self._known.random
        return Scale(tuple(parts), sum(parts) if random else whole, random)

    def _note_known(self, operations: Sequence[RecordedCall]) -> None:
        tokens: list[Any] = [operation.tokens for operation in operations]
        index = self._indices[id(operations[0])] = _index(operations)
        for column in (*_columns(operations), tokens, index):
            if column and all(isinstance(leaf, Tensor) and not is_meta(leaf) for leaf in column):
                self._known.add(column)

    def _derive(self, operations: Sequence[RecordedCall]) -> None:
        first = operations[0]
        index = self._indices[id(first)]
        if index and isinstance(found := self.of(index), Unclear):
            self._values |= {tuple(map(id, results)): found for results in _results(operations)}
            return
        tokens = None if first.tokens is None else self.of([operation.tokens for operation in operations])
        inputs = [
            Input(self.of(column), [tuple(leaf.shape) if isinstance(leaf, Tensor) else () for leaf in column])
            for column in _columns(operations)
        ]
        for results in _results(operations):
            shapes = [tuple(result.shape) for result in results]
            call = Call(first.name, first.func, first.args, first.kwargs, inputs, tokens, shapes, self._samples)
            self._values[tuple(map(id, results))] = result_of(call)


def _columns(operations: Sequence[RecordedCall]) -> list[list[Any]]:
    """Return the arguments that a result is computed from: tensors, and numbers of arithmetic."""
    name, args = operations[0].name, operations[0].args
    if name in SELECTS:
        return [[operation.args[0] for operation in operations]]
    if name == "setitem":
        return [[operation.args[place] for operation in operations] for place in (0, 2)]
    kinds = (Tensor, int, float) if name in _BINARY and len(args) > 1 else (Tensor,)
    rows = [
        [leaf for leaf in tree_iter((operation.args, operation.kwargs)) if isinstance(leaf, kinds)]
        for operation in operations
    ]
    if len({len(row) for row in rows}) > 1:
        return [[None] * len(operations)]
    return [list(column) for column in zip(*rows, strict=True)]


def _results(operations: Sequence[RecordedCall]) -> Iterable[tuple[Tensor, ...]]:
    found = [operation.results for operation in operations]
    return zip(*found, strict=True) if len({len(each) for each in found}) == 1 else ()  # rows: one result per sample


def _index(operations: Sequence[RecordedCall]) -> list[Tensor]:
    """Return which rows are selected, if that is known: a mask, or the numbers of rows in the batch."""
    if operations[0].name not in ("getitem", "index_select"):
        return []
    found, start = [], 0
    for operation in operations:
        tensor, index = operation.args[0], operation.args[-1]
        if operation is operations[-1]:
            start = 0  # the batch
        first = index[0] if isinstance(index, tuple) and index else index
        if not isinstance(first, Tensor) or is_meta(first) or not tensor.dim():
            return []
        found.append(first if first.dtype == torch.bool else first % len(tensor) + start)
        start += len(tensor)
    same = operations[-1].args[0].shape[0] == operations[0].args[0].shape[0]
    return [] if same else found
