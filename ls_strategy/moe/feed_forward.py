"""The usual expert networks."""

from __future__ import annotations

from torch import Tensor, nn

from ls_strategy.checked import at_least, checked


class FeedForward(nn.Module):
    """``down(activation(up(x)))``: ``(..., hidden)`` to the same shape."""

    @checked(hidden_size=at_least(1), intermediate_size=at_least(1))
    def __init__(
        self, hidden_size: int, intermediate_size: int, *, activation: nn.Module | None = None, bias: bool = True
    ) -> None:
        """Build two linear layers.

        Args:
            hidden_size: Features of input and output.
            intermediate_size: Features between the layers.
            activation: Acts on each row separately. None: GELU.
            bias: Whether both layers have a bias.
        """
        super().__init__()
        self.up = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.activation = nn.GELU() if activation is None else activation
        self.down = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., hidden)`` to the same shape."""
        return self.down(self.activation(self.up(x)))


class GatedFeedForward(nn.Module):
    """``down(activation(gate(x)) * up(x))``; SwiGLU with the default activation (Shazeer 2020, arXiv:2002.05202)."""

    @checked(hidden_size=at_least(1), intermediate_size=at_least(1))
    def __init__(
        self, hidden_size: int, intermediate_size: int, *, activation: nn.Module | None = None, bias: bool = False
    ) -> None:
        """Build three linear layers.

        Args:
            hidden_size: Features of input and output.
            intermediate_size: Features between the layers.
            activation: Acts on each row separately. None: SiLU.
            bias: Whether the layers have a bias.
        """
        super().__init__()
        self.gate = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.activation = nn.SiLU() if activation is None else activation
        self.down = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., hidden)`` to the same shape."""
        return self.down(self.activation(self.gate(x)) * self.up(x))
