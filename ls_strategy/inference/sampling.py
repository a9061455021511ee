"""From logits to tokens: temperature, top-k, top-p, and a seed for every row.

Every row draws one number in [0, 1) per step, by its own seed, and takes the token in whose part of the cumulated
probabilities it falls. So a row's text depends on its seed and its logits alone, not on the other rows of the batch.
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
    """How the next token is chosen."""

    temperature: float = 1.0
    """Divides the logits: below 1 prefers likely tokens, 0 takes the most likely one."""

    top_k: int | None = None
    """Sample among this many most likely tokens. None: among all."""

    top_p: float | None = None
    """Sample among the most likely tokens that together have this probability (Holtzman et al., arXiv:1904.09751)."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ConfigError: one is out of its range.
        """
        check_fields(self, temperature=at_least(0), top_k=at_least(1), top_p=above(0, 1))

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0 or self.top_k == 1


class Uniforms:
    """Numbers in [0, 1), one per row and step, in fp64 on the CPU, so that every device and rank samples alike."""

    def __init__(self, generators: Sequence[torch.Generator], rows: int) -> None:
        """``generators`` has one for every row, or a single one that all rows draw from in turn."""
        if len(generators) not in (1, rows):
            raise ConfigError(f"{len(generators)} random generators for {rows} rows: give one for each, or one.")
        self._generators = list(generators)
        self._rows = rows

    @classmethod
    def of_seed(cls, seed: int | Sequence[int], rows: int) -> Uniforms:
        """By a seed per row, or by one, of which row r takes the r-th seed that follows from it.

        Raises:
            ConfigError: there are not as many seeds as rows.
        """
        seeds = [row_seed(seed, r) for r in range(rows)] if isinstance(seed, int) else list(seed)
        if len(seeds) != rows:
            raise ConfigError(f"{len(seeds)} seeds for {rows} rows: give one for each, or a single number.")
        return cls([torch.Generator().manual_seed(s) for s in seeds], rows)

    def draw(self) -> Tensor:
        """The next step's, ``(rows,)``."""
        each = self._rows if len(self._generators) == 1 else 1
        drawn = [torch.rand(each, generator=g, dtype=torch.float64, device="cpu") for g in self._generators]
        return drawn[0] if len(drawn) == 1 else torch.cat(drawn)


def row_seed(seed: int, row: int) -> int:
    """The seed of a row, of 63 bits: row 0 has ``seed`` itself, so that a prompt alone samples as first of a batch."""
    if not row:
        return seed
    digest = hashlib.blake2b(f"{seed},{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sample(logits: Tensor, config: SamplingConfig, uniforms: Uniforms | None) -> Tensor:
    """The next token of every row.

    Args:
        logits: ``(B, V)``, whole or divided over ranks: then collective over these, with the same tokens on all.
        config: how to choose.
        uniforms: of the rows; not used where nothing is drawn.

    Returns:
        ``(B,)`` int64, on the logits' device.
    """
    if config.greedy:
        return logits.argmax(dim=-1)
    if uniforms is None:
        raise ConfigError("sampling draws random numbers: give a seed, or temperature=0.")
    logits = gather(logits).detach().float()
    k = min(config.top_k or logits.shape[-1], logits.shape[-1])
    chosen: Tensor | None = None
    if k < logits.shape[-1]:
        logits, chosen = logits.topk(k)  # sorted, on the device: only k numbers go to the CPU
    elif config.top_p is not None and config.top_p < 1:
        logits, chosen = logits.sort(dim=-1, descending=True)
    device = logits.device
    # In fp64 on the CPU: all ranks of a replica must come to the same token, and so should every device.
    cumulated = (logits.cpu().double() / config.temperature).softmax(dim=-1).cumsum(dim=-1)
    last = torch.full((len(cumulated), 1), cumulated.shape[-1] - 1)
    if config.top_p is not None and config.top_p < 1:
        # Up to the first token with which they have that probability, this one included.
        last = torch.minimum(torch.searchsorted(cumulated, config.top_p * cumulated[:, -1:]), last)
    where = uniforms.draw().unsqueeze(1) * cumulated.gather(1, last)
    index = torch.minimum(torch.searchsorted(cumulated, where, right=True), last).to(device)
    return (index if chosen is None else chosen.gather(1, index)).squeeze(1)
