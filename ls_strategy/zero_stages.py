"""What each ZeRO stage shards. The only file that compares stage numbers.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC'20,
arXiv:1910.02054: section 5 (the stages), section 7 (traffic), figure 1 (bytes).
"""

from __future__ import annotations

from dataclasses import dataclass

from ls_strategy.config import ZeroStage


@dataclass(frozen=True)
class StagePolicy:
    """Which of the three kinds of model state is divided over the data-parallel ranks."""

    optimizer: bool
    gradients: bool
    parameters: bool

    def bytes_per_rank(
        self,
        numel: int,
        world_size: int,
        *,
        parameter_bytes: int = 2,
        gradient_bytes: int = 2,
        state_bytes: int = 12,
    ) -> float:
        """Bytes of model state on one rank, without activations and without the unit that is gathered.

        Args:
            numel: parameters of the model.
            world_size: data-parallel ranks.
            parameter_bytes: per element, of the parameters the forward reads.
            gradient_bytes: per element, as the gradients are held between backward and step.
            state_bytes: per element, of fp32 master, first and second moment (12 for mixed-precision Adam).
        """

        def share(sharded: bool) -> int:
            return world_size if sharded else 1

        return numel * (
            parameter_bytes / share(self.parameters)
            + gradient_bytes / share(self.gradients)
            + state_bytes / share(self.optimizer)
        )

    def elements_sent(self, numel: int, world_size: int, *, micro_batches: int = 1) -> int:
        """Elements one rank sends per optimizer step (ZeRO section 7), for ``numel`` divisible by ``world_size``.

        Stage 0 reduce-scatters and all-gathers gradients, stage 1 reduce-scatters gradients and all-gathers parameters
        once per step, stage 2 reduces every micro-batch, stage 3 gathers for forward and for backward as well.
        """
        if self.parameters:
            volume = 3 * micro_batches
        elif self.gradients:
            volume = 1 + micro_batches
        else:
            volume = 2
        return volume * numel * (world_size - 1) // world_size


POLICIES: dict[ZeroStage, StagePolicy] = {
    0: StagePolicy(optimizer=False, gradients=False, parameters=False),
    1: StagePolicy(optimizer=True, gradients=False, parameters=False),
    2: StagePolicy(optimizer=True, gradients=True, parameters=False),
    3: StagePolicy(optimizer=True, gradients=True, parameters=True),
}
