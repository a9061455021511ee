"""The loop that continues sequences token by token, written once for every network that reads with a cache.

::

    prompts ─left-padded─► network(tokens, cache=) ─► logits ─► sample ─┬─► the caller, step by step
                              ▲                                         │
                              └──────────── one token per row ──────────┘

Every rank makes as many forwards as steps are asked for, one each, whatever is sampled: forwards may be collective
(sharded parameters, divided layers, experts elsewhere), also between ranks whose prompts differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ls_strategy.errors import ConfigError, PlanError
from ls_strategy.inference.cache import KVCache
from ls_strategy.inference.sampling import SamplingConfig, Uniforms, sample

Prompts: TypeAlias = Tensor | Sequence[Sequence[int]]
"""Tokens ``(B, T)``, or a list of tokens for each row; at least one each."""


class CausalNetwork(Protocol):
    """A network that tells the token after those it has read."""

    def __call__(self, tokens: Tensor, *, cache: KVCache | None = None) -> Tensor:
        """Logits ``(B, T, V)`` of the token after each of ``tokens`` (B, T); with a cache of the last, ``(B, 1, V)``.

        With a cache the tokens follow those in it, at the positions that `KVCache.open` tells.
        """
        ...

    def make_cache(self) -> KVCache:
        """A cache for the longest sequence that the network can read."""
        ...


def stream(  # noqa: PLR0913 - one argument per option
    network: CausalNetwork,
    prompts: Prompts,
    max_new_tokens: int,
    *,
    sampling: SamplingConfig = SamplingConfig(),  # noqa: B008 - frozen
    seed: int | Sequence[int] | Uniforms = 0,
    stop_tokens: Sequence[int] = (),
    cache: KVCache | None = None,
    device: torch.device | str | None = None,
    all_steps: bool | None = None,
    whole_sequences: int = 0,
) -> Iterator[list[int | None]]:
    """Continue every prompt, and hand out each step's tokens as soon as they are there.

    When a sequence outgrows the network, the last tokens that it can read are read anew at every step. Collective where
    the network's forward is: every rank iterates to the end, with as many steps. Call ``network.eval()`` before.

    Args:
        network: see `CausalNetwork`.
        prompts: what to continue. Rows of different lengths do not change each other's results.
        max_new_tokens: steps.
        sampling: how tokens are chosen.
        seed: one for each row, or one for all; see `Uniforms.of_seed`.
        stop_tokens: a row ends before the first of these.
        cache: to use again, from the network's `make_cache`. None: a new one.
        device: of the network. None: that of a tensor of prompts, else the CPU.
        all_steps: go on when every row has ended, since other ranks may not have. None: if there are other ranks.
        whole_sequences: without a cache: all tokens are read at every step, padded to a multiple of this. For networks
            whose blocks divide sequences over ranks.

    Yields:
        For each row the new token, or None from the row's end on.

    Raises:
        ConfigError: the prompts or numbers make no sense.
        PlanError: parts of the network are on other ranks.
    """
    rows = _rows(prompts)
    if max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens={max_new_tokens}: must not be negative.")
    if isinstance(network, nn.Module):
        refuse_absent(network)
    where = torch.device(device if device is not None else prompts.device if isinstance(prompts, Tensor) else "cpu")
    if whole_sequences:
        read = _whole_reader(network, rows, where, whole_sequences)
    else:
        read = _cached_reader(network, rows, where, cache if cache is not None else network.make_cache())
    uniforms: Uniforms | None = None
    if not sampling.greedy:
        uniforms = seed if isinstance(seed, Uniforms) else Uniforms.of_seed(seed, len(rows))
    to_the_end = all_steps if all_steps is not None else dist.is_initialized() and dist.get_world_size() > 1
    stops = frozenset(stop_tokens)
    return _steps(rows, read, max_new_tokens, lambda logits: sample(logits, sampling, uniforms), stops, to_the_end)


def generate(network: CausalNetwork, prompts: Prompts, max_new_tokens: int, **options: object) -> list[list[int]]:
    """The new tokens of every row, without the stop token that ended it. Arguments as `stream`'s, and as collective."""
    found: list[list[int]] = [[] for _ in range(len(prompts))]
    for step in stream(network, prompts, max_new_tokens, **options):  # type: ignore[arg-type]
        for row, token in zip(found, step, strict=True):
            if token is not None:
                row.append(token)
    return found


def refuse_absent(network: nn.Module) -> None:
    """Refuse a network of which other ranks hold some blocks.

    Raises:
        PlanError: so it is.
    """
    absent = next((name for name, p in network.named_parameters() if p.is_meta), None)
    if absent is not None:
        raise PlanError(
            f"{absent} is on another rank: the network is divided into stages of a pipeline (or was never filled), and "
            "no rank can run all of it for one token. Save a checkpoint, and generate from that without a pipeline."
        )


def _rows(prompts: Prompts) -> list[list[int]]:
    rows: list[list[int]] = prompts.tolist() if isinstance(prompts, Tensor) else [list(row) for row in prompts]
    empty = next((i for i, row in enumerate(rows) if not row), None)
    if not rows or empty is not None:
        raise ConfigError(
            f"{'no prompts' if not rows else f'prompt {empty} has no tokens'}: give at least one, with a token each."
        )
    return rows


def _steps(
    rows: list[list[int]],
    read: Callable[[Tensor | None], Tensor],
    count: int,
    choose: Callable[[Tensor], Tensor],
    stop_tokens: frozenset[int],
    to_the_end: bool,
) -> Iterator[list[int | None]]:
    ended = [False] * len(rows)
    chosen: Tensor | None = None
    for _ in range(count):
        # Not around the yield: the caller's code must not run without gradients.
        with torch.no_grad():
            chosen = choose(read(chosen))
        tokens: list[int] = chosen.tolist()
        for i, token in enumerate(tokens):
            rows[i].append(token)
            ended[i] = ended[i] or token in stop_tokens
        yield [None if end else token for end, token in zip(ended, tokens, strict=True)]
        if all(ended) and not to_the_end:
            return


Read: TypeAlias = Callable[[Tensor | None], Tensor]
"""From the tokens chosen last ``(B,)``, None at first, to logits ``(B, V)`` of the next. One forward."""


def _cached_reader(network: CausalNetwork, rows: list[list[int]], device: torch.device, cache: KVCache) -> Read:
    def read(chosen: Tensor | None) -> Tensor:
        if chosen is not None and cache.length < cache.max_length:
            return network(chosen.unsqueeze(1), cache=cache)[:, -1]
        recent = [row[-cache.max_length :] for row in rows]
        longest = max(map(len, recent))
        padding = [longest - len(row) for row in recent]
        tokens = [[0] * pad + row for pad, row in zip(padding, recent, strict=True)]
        cache.begin(padding, device)
        return network(torch.tensor(tokens, device=device), cache=cache)[:, -1]

    return read


def _whole_reader(network: CausalNetwork, rows: list[list[int]], device: torch.device, multiple: int) -> Read:
    limit = network.make_cache().max_length // multiple * multiple
    if not limit:
        raise ConfigError(f"whole_sequences={multiple}: the network reads fewer tokens than that at once.")

    def read(_chosen: Tensor | None) -> Tensor:
        recent = [row[-limit:] for row in rows]
        length = -(-max(map(len, recent)) // multiple) * multiple
        # On the right, where no token sees it.
        tokens = torch.tensor([row + [0] * (length - len(row)) for row in recent], device=device)
        logits = network(tokens)
        last = [len(row) - 1 for row in recent]
        if len(set(last)) == 1:
            return logits[:, last[0]]
        return logits[list(range(len(rows))), last]

    return read
