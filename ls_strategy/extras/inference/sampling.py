"""Sample tokens from logits: temperature, top-k, top-p, and a seed for every row.

Every row draws one number in [0, 1) per step from its own seed, and takes the token at that point of the cumulative
probabilities. A row's text depends only on its seed and its logits, not on the other rows of the batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ls_strategy.checked import above, at_least, check_fields
from ls_strategy.errors import ConfigError
from ls_strategy.parallel.logits import gather


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Options of sampling the next token from its logits."""

    temperature: float = 1.0
    """Divides the logits: below 1 prefers likely tokens, 0 takes the most likely one."""

    top_k: int | None = None
    """Sample from this many most likely tokens. None: from all."""

    top_p: float | None = None
    """Sample from the most likely tokens that together have this probability (Holtzman et al., arXiv:1904.09751)."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ConfigError: a number is out of range.
        """
        check_fields(self, temperature=at_least(0), top_k=at_least(1), top_p=above(0, 1))

    @property
    def greedy(self) -> bool:
        """Return whether the most likely token is taken, so that no random numbers are drawn."""
        return self.temperature == 0 or self.top_k == 1


class Uniforms:
    """Random numbers in [0, 1), one per row and step, in fp64 on the CPU: independent of device and rank."""

    def __init__(self, generators: Sequence[torch.Generator], rows: int) -> None:
        """``generators`` has one per row, or a single one that all rows draw from in turn."""
        if len(generators) not in (1, rows):
            raise ConfigError(f"Got {len(generators)} random generators for {rows} rows. Give one, or one per row.")
        self._generators = list(generators)
        self._rows = rows

    @classmethod
    def of_seed(cls, seed: int | Sequence[int], rows: int) -> Uniforms:
        """Use one seed per row, or derive the seed of row r from a single seed, see `row_seed`.

        Raises:
            ConfigError: the number of seeds differs from the number of rows.
        """
        seeds = [row_seed(seed, r) for r in range(rows)] if isinstance(seed, int) else list(seed)
        if len(seeds) != rows:
            raise ConfigError(f"Got {len(seeds)} seeds for {rows} rows. Give one per row, or a single number.")
        return cls([torch.Generator().manual_seed(s) for s in seeds], rows)

    def draw(self) -> Tensor:
        """Return the numbers of the next step, ``(rows,)``."""
        each = self._rows if len(self._generators) == 1 else 1
        drawn = [torch.rand(each, generator=g, dtype=torch.float64, device="cpu") for g in self._generators]
        return drawn[0] if len(drawn) == 1 else torch.cat(drawn)


def row_seed(seed: int, row: int) -> int:
    """Return a row's seed, 63 bits. Row 0 uses ``seed``, so a single prompt samples like the first row of a batch."""
    if not row:
        return seed
    digest = hashlib.blake2b(f"{seed},{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sample(logits: Tensor, config: SamplingConfig, uniforms: Uniforms | None) -> Tensor:
    """Return the next token of every row.

    Args:
        logits: ``(B, V)``, full or sharded over ranks. If sharded, collective over these, with the same tokens on all.
        config: how to choose.
        uniforms: random numbers for the rows; unused with greedy sampling.

    Returns:
        ``(B,)`` int64, on the logits' device.
    """
    if config.greedy:
        return logits.argmax(dim=-1)
    if uniforms is None:
        raise ConfigError("Got no random numbers, but sampling needs them. Give a seed, or temperature=0.")
    logits = gather(logits).detach().float()
    k = min(config.top_k or logits.shape[-1], logits.shape[-1])
    chosen: Tensor | None = None
    if k < logits.shape[-1]:
        logits, chosen = logits.topk(k)  # sorted, on the device: only k numbers are copied to the CPU
    elif config.top_p is not None and config.top_p < 1:
        logits, chosen = logits.sort(dim=-1, descending=True)
    device = logits.device
    # In fp64 on the CPU: all ranks of a replica must choose the same token, and every device should.
    cumulated = (logits.cpu().double() / config.temperature).softmax(dim=-1).cumsum(dim=-1)
    last = torch.full((len(cumulated), 1), cumulated.shape[-1] - 1)
    if config.top_p is not None and config.top_p < 1:
        # Up to and including the first token that reaches the probability.
        last = torch.minimum(torch.searchsorted(cumulated, config.top_p * cumulated[:, -1:]), last)
    where = uniforms.draw().unsqueeze(1) * cumulated.gather(1, last)
    index = torch.minimum(torch.searchsorted(cumulated, where, right=True), last).to(device)
    return (index if chosen is None else chosen.gather(1, index)).squeeze(1)
