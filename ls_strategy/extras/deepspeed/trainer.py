"""Trainer settings of a DeepSpeed configuration: they replace the Trainer's defaults and must match other values."""

from __future__ import annotations

from dataclasses import dataclass

from ls_strategy.errors import ConfigError


@dataclass(frozen=True)
class TrainerSettings:
    """Settings of the configuration. None leaves a setting to the Trainer."""

    precision: str | None = None
    """The ``Trainer(precision=...)`` with DeepSpeed's arithmetic."""

    accepted_precisions: tuple[str, ...] = ()
    """Precisions that do not contradict the configuration."""

    gradient_clip_val: float | None = None
    """Largest norm of all gradients; 0 disables clipping."""

    accumulate_grad_batches: int | None = None
    """Micro-batches per optimizer step."""

    micro_batch_size: int | None = None
    """Samples per batch of one rank's DataLoader."""

    train_batch_size: int | None = None
    """Samples per optimizer step over all data-parallel ranks."""

    def choose_precision(self, given: str) -> str:
        """Return the precision to train in. The configuration replaces ``32-true``, the Trainer's default.

        Raises:
            ConfigError: ``given``, the Trainer's precision, contradicts the configuration.
        """
        if self.precision is not None and given == "32-true":
            return self.precision
        if self.accepted_precisions and given not in self.accepted_precisions:
            wanted = self.precision or self.accepted_precisions[0]
            raise ConfigError(
                f"Got Trainer(precision={given!r}), but the DeepSpeed configuration requires "
                f"{' or '.join(self.accepted_precisions)}. Pass precision={wanted!r}, or set enabled of fp16 and bf16 "
                'to "auto" in the configuration.'
            )
        return given

    def choose_clipping(self, given: float | None, *, by_value: bool) -> float | None:
        """Return the norm to clip to.

        Args:
            given: The Trainer's ``gradient_clip_val``.
            by_value: Whether the Trainer clips values instead of the norm.

        Raises:
            ConfigError: They contradict the configuration.
        """
        wanted = self.gradient_clip_val
        if wanted is None:
            return given
        if by_value and wanted > 0:
            raise ConfigError(
                f"Got Trainer(gradient_clip_algorithm='value'), but gradient_clipping={wanted:g} of the DeepSpeed "
                "configuration clips by norm. Delete one of them."
            )
        if given is not None and float(given) != wanted:
            raise ConfigError(
                f"Got Trainer(gradient_clip_val={given}), but gradient_clipping={wanted:g} in the DeepSpeed "
                f'configuration. Pass gradient_clip_val={wanted:g}, or write "gradient_clipping": "auto".'
            )
        return wanted

    def choose_batches(self, accumulate_grad_batches: int, replicas: int) -> tuple[int, int | None]:
        """Return micro-batches per step and samples per micro-batch (None: any), from two of the three numbers.

        The configuration replaces ``accumulate_grad_batches=1``, the default. ``replicas`` are data-parallel ranks.

        Raises:
            ConfigError: The numbers contradict each other or the Trainer.
        """
        micro, steps, total = self.micro_batch_size, self.accumulate_grad_batches, self.train_batch_size
        if steps is None and micro is not None and total is not None:
            steps = self._quotient(total, micro * replicas, "train_micro_batch_size_per_gpu x ranks", replicas)
        if steps is not None and accumulate_grad_batches not in (1, steps):
            raise ConfigError(
                f"Got Trainer(accumulate_grad_batches={accumulate_grad_batches}), but the DeepSpeed configuration "
                f"accumulates {steps} micro-batches. Pass accumulate_grad_batches={steps}, or write "
                '"gradient_accumulation_steps": "auto" and leave train_batch_size out.'
            )
        steps = accumulate_grad_batches if steps is None else steps
        if total is not None:
            found = self._quotient(total, steps * replicas, "gradient_accumulation_steps x ranks", replicas)
            if micro is not None and micro != found:
                raise ConfigError(
                    f"train_batch_size={total} is not train_micro_batch_size_per_gpu={micro} x accumulation {steps} x "
                    f"{replicas} data-parallel ranks = {micro * steps * replicas}. Correct one, or leave it out."
                )
            micro = found
        return steps, micro

    @staticmethod
    def _quotient(total: int, by: int, name: str, replicas: int) -> int:
        if total % by:
            raise ConfigError(
                f"Got train_batch_size={total}, but it must be a multiple of {name} = {by} ({replicas} data-parallel "
                f'ranks). Use a multiple of {by}, or write "auto" for it.'
            )
        return total // by

    def check_loader(self, batch_size: int | None, micro_batch_size: int | None) -> None:
        """Compare a DataLoader's ``batch_size`` (None: unknown) with the ``micro_batch_size`` of `choose_batches`.

        Raises:
            ConfigError: They differ.
        """
        if batch_size is None or micro_batch_size is None or batch_size == micro_batch_size:
            return
        raise ConfigError(
            f"the training DataLoader has batch_size={batch_size}, but the DeepSpeed configuration has "
            f"{micro_batch_size} samples per rank and micro-batch. Use the same number, or write "
            '"train_micro_batch_size_per_gpu": "auto" and leave train_batch_size out.'
        )
