"""The generation loop, shared by all networks that read with a cache.

::

    prompts ─left-padded─► network(tokens, cache=) ─► logits ─► sample ─┬─► the caller, step by step
                              ▲                                         │
                              └──────────── one token per row ──────────┘

Every rank runs one forward per requested step, whatever is sampled: a forward may be collective (sharded parameters,
tensor or expert parallelism), even between ranks with different prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ls_strategy.errors import ConfigError, PlanError
from ls_strategy.extras.inference.cache import KVCache
from ls_strategy.extras.inference.sampling import SamplingConfig, Uniforms, sample

Prompts: TypeAlias = Tensor | Sequence[Sequence[int]]
"""Tokens ``(B, T)``, or a list of tokens for each row; at least one token per row."""


class CausalNetwork(Protocol):
    """A network that predicts the next token."""

    def __call__(self, tokens: Tensor, *, cache: KVCache | None = None) -> Tensor:
        """Return logits ``(B, T, V)`` of the token after each of ``tokens`` (B, T); with a cache, of the last one only.

        With a cache, the result is ``(B, 1, V)``, and the tokens follow those in the cache, at the positions that
        `KVCache.open` returns.
        """
        ...

    def make_cache(self) -> KVCache:
        """Return a cache for the longest sequence that the network can read."""
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
    full_sequences: int = 0,
) -> Iterator[list[int | None]]:
    """Continue every prompt, and yield each step's tokens as soon as they are sampled.

    When a sequence exceeds the network's context, the last tokens that fit are read again in every step. Collective
    where the network's forward is: every rank must iterate to the end, with the same number of steps. Call
    ``network.eval()`` first.

    Args:
        network: see `CausalNetwork`.
        prompts: the prompts. Rows of different lengths do not change each other's results.
        max_new_tokens: number of steps.
        sampling: how tokens are chosen.
        seed: one for each row, or one for all; see `Uniforms.of_seed`.
        stop_tokens: a row ends before the first of these.
        cache: a cache to reuse, from the network's `make_cache`. None: a new one.
        device: the network's device. None: the device of tensor prompts, otherwise the CPU.
        all_steps: continue after every row has ended, because other ranks may not have. None: if there are other ranks.
        full_sequences: use no cache: read all tokens in every step, padded to a multiple of this. For networks with
            sequence parallelism.

    Yields:
        For each row the new token, or None after the row has ended.

    Raises:
        ConfigError: the prompts or numbers are invalid.
        PlanError: some of the network's blocks are on other ranks.
    """
    rows = _rows(prompts)
    if max_new_tokens < 0:
        raise ConfigError(f"Got max_new_tokens={max_new_tokens}, but it must be at least 0.")
    if isinstance(network, nn.Module):
        refuse_absent(network)
    where = torch.device(device if device is not None else prompts.device if isinstance(prompts, Tensor) else "cpu")
    if full_sequences:
        read = _full_reader(network, rows, where, full_sequences)
    else:
        read = _cached_reader(network, rows, where, cache if cache is not None else network.make_cache())
    uniforms: Uniforms | None = None
    if not sampling.greedy:
        uniforms = seed if isinstance(seed, Uniforms) else Uniforms.of_seed(seed, len(rows))
    to_the_end = all_steps if all_steps is not None else dist.is_initialized() and dist.get_world_size() > 1
    stops = frozenset(stop_tokens)
    return _steps(rows, read, max_new_tokens, lambda logits: sample(logits, sampling, uniforms), stops, to_the_end)


def generate(network: CausalNetwork, prompts: Prompts, max_new_tokens: int, **options: object) -> list[list[int]]:
    """Return the new tokens of every row, without the stop token. For arguments and collectives see `stream`."""
    found: list[list[int]] = [[] for _ in range(len(prompts))]
    for step in stream(network, prompts, max_new_tokens, **options):  # type: ignore[arg-type]
        for row, token in zip(found, step, strict=True):
            if token is not None:
                row.append(token)
    return found


def refuse_absent(network: nn.Module) -> None:
    """Refuse a network with blocks on other ranks.

    Raises:
        PlanError: a parameter of the network is on meta.
    """
    absent = next((name for name, p in network.named_parameters() if p.is_meta), None)
    if absent is not None:
        raise PlanError(
            f"{absent} is on another rank: the network is partitioned into pipeline stages (or was never filled), so "
            "no rank can run all of it. Save a checkpoint, and generate from it without a pipeline."
        )


def _rows(prompts: Prompts) -> list[list[int]]:
    rows: list[list[int]] = prompts.tolist() if isinstance(prompts, Tensor) else [list(row) for row in prompts]
    empty = next((i for i, row in enumerate(rows) if not row), None)
    if not rows or empty is not None:
        raise ConfigError(
            f"Got {'no prompts' if not rows else f'prompt {empty} without tokens'}. Give at least one prompt, each "
            "with at least one token."
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
        # Not around the yield: gradients must stay enabled in the caller's code.
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
"""Runs one forward on the last chosen tokens ``(B,)`` (None at first), and returns the next logits ``(B, V)``."""


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


def _full_reader(network: CausalNetwork, rows: list[list[int]], device: torch.device, multiple: int) -> Read:
    limit = network.make_cache().max_length // multiple * multiple
    if not limit:
        raise ConfigError(f"Got full_sequences={multiple}, but the network reads fewer tokens than that at once.")

    def read(_chosen: Tensor | None) -> Tensor:
        recent = [row[-limit:] for row in rows]
        length = -(-max(map(len, recent)) // multiple) * multiple
        # Pad on the right, where no token attends to it.
        tokens = torch.tensor([row + [0] * (length - len(row)) for row in recent], device=device)
        logits = network(tokens)
        last = [len(row) - 1 for row in recent]
        if len(set(last)) == 1:
            return logits[:, last[0]]
        return logits[list(range(len(rows))), last]

    return read
