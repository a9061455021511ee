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
        self._loads: Tensor | None = None
        self.reset()

    def reset(self) -> None:
        """Reset all sums but the loads."""
        self._routed: Tensor | None = None
        self._kept: Tensor | None = None
        self._values: Tensor | None = None
        self._calls = 0

    def add(self, *, routed: Tensor, kept: Tensor | None, values: Tensor) -> None:
        """Count one call.

        Args:
            routed: ``(E,)`` pairs per expert.
            kept: ``(E,)`` pairs that are not dropped. None: all.
            values: ``(3,)``: entropy, balance loss, z loss.
        """
        kept = routed if kept is None else kept
        self._loads = routed.clone() if self._loads is None else self._loads.to(routed.device) + routed
        self._calls += 1
        if self._routed is None or self._kept is None or self._values is None or self._routed.device != routed.device:
            self._routed, self._kept, self._values, self._calls = routed.clone(), kept.clone(), values.clone(), 1
            return
        self._routed += routed
        self._kept += kept
        self._values += values

    def statistics(self, device: torch.device) -> MoEStatistics:
        """Return the statistics since the last reset; zeros on ``device`` if nothing was counted."""
        zeros = torch.zeros(self._num_experts, dtype=torch.int64, device=device)
        routed = zeros if self._routed is None else self._routed.clone()
        kept = zeros if self._kept is None else self._kept.clone()
        values = torch.zeros(3, device=device) if self._values is None else self._values / self._calls
        entropy, balance, z = values.unbind()
        return MoEStatistics(routed, kept, entropy, balance, z, self._calls)

    def take_loads(self, device: torch.device) -> Tensor:
        """Return the pairs per expert since the last call of this method, ``(E,)`` fp32."""
        loads, self._loads = self._loads, None
        return torch.zeros(self._num_experts, device=device) if loads is None else loads.to(device, torch.float32)
