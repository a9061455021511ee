"""`SequenceCurriculum`: training starts with short sequences.

Li et al., "The Stability-Efficiency Dilemma", arXiv:2108.06084: early training on truncated sequences is faster, and
stable at higher learning rates.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from typing_extensions import override

from ls_strategy.checked import above, at_least, checked
from ls_strategy.errors import PlanError, StateError
from ls_strategy.extras.data_efficiency.schedule import Kind, Schedule, ScheduledCallback
from ls_strategy.host.pytorch import is_param_in_hook_signature, pl
from ls_strategy.lightning.strategy import ZeROStrategy


class SequenceCurriculum(ScheduledCallback):
    """Truncates the sequences of training batches to a length that grows.

    Every tensor of a batch with a token dimension keeps its first tokens, on all ranks and in all micro-batches of a
    step. Validation uses full sequences. Logs ``curriculum/length``. Works under every strategy.

    If the length follows tokens, ranks sum the tokens that they have seen, one number per optimizer step.
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
            lengths: Tokens per sequence: the first and the last length; with ``schedule="discrete"`` all in order.
            until: The step or number of tokens at which the last length is reached. With ``discrete``, the last step or
                number of tokens of each length but the last.
            schedule: ``linear``, ``root`` (faster at first), or ``discrete``.
            unit: What ``until`` counts: optimizer steps, or training tokens of all ranks.
            multiple_of: Lengths in between are multiples of this.
            root_degree: With ``root``: 2 is the square root.

        Raises:
            ConfigError: The values make no valid schedule.
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
        self.tokens = 0  # tokens of all ranks in the optimizer steps so far. Counted with ``unit="tokens"``.
        self._pending = 0
        self._strategy: Any = None

    @override
    def position(self) -> int:
        return self._step if self.unit == "steps" else self.tokens

    # around training -------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start to truncate.

        Raises:
            PlanError: Ranks cannot shard the lengths evenly, or ``training_step`` fetches its batches itself.
        """
        if is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
            raise PlanError(
                "SequenceCurriculum truncates the batches that the Trainer passes to training_step, but this "
                "training_step takes dataloader_iter and fetches batches itself. Take (batch, batch_idx), or remove "
                "the callback."
            )
        _check_divisible(trainer, self.schedule)
        self._pending = 0
        self._stop()
        self._strategy = trainer.strategy
        plain = self._strategy.batch_to_device

        def batch_to_device(batch: Any, *args: Any, **kwargs: Any) -> Any:
            if trainer.training:
                batch, tokens = shorten(batch, self.current(trainer))
                self._pending += tokens
            return plain(batch, *args, **kwargs)

        self._strategy.batch_to_device = batch_to_device

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.log_value(pl_module)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the tokens of a completed step. Collective with ``unit="tokens"``."""
        if self.unit == "tokens" and trainer.global_step >= self._step:
            mine = torch.tensor(self._pending, dtype=torch.int64, device=pl_module.device)
            total: Any = trainer.strategy.reduce(mine, reduce_op="sum")
            self.tokens += int(total)
            self._pending = 0

    @override
    def _stop(self) -> None:
        if self._strategy is not None:
            vars(self._strategy).pop("batch_to_device", None)
        self._strategy = None

    @override
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"tokens": self.tokens}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.unit == "tokens":
            # The saved value belongs to the token count before its step, so it cannot be compared.
            state_dict = state_dict | {"value": None}
        self.tokens = state_dict["tokens"]
        super().load_state_dict(state_dict)


def _check_divisible(trainer: pl.Trainer, schedule: Schedule) -> None:
    """Check that the ranks that shard a sequence can shard all lengths evenly."""
    strategy = trainer.strategy
    if not isinstance(strategy, ZeROStrategy):
        return
    config = strategy.parallel.config
    groups = {"parallel.context": (config.context, 2 * config.context)}
    if config.tp.sequence_parallel:
        groups["parallel.tensor"] = (config.tp.size, config.tp.size)
    for name, (size, least) in groups.items():
        bad = [length for length in schedule.possible() if length % size or length < least]
        if size > 1 and bad:
            raise PlanError(
                f"SequenceCurriculum has sequences of {bad[0]} tokens, but {name}={size} requires multiples of {size} "
                f"of at least {least} tokens. Set multiple_of and all lengths to such numbers."
            )


# --- batches ---------------------------------------------------------------------------------------------------------


def shorten(batch: Any, length: int) -> tuple[Any, int]:
    """Keep the first ``length`` tokens of every sequence in a batch.

    The first integer tensor ``(B, T)``, or else the first floating tensor ``(B, T, ...)``, defines T. Truncated are

    ==========================================================  ==============
    tensor                                                      dimension
    ==========================================================  ==============
    exactly one dimension after the first is T: tokens,         that one
    targets, padding masks
    ``(B, T, T)`` of integers or bool, ``(B, ..., T, T)``:      both
    attention masks
    ==========================================================  ==============

    Args:
        batch: Tensors in nested tuples, lists, mappings and dataclasses.
        length: Tokens. Shorter sequences are unchanged.

    Returns:
        The batch, and its number of tokens, B * T.

    Raises:
        StateError: No tensor defines T, or the token dimensions of a tensor are ambiguous.
    """
    tensors: list[Tensor] = []
    apply_to_collection(batch, Tensor, tensors.append)
    first = next((t for t in tensors if t.dim() == 2 and not _is_real(t)), None)
    if first is None:
        first = next((t for t in tensors if t.dim() >= 3 and _is_real(t)), None)
    if first is None:
        shapes = ", ".join(f"{tuple(t.shape)} of {t.dtype}" for t in tensors) or "none"
        raise StateError(
            "SequenceCurriculum requires a batch with a tensor of integer tokens, (batch, tokens), or of features, "
            f"(batch, tokens, ...), but got {shapes}. Provide such batches, or remove the callback."
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
    part = part.contiguous()  # so that views work, and one copy to the device suffices
    return part.pin_memory() if tensor.is_pinned() else part


def _token_dims(tensor: Tensor, tokens: int) -> list[int]:
    found = [dim for dim in range(1, tensor.dim()) if tensor.shape[dim] == tokens]
    last = tensor.dim() - 1
    if len(found) <= 1:
        return found
    if found == [last - 1, last] and (not _is_real(tensor) or last > 2):
        return found
    raise StateError(
        f"SequenceCurriculum got a tensor of {tensor.dtype} and shape {tuple(tensor.shape)} in a batch of sequences of "
        f"{tokens} tokens. Its token dimensions are ambiguous. Use (batch, tokens, ...) for features and bool (batch, "
        "tokens, tokens) for attention masks, or create them in the model."
    )
