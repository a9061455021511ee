"""Measure generation speed, and compare it with the limit set by memory bandwidth.

A decoding step reads every weight once and computes little: at batch 1 it takes at least the weights' bytes divided by
the memory bandwidth.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ls_strategy import device as dev
from ls_strategy.errors import ConfigError
from ls_strategy.extras.inference.engine import InferenceEngine
from ls_strategy.extras.inference.sampling import SamplingConfig

_TRIAD_NUMEL = 1 << 24
"""fp32 elements of each of the three arrays: 64 MiB, larger than a cache."""


@dataclass(frozen=True)
class Speed:
    """Speed of greedy generation, as medians over rounds."""

    batch: int
    prompt_length: int
    new_tokens: int
    first_token_s: float
    """Seconds from the call to the first new token of every row, which reads the prompt."""

    token_s: float
    """Seconds from one new token of every row to the next."""

    tokens_per_s: float
    """New tokens of all rows per second, without the first ones."""

    weights_read: int
    """Bytes that a step reads on this rank: all weights except embedding tables."""

    triad_gbs: float
    """Memory bandwidth in GB/s, measured in the same run."""

    bandwidth_share: float
    """The time to read the weights at that bandwidth, divided by ``token_s``."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def measure(
    engine: InferenceEngine,
    *,
    batch: int,
    prompt_length: int,
    new_tokens: int,
    rounds: int = 3,
    vocabulary: int,
    progress: Callable[[str], None] = lambda _line: None,
) -> Speed:
    """Generate ``new_tokens`` per row from random prompts: ``rounds`` measured rounds after one warm-up round.

    Collective over the engine's ranks. ``progress`` is called with a line of text from time to time.

    Raises:
        ConfigError: a number is out of range.
    """
    if min(batch, prompt_length, rounds) < 1 or new_tokens < 2:
        raise ConfigError(
            f"Got batch={batch}, prompt_length={prompt_length}, new_tokens={new_tokens}, rounds={rounds}, but each "
            "must be at least 1, and new_tokens at least 2."
        )
    device = _device(engine.module)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, vocabulary, (batch, prompt_length), generator=generator).to(device)
    first: list[float] = []
    later: list[float] = []
    for i in range(rounds + 1):
        to_first = _timed(engine, prompts, 1, device)
        to_last = _timed(engine, prompts, new_tokens, device)
        if i:
            first.append(to_first)
            later.append((to_last - to_first) / (new_tokens - 1))
        progress(f"round {i} of {rounds}: {to_first:.3f} s to the first token, {to_last:.3f} s to the last")
    token_s = max(statistics.median(later), 1e-9)
    progress("measuring the memory bandwidth")
    gbs, read = triad_gbs(device), weights_read(engine.module)
    return Speed(
        batch=batch,
        prompt_length=prompt_length,
        new_tokens=new_tokens,
        first_token_s=statistics.median(first),
        token_s=token_s,
        tokens_per_s=batch / token_s,
        weights_read=read,
        triad_gbs=gbs,
        bandwidth_share=read / (gbs * 1e9) / token_s,
    )


def _timed(engine: InferenceEngine, prompts: Tensor, new_tokens: int, device: torch.device) -> float:
    dev.synchronize(device)
    started = time.perf_counter()
    if callable(getattr(engine.module, "make_cache", None)):
        engine.generate(prompts, new_tokens, sampling=SamplingConfig(temperature=0))
    else:  # a transformers model
        engine.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            num_beams=1,
        )
    dev.synchronize(device)
    return time.perf_counter() - started


def _device(model: nn.Module) -> torch.device:
    return next((t.device for t in (*model.parameters(), *model.buffers()) if not t.is_meta), torch.device("cpu"))


def weights_read(model: nn.Module) -> int:
    """Return the bytes of parameters and packed weights, each once, without embeddings that nothing else uses."""
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    others = [m for m in model.modules() if not isinstance(m, nn.Embedding)]
    used = {id(t): t for m in others for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))}
    shared = {key for key in tables if key in used}
    return sum(t.numel() * t.element_size() for key, t in used.items() if key not in tables or key in shared)


def triad_gbs(device: torch.device, rounds: int = 5) -> float:
    """Return the GB/s of ``a = b + s * c`` on long fp32 arrays, best of ``rounds``: McCalpin's STREAM, 1995."""
    a, b, c = (torch.ones(_TRIAD_NUMEL, device=device) for _ in range(3))
    best = float("inf")
    for _ in range(rounds + 1):
        dev.synchronize(device)
        started = time.perf_counter()
        torch.add(b, c, alpha=3.0, out=a)
        dev.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 3 * a.nbytes / best / 1e9
