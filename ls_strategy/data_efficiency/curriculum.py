"""`SequenceCurriculum`: short sequences first.

Li et al., "The Stability-Efficiency Dilemma", arXiv:2108.06084: early training is faster, and stable at higher learning
rates, on sequences cut short.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from typing_extensions import override

from ls_strategy.checked import above, at_least, checked
from ls_strategy.data_efficiency.schedule import Kind, Schedule
from ls_strategy.data_efficiency.scheduled import ScheduledCallback
from ls_strategy.errors import PlanError, StateError
from ls_strategy.lightning.strategy import ZeROStrategy


class SequenceCurriculum(ScheduledCallback):
    """Cuts the sequences of training batches to a length that grows.

    Every tensor of a batch that runs along the tokens keeps its first ones, on all ranks and in all micro-batches of a
    step alike; validation sees whole sequences. Logs ``curriculum/length``. Works under every strategy.

    Where the length follows tokens, ranks add up what they have seen, one number per optimizer step.
    """

    tag = "curriculum/length"

    @checked(lengths=at_least(1), until=at_least(1), multiple_of=at_least(1), root_degree=above(0))
    def __init__(
        self,
        lengths: list[int],
        until: list[int],
        schedule: Kind = "linear",
        unit: Literal["steps", "tokens"] = "steps",
        multiple_of: int = 8,
        root_degree: float = 2.0,
    ) -> None:
        """Choose the lengths.

        Args:
            lengths: tokens of a sequence: the first and the last length; with ``schedule="discrete"`` each in its turn.
            until: the step, or the number of tokens, from which on it is the last length; with ``discrete`` up to
                which it is the first, the second, and so on.
            schedule: ``linear``, ``root`` (faster at first), or ``discrete``.
            unit: what ``until`` counts: optimizer steps, or tokens of all ranks that were trained on.
            multiple_of: lengths in between are multiples of this.
            root_degree: with ``root``: 2 for a square root.

        Raises:
            ConfigError: these make no schedule.
        """
        super().__init__(
            Schedule(
                values=tuple(lengths),
                until=tuple(until),
                kind=schedule,
                multiple_of=multiple_of,
                root_degree=root_degree,
                name="lengths",
            )
        )
        self.unit = unit
        self.tokens = 0
        """Of all ranks, in the optimizer steps so far; counted with ``unit="tokens"``."""
        self._pending = 0
        self._undo: Callable[[], None] | None = None

    @override
    def position(self) -> int:
        """Steps, or tokens so far."""
        return self._step if self.unit == "steps" else self.tokens

    # around training -------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to cut.

        Raises:
            PlanError: lengths that the ranks cannot divide, or a step that fetches its batches itself.
        """
        if is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
            raise PlanError(
                "SequenceCurriculum cuts the batches that the Trainer hands to training_step, and this one takes "
                "dataloader_iter and fetches them itself. Take (batch, batch_idx), or leave the callback out."
            )
        _check_divisible(trainer, self.schedule)
        self._pending = 0
        self._stop()
        strategy = trainer.strategy
        plain = strategy.batch_to_device

        def batch_to_device(batch: Any, *args: Any, **kwargs: Any) -> Any:
            return plain(self._cut(trainer, batch) if trainer.training else batch, *args, **kwargs)

        strategy.batch_to_device = batch_to_device  # type: ignore[method-assign]
        self._undo = partial(vars(strategy).pop, "batch_to_device", None)

    def _cut(self, trainer: pl.Trainer, batch: Any) -> Any:
        batch, tokens = shorten(batch, self.current(trainer))
        self._pending += tokens
        return batch

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Log the length."""
        self.log_value(pl_module)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count, once a step is done. Collective with ``unit="tokens"``."""
        if self.unit == "tokens" and trainer.global_step >= self._step:
            mine = torch.tensor(self._pending, dtype=torch.int64, device=pl_module.device)
            total: Any = trainer.strategy.reduce(mine, reduce_op="sum")
            self.tokens += int(total)
            self._pending = 0

    @override
    def _stop(self) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Also the tokens so far."""
        return super().state_dict() | {"tokens": self.tokens}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        if self.unit == "tokens":
            # The value that was saved belongs to the count before its step, so that there is nothing to compare.
            state_dict = state_dict | {"value": None}
        self.tokens = state_dict["tokens"]
        super().load_state_dict(state_dict)


def _check_divisible(trainer: pl.Trainer, schedule: Schedule) -> None:
    """Ranks that divide the tokens of a sequence need lengths that they can divide."""
    strategy = trainer.strategy
    if not isinstance(strategy, ZeROStrategy):
        return
    config = strategy.parallel.config
    dividers = {"parallel.context": (config.context, 2 * config.context)}
    if config.tp.sequence_parallel:
        dividers["parallel.tensor"] = (config.tp.size, config.tp.size)
    for name, (size, least) in dividers.items():
        bad = [length for length in schedule.possible() if length % size or length < least]
        if size > 1 and bad:
            raise PlanError(
                f"SequenceCurriculum has sequences of {bad[0]} tokens, and {name}={size} shards the tokens of each, "
                f"{least // size} or more to a rank: let multiple_of and all lengths be multiples of {size}, from "
                f"{least} on."
            )


# --- batches ---------------------------------------------------------------------------------------------------------


def shorten(batch: Any, length: int) -> tuple[Any, int]:
    """Keep the first ``length`` tokens of every sequence in a batch.

    The first integer tensor ``(B, T)``, or else the first floating one ``(B, T, ...)``, says what T is. Cut are

    ==========================================================  ==============
    tensor                                                      dimension
    ==========================================================  ==============
    one dimension but the first is T: tokens, targets, masks    that one
    ``(B, T, T)`` of integers or bool, ``(B, ..., T, T)``:      both
    masks of attention
    ==========================================================  ==============

    Args:
        batch: tensors in tuples, lists, mappings and dataclasses, nested.
        length: tokens; sequences that are no longer stay as they are.

    Returns:
        The batch, and the tokens in it, B * T.

    Raises:
        StateError: no tensor tells T, or which dimensions of one are tokens cannot be told.
    """
    tensors: list[Tensor] = []
    apply_to_collection(batch, Tensor, tensors.append)
    first = next((t for t in tensors if t.dim() == 2 and not _is_real(t)), None)
    if first is None:
        first = next((t for t in tensors if t.dim() >= 3 and _is_real(t)), None)
    if first is None:
        shapes = ", ".join(f"{tuple(t.shape)} of {t.dtype}" for t in tensors) or "none"
        raise StateError(
            "SequenceCurriculum: no tensor of the batch has tokens, (batch, tokens) of integers or (batch, tokens, "
            f"...); its tensors: {shapes}. Give such batches, or leave the callback out."
        )
    rows, tokens = first.shape[:2]
    if tokens <= length:
        return batch, rows * tokens
    return apply_to_collection(batch, Tensor, partial(_narrow, tokens=tokens, length=length)), rows * length


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _narrow(tensor: Tensor, *, tokens: int, length: int) -> Tensor:
    dims = _token_dims(tensor, tokens)
    if not dims:
        return tensor
    part = tensor
    for dim in dims:
        part = part.narrow(dim, 0, length)
    part = part.contiguous()  # what is no view may be viewed, and is sent in one piece
    return part.pin_memory() if tensor.is_pinned() else part


def _token_dims(tensor: Tensor, tokens: int) -> list[int]:
    """Dimensions along the tokens."""
    found = [dim for dim in range(1, tensor.dim()) if tensor.shape[dim] == tokens]
    last = tensor.dim() - 1
    if len(found) <= 1:
        return found
    square = found == [last - 1, last]
    if square and (not _is_real(tensor) or last > 2):
        return found
    return _unclear(tensor, tokens)


def _unclear(tensor: Tensor, tokens: int) -> list[int]:
    raise StateError(
        f"SequenceCurriculum: a tensor of {tensor.dtype} and shape {tuple(tensor.shape)} in a batch of sequences of "
        f"{tokens} tokens: which of its dimensions are tokens cannot be told. Give features as (batch, tokens, ...), "
        "masks of attention as bool (batch, tokens, tokens), or make them in the model."
    )
