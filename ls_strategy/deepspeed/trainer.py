"""What a DeepSpeed configuration says about the Trainer: taken where the Trainer has its defaults, else compared."""

from __future__ import annotations

from dataclasses import dataclass

from ls_strategy.errors import ConfigError


@dataclass(frozen=True)
class TrainerSettings:
    """None: the configuration leaves it to the Trainer."""

    precision: str | None = None
    """``Trainer(precision=...)`` that computes what DeepSpeed computes."""

    accepted_precisions: tuple[str, ...] = ()
    """Precisions that do not contradict the configuration."""

    gradient_clip_val: float | None = None
    """Largest norm of all gradients together; 0: no clipping."""

    accumulate_grad_batches: int | None = None
    """Micro-batches per optimizer step."""

    micro_batch_size: int | None = None
    """Samples in one batch of the DataLoader of one rank."""

    train_batch_size: int | None = None
    """Samples per optimizer step over all data-parallel ranks."""

    def choose_precision(self, given: str) -> str:
        """The precision to run in.

        Args:
            given: the Trainer's; ``32-true``, its default, gives way to the configuration.

        Raises:
            ConfigError: they contradict each other.
        """
        if self.precision is not None and given == "32-true":
            return self.precision
        if self.accepted_precisions and given not in self.accepted_precisions:
            wanted = self.precision or self.accepted_precisions[0]
            raise ConfigError(
                f"Trainer(precision={given!r}), and the DeepSpeed configuration computes in "
                f"{' or '.join(self.accepted_precisions)}. Pass precision={wanted!r}, or set the enabled of fp16 and "
                'bf16 to "auto" in the configuration.'
            )
        return given

    def choose_clipping(self, given: float | None, *, by_value: bool) -> float | None:
        """The norm to clip at.

        Args:
            given: the Trainer's ``gradient_clip_val``.
            by_value: whether the Trainer clips single values instead of the norm.

        Raises:
            ConfigError: they contradict each other.
        """
        wanted = self.gradient_clip_val
        if wanted is None:
            return given
        if by_value and wanted > 0:
            raise ConfigError(
                f"Trainer(gradient_clip_algorithm='value'), and gradient_clipping={wanted:g} of the DeepSpeed "
                "configuration clips by norm. Delete one of them."
            )
        if given is not None and float(given) != wanted:
            raise ConfigError(
                f"Trainer(gradient_clip_val={given}), and gradient_clipping={wanted:g} in the DeepSpeed configuration. "
                f'Pass gradient_clip_val={wanted:g}, or write "gradient_clipping": "auto".'
            )
        return wanted

    def choose_batches(self, accumulate_grad_batches: int, replicas: int) -> tuple[int, int | None]:
        """Micro-batches per step, and samples of a micro-batch (None: any), from any two of the three numbers.

        Args:
            accumulate_grad_batches: the Trainer's; 1, its default, gives way to the configuration.
            replicas: data-parallel ranks.

        Raises:
            ConfigError: the numbers do not fit together, or contradict the Trainer.
        """
        micro, steps, whole = self.micro_batch_size, self.accumulate_grad_batches, self.train_batch_size
        if steps is None and micro is not None and whole is not None:
            steps = self._divided(whole, micro * replicas, "train_micro_batch_size_per_gpu x ranks", replicas)
        if steps is not None and accumulate_grad_batches not in (1, steps):
            raise ConfigError(
                f"Trainer(accumulate_grad_batches={accumulate_grad_batches}), and the DeepSpeed configuration "
                f"accumulates {steps} micro-batches. Pass accumulate_grad_batches={steps}, or write "
                '"gradient_accumulation_steps": "auto" and leave train_batch_size out.'
            )
        steps = accumulate_grad_batches if steps is None else steps
        if whole is not None:
            found = self._divided(whole, steps * replicas, "gradient_accumulation_steps x ranks", replicas)
            if micro is not None and micro != found:
                raise ConfigError(
                    f"train_batch_size={whole} is not train_micro_batch_size_per_gpu={micro} x accumulation {steps} x "
                    f"{replicas} data-parallel ranks = {micro * steps * replicas}. Correct one, or leave it out."
                )
            micro = found
        return steps, micro

    @staticmethod
    def _divided(whole: int, by: int, words: str, replicas: int) -> int:
        if whole % by:
            raise ConfigError(
                f"train_batch_size={whole} cannot be divided by {words} = {by} ({replicas} data-parallel ranks). "
                f'Use a multiple of {by}, or write "auto" for it.'
            )
        return whole // by

    def check_loader(self, batch_size: int | None, micro_batch_size: int | None) -> None:
        """Compare a training DataLoader with the configuration.

        Args:
            batch_size: the DataLoader's; None if it has none that can be known.
            micro_batch_size: of `choose_batches`.

        Raises:
            ConfigError: they differ.
        """
        if batch_size is None or micro_batch_size is None or batch_size == micro_batch_size:
            return
        raise ConfigError(
            f"the training DataLoader has batch_size={batch_size}, and the DeepSpeed configuration has "
            f"{micro_batch_size} samples per rank and micro-batch. Make them agree, or write "
            '"train_micro_batch_size_per_gpu": "auto" and leave train_batch_size out.'
        )
