"""How fast a model generates, and how far that is from what memory allows.

One token at a time, every weight is read once per step, and little is computed with it: at batch 1 a step takes no less
than the weights' bytes over the bandwidth of the memory they are in.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ls_strategy.errors import ConfigError
from ls_strategy.inference.engine import InferenceEngine
from ls_strategy.inference.sampling import SamplingConfig

_TRIAD_NUMEL = 1 << 24
"""fp32 elements of each of three arrays: 64 MiB, more than a cache holds."""


@dataclass(frozen=True)
class Speed:
    """Of greedy generation, medians over rounds. Times in seconds."""

    batch: int
    prompt_length: int
    new_tokens: int
    first_token_s: float
    """From the call to the first new token of every row: the prompt is read."""

    token_s: float
    """From one new token of every row to the next."""

    tokens_per_s: float
    """New tokens of all rows, without the first one each."""

    weights_read: int
    """Bytes that a step reads on this rank: of all weights but tables of embeddings."""

    triad_gbs: float
    """GB/s of memory, measured in the same run."""

    bandwidth_share: float
    """The time that memory needs for the weights, over ``token_s``."""

    def to_dict(self) -> dict[str, Any]:
        """By name."""
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
    """Generate from random tokens, several times. Collective over the ranks of the engine.

    Args:
        engine: the model.
        batch: rows.
        prompt_length: tokens of each prompt.
        new_tokens: of each row, at least 2.
        rounds: how often; one more comes first, and does not count.
        vocabulary: tokens to draw from.
        progress: called with a line now and then.

    Raises:
        ConfigError: a number makes no sense.
    """
    if min(batch, prompt_length, rounds) < 1 or new_tokens < 2:
        raise ConfigError(
            f"batch={batch}, prompt_length={prompt_length}, new_tokens={new_tokens}, rounds={rounds}: at least 1 each, "
            "and 2 new tokens, between which there is a time."
        )
    device = _device(engine.module)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, vocabulary, (batch, prompt_length), generator=generator).to(device)
    first: list[float] = []
    rest: list[float] = []
    for i in range(rounds + 1):
        alone = _timed(engine, prompts, 1, device)
        whole = _timed(engine, prompts, new_tokens, device)
        if i:
            first.append(alone)
            rest.append((whole - alone) / (new_tokens - 1))
        progress(f"round {i} of {rounds}: {alone:.3f} s to the first token, {whole:.3f} s to the last")
    token_s = max(statistics.median(rest), 1e-9)
    progress("measuring the bandwidth of memory")
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
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    started = time.perf_counter()
    if callable(getattr(engine.module, "make_cache", None)):
        engine.generate(prompts, new_tokens, sampling=SamplingConfig(temperature=0))
    else:  # of transformers
        engine.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            num_beams=1,
        )
    synchronize()
    return time.perf_counter() - started


def _device(model: nn.Module) -> torch.device:
    return next((t.device for t in (*model.parameters(), *model.buffers()) if not t.is_meta), torch.device("cpu"))


def weights_read(model: nn.Module) -> int:
    """Bytes of parameters and packed weights, each once, but for embeddings that nothing else uses."""
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    others = [m for m in model.modules() if not isinstance(m, nn.Embedding)]
    used = {id(t): t for m in others for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))}
    shared = {key for key in tables if key in used}
    return sum(t.numel() * t.element_size() for key, t in used.items() if key not in tables or key in shared)


def triad_gbs(device: torch.device, rounds: int = 5) -> float:
    """GB/s of ``a = b + s * c`` on long fp32 arrays, the best of some rounds: McCalpin's STREAM, 1995."""
    a, b, c = (torch.ones(_TRIAD_NUMEL, device=device) for _ in range(3))
    best = float("inf")
    for _ in range(rounds + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        torch.add(b, c, alpha=3.0, out=a)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 3 * a.nbytes / best / 1e9
