"""Measure generation speed, and compare it with the limit set by memory bandwidth.

A decoding step reads every weight once and computes little: at batch 1 it takes at least the weights' bytes divided by
the memory bandwidth.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ls_strategy import device as dev
from ls_strategy.errors import ConfigError
from ls_strategy.extras.inference.engine import InferenceEngine
from ls_strategy.extras.inference.sampling import SamplingConfig
from ls_strategy.parallel.logits import gather

_TRIAD_NUMEL = 1 << 24  # fp32 elements of each of the three arrays: 64 MiB, larger than a cache


@dataclass(frozen=True)
class Speed:
    """Speed of greedy generation, as medians over rounds."""

    batch: int
    prompt_length: int
    new_tokens: int
    first_token_s: float  # seconds from the call to the first new token of every row, which reads the prompt
    token_s: float  # seconds from one new token of every row to the next
    tokens_per_s: float  # new tokens of all rows per second, without the first ones
    weights_read: int  # bytes that a step reads on this rank: all weights except embedding tables
    triad_gbs: float  # memory bandwidth in GB/s, measured in the same run
    bandwidth_share: float  # the time to read the weights at that bandwidth, divided by ``token_s``

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


# --- perplexity of a model on a text, to measure the cost of quantization ---------------------------------------------


@torch.no_grad()
def perplexity(
    forward: Callable[[Tensor], Any], tokens: Tensor, *, context: int, batch: int = 8, windows: int | None = None
) -> float:
    """Return ``exp`` of the mean cross-entropy in nats per token, over all tokens but the first of each window.

    Collective where ``forward`` is.

    Args:
        forward: from tokens (B, T) to logits (B, T, V), or to an object with ``logits``.
        tokens: the text, (N,) int64, on the model's device.
        context: tokens per window; windows do not overlap. An incomplete last window is omitted.
        batch: windows per forward.
        windows: number of windows, spread evenly over the text. None: all.

    Raises:
        ConfigError: the text is shorter than a window.
    """
    if context < 2 or len(tokens) < context:
        raise ConfigError(
            f"Got {len(tokens)} tokens of text, but windows of {context} tokens (at least 2): give a longer text, or "
            "another context."
        )
    total, count = 0.0, 0
    for rows in _batches(tokens, context, batch, windows):
        output = forward(rows)
        logits = gather(output if isinstance(output, Tensor) else output.logits)
        losses = functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
        total, count = total + losses.item(), count + rows[:, 1:].numel()
    return math.exp(total / count)


def _batches(tokens: Tensor, context: int, batch: int, windows: int | None) -> Iterator[Tensor]:
    rows = tokens[: len(tokens) // context * context].view(-1, context)
    if windows is not None and windows < len(rows):
        rows = rows[torch.linspace(0, len(rows) - 1, windows).long().to(rows.device)]
    yield from rows.split(batch)
