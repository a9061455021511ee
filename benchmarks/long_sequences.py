"""Peak memory of a step by sequence length, with chunked losses, tiled layers and recompute.

``python -m benchmarks.long_sequences --record benchmarks/records/long_sequences.json``

One process runs forward and backward of the GPT recipe model on one sequence, in fp32, with each choice. Counted are
the bytes of all tensors that are alive at once, less those of the weights and their gradients.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from benchmarks import record
from benchmarks.step_time import loss_of
from ls_strategy.activations.recompute import apply_recompute
from ls_strategy.activations.tiles import Tiles
from ls_strategy.config import RecomputeConfig, TilingConfig
from ls_strategy.losses.head import ChunkedHeads
from tests.live_bytes import LiveBytes

MINUTES = 2
SPREAD = "none: bytes of tensors are counted"
SEEDS = "0 for weights and data"
QUICK = ("--width", "64", "--layers", "1", "--vocabulary", "512", "--lengths", "128")

CHOICES = ("none", "chunked loss", "and recompute", "and tiles")  # each has what those before it have


def peak_bytes(sizes: tuple[int, int, int], length: int, choice: str) -> int:
    """Peak of one forward and backward."""
    from recipes.gpt.network import GPT, GPTConfig

    width, layers, vocabulary = sizes
    torch.manual_seed(0)
    shape: dict[str, Any] = {"width": width, "num_layers": layers, "num_heads": width // 64}
    model = GPT(GPTConfig(vocab_size=vocabulary, block_size=length, **shape))
    number, undo = CHOICES.index(choice), []
    if number >= 1:
        undo.append(ChunkedHeads(model))
    if number >= 2:
        undo.append(apply_recompute(model, RecomputeConfig(policy="full")))
    if number >= 3:
        undo.append(Tiles(model, TilingConfig(tokens=256)))
    x, y = torch.randint(0, vocabulary, (2, 1, length))
    loss_of(model, x, y).backward()  # gradients and tables exist from now on
    with LiveBytes(ignore=[t for p in model.parameters() for t in (p.detach(), p.grad) if t is not None]) as live:
        loss_of(model, x, y).backward()
    for each in undo:
        each.remove()
    return live.peak


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    args = parser.parse_args()
    sizes = (args.width, args.layers, args.vocabulary)
    results: dict[str, Any] = {c: {str(n): peak_bytes(sizes, n, c) for n in args.lengths} for c in CHOICES}
    print(json.dumps(results, indent=1))
    found = {**record.header("long_sequences"), "width": args.width, "layers": args.layers}
    record.write(args.record, {**found, "vocabulary": args.vocabulary, "results": results})


if __name__ == "__main__":
    main()
