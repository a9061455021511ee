"""Statistics of routers since the last reset, without waiting for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MoEStatistics:
    """Statistics of one layer's training forwards on this rank. Tensors are on the layer's device."""

    routed: Tensor
    """``(E,)`` int64: pairs of token and expert, dropped ones included."""

    kept: Tensor
    """``(E,)`` int64: pairs that were computed."""

    entropy: Tensor
    """``()``, nats: entropy of the router's probabilities, mean over tokens; ``log(E)`` without a preference."""

    balance_loss: Tensor
    """``()``: mean over calls, not weighted; 1 for even loads."""

    z_loss: Tensor
    """``()``: mean over calls, not weighted."""

    calls: int
    """Number of counted forwards."""


class Counts:
    """Sums over calls. Plain tensors: the broadcast of buffers would overwrite them with the first rank's."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self.loads: Tensor | None = None
        """Pairs per expert since the last call of `take_loads`; never changed in place."""
        self.reset()

    def reset(self) -> None:
        """Reset all sums but the loads."""
        self._sums: list[Tensor] = []
        self._calls = 0

    def add(self, *, routed: Tensor, kept: Tensor | None, values: Tensor) -> None:
        """Count one call.

        Args:
            routed: ``(E,)`` pairs per expert.
            kept: ``(E,)`` pairs that are not dropped. None: all.
            values: ``(3,)``: entropy, balance loss, z loss.
        """
        self.loads = routed.clone() if self.loads is None else self.loads.to(routed.device) + routed
        call = (routed, routed if kept is None else kept, values)
        if not self._sums or self._sums[0].device != routed.device:
            self._sums, self._calls = [tensor.clone() for tensor in call], 1
            return
        self._calls += 1
        for total, tensor in zip(self._sums, call, strict=True):
            total += tensor

    def statistics(self, device: torch.device) -> MoEStatistics:
        """Return the statistics since the last reset; zeros on ``device`` if nothing was counted."""
        if self._sums:
            routed, kept, values = self._sums[0].clone(), self._sums[1].clone(), self._sums[2] / self._calls
        else:
            routed = kept = torch.zeros(self._num_experts, dtype=torch.int64, device=device)
            values = torch.zeros(3, device=device)
        entropy, balance, z = values.unbind()
        return MoEStatistics(routed, kept, entropy, balance, z, self._calls)

    def take_loads(self, device: torch.device) -> Tensor:
        """Return the pairs per expert since the last call of this method, ``(E,)`` fp32."""
        loads, self.loads = self.loads, None
        return torch.zeros(self._num_experts, device=device) if loads is None else loads.to(device, torch.float32)
