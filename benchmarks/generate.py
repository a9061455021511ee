"""Generation by the GPT recipe against transformers' ``generate`` on the same weights, interleaved in one run.

``OMP_NUM_THREADS=2 python -m benchmarks.generate --record benchmarks/records/generate.json``

The network is exported as a ``LlamaForCausalLM``, and both continue the same random prompts greedily in fp32, to equal
tokens, which is checked. transformers once with its static cache, which is laid out as ours, and once with the one that
grows, its default. For every shape: milliseconds per new token, the prompt's forward included, and for each of
transformers' ways the median, with its quartiles, of the ratios of its time to ours in the same round: above one, the
recipe is faster.
"""

from __future__ import annotations

import logging
import statistics
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import record
from benchmarks.contest import clocked, quartiles, ratios
from recipes.gpt.huggingface import PREFIX, llama_config, llama_names
from recipes.gpt.network import GPT, GPTConfig

MINUTES = 8
SPREAD = "quartiles over rounds"
SEEDS = "0 for weights, 1 for prompts"
QUICK = ("--new", "4", "--prompt", "4", "--rounds", "2", "--shapes", "recipe")

SHAPES: dict[str, dict[str, Any]] = {
    "recipe": {"num_layers": 4, "num_heads": 4, "width": 128},
    "recipe, 2 key heads": {"num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "width": 128},
    "GPT-2 small": {"num_layers": 12, "num_heads": 12, "width": 768, "vocab_size": 50304},
}
BATCHES = (1, 8)
OURS = "ls_strategy"
BASELINE = "transformers static"


def build(shape: str, length: int) -> GPT:
    """Weights large enough that rounding does not change the most likely token."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=length, **SHAPES[shape]))
    for name, p in model.named_parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=2.0 * p.shape[-1] ** -0.5 if "embedding" not in name else 1.0)
    return model.eval()


def as_llama(model: GPT) -> Any:
    """The same network in transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    llama = LlamaForCausalLM(LlamaConfig(**llama_config(model.config))).eval()
    rename = llama_names(model.config)
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        for part in rename(f"{PREFIX}{name}", tuple(value.shape)):
            state[part.name] = value if part.rows is None else value[slice(*part.rows)]
    missing = llama.load_state_dict(state, strict=False).missing_keys
    assert missing in ([], ["lm_head.weight"]), missing
    return llama


def bench(shape: str, batch: int, prompt: int, new: int, rounds: int) -> dict[str, Any]:
    model = build(shape, prompt + new)
    llama = as_llama(model)
    tokens = torch.randint(model.config.vocab_size, (batch, prompt), generator=torch.Generator().manual_seed(1))
    options = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new, "use_cache": True}
    options |= {"attention_mask": torch.ones_like(tokens), "pad_token_id": 0}
    ways = {
        OURS: lambda: model.generate(tokens, new, temperature=0),
        BASELINE: lambda: llama.generate(tokens, cache_implementation="static", **options),
        "transformers dynamic": lambda: llama.generate(tokens, **options),
    }
    expected = ways[OURS]()
    equal = {name: bool(torch.equal(way(), expected)) for name, way in ways.items()}
    times = clocked(ways, rounds)
    found: dict[str, Any] = {"shape": shape, "batch": batch, "tokens_equal": all(equal.values())}
    for name in ways:
        found[name] = {"ms_per_token": round(statistics.median(times[name]) / new * 1e3, 3)}
        if name != OURS:
            found[name]["ratio"] = quartiles(ratios(times[name], times[OURS]), 2)
    return found


def line(row: dict[str, Any]) -> str:
    texts = [f"{row['shape']:20} batch {row['batch']:<3}{row[OURS]['ms_per_token']:>9.3f} ms"]
    for name, found in row.items():
        if isinstance(found, dict) and name != OURS:
            low, middle, high = found["ratio"]
            texts.append(f"{name} {found['ms_per_token']:.3f} ms, {middle:.2f} [{low:.2f}, {high:.2f}]")
    return "  ".join([*texts, "" if row["tokens_equal"] else "OTHER TOKENS"])


def main() -> None:
    parser = record.parser(__doc__, rounds=15)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens that follow")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    results = []
    for shape in args.shapes:
        for batch in BATCHES:
            results.append(bench(shape, batch, args.prompt, args.new, args.rounds))
            print(line(results[-1]), flush=True)
    found = {
        **record.header("generate"), "threads": torch.get_num_threads(), "prompt": args.prompt, "new": args.new,
        "rounds": args.rounds, "results": results,
    }  # fmt: skip
    record.write(args.record, found)


if __name__ == "__main__":
    main()
