"""``ls-strategy bench-inference MODEL``: measure generation speed, also sharded, quantized or streamed."""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ls_strategy.checked import accept, at_least
from ls_strategy.errors import ConfigError
from ls_strategy.extras.cli import arguments
from ls_strategy.extras.cli.status_line import show_status

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ls_strategy.extras.inference.engine import InferenceEngine

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_NOT_ALWAYS = (
    "peak_device_bytes", "weight_bytes_before", "weight_bytes", "resting_bytes", "perplexity", "perplexity_before",
    "perplexity_change",
)  # fmt: skip
"""What only some runs measure; null in JSON otherwise."""


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``bench-inference`` subcommand."""
    parser = subcommands.add_parser(
        "bench-inference",
        help="measure generation speed with tensor parallelism, quantization or streaming",
        description="Generate from random prompts, and print the time to the first token and per token, the memory, "
        "and the fraction of the memory bandwidth limit. With --text, also the perplexity before and after "
        "quantization. Several ranks: torchrun --nproc-per-node N -m ls_strategy.cli bench-inference ...",
    )
    parser.add_argument(
        "model",
        type=arguments.path,
        help="transformers model folder with weights; or its config.json, for random weights; or with --module a "
        "checkpoint",
    )
    parser.add_argument(
        "--module", metavar="CLASS", help="LightningModule class of the checkpoint: recipes.gpt.model.GPTModule"
    )
    parser.add_argument("--batch", type=arguments.integer(), default=1, help="rows (default: %(default)s)")
    parser.add_argument(
        "--prompt-length",
        type=arguments.integer(),
        default=32,
        metavar="N",
        help="tokens per prompt (default: %(default)s)",
    )
    parser.add_argument(
        "--new-tokens", type=arguments.integer(), default=32, metavar="N", help="tokens per row (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=arguments.integer(), default=3, metavar="N", help="measured rounds (default: %(default)s)"
    )
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="dtype of the weights (default: unchanged)")
    parser.add_argument("--quantize", choices=("int8", "int4"), help="format of the linear layers' weights")
    parser.add_argument("--offload", choices=("cpu", "nvme"), help="where the weights of blocks are stored")
    parser.add_argument(
        "--nvme-path", type=arguments.path, metavar="DIR", help="folder on the NVMe device, for --offload nvme"
    )
    parser.add_argument(
        "--tensor-parallel-size", type=arguments.integer(), default=1, metavar="N", help="ranks (default: %(default)s)"
    )
    parser.add_argument("--device", default="cpu", help="cpu, or cuda (default: %(default)s)")
    parser.add_argument("--text", type=arguments.path, metavar="FILE", help="UTF-8 text to measure perplexity on")
    parser.add_argument(
        "--context", type=arguments.integer(), metavar="N", help="tokens per window (default: at most 128)"
    )
    parser.add_argument(
        "--windows", type=arguments.integer(), default=64, metavar="N", help="maximum windows (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, and print on rank 0."""
    _check(args)
    rank = _join()
    import torch

    device = _device(args.device)
    progress = show_status if rank == 0 else _ignore
    try:
        progress("building the model")
        on_meta = _fills_in_blocks(args)
        model = _load(args.model, args.module, on_meta=on_meta)
        model = model if on_meta else model.to(device)
        vocabulary = _vocabulary(model)
        _check_lengths(args, model)
        text = None if args.text is None else _tokens(args, model, vocabulary).to(device)
        before = None if text is None or args.quantize is None else _perplexity(model.eval(), text, args)
        result = _measure(args, model, vocabulary, text, progress)
    finally:
        progress("")
    if before is not None:
        result["perplexity_before"] = before
        result["perplexity_change"] = result["perplexity"] / before - 1
    if rank == 0:
        arguments.print_json(args, dict.fromkeys(_NOT_ALWAYS) | result) if args.json else print(_table(result))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return 0


def _ignore(_line: str) -> None:
    """Show nothing, on ranks other than 0."""


def _measure(
    args: argparse.Namespace, model: nn.Module, vocabulary: int, text: Tensor | None, progress: Callable[[str], None]
) -> dict[str, Any]:
    from ls_strategy.extras.inference.engine import init_inference
    from ls_strategy.extras.inference.measure import measure

    progress("sharding, quantizing, offloading")
    engine = init_inference(
        model,
        tensor_parallel_size=args.tensor_parallel_size,
        dtype=args.dtype,
        quantize=args.quantize,
        offload=args.offload,
        nvme_path=args.nvme_path,
        fill_from=args.model if _fills_in_blocks(args) else None,
    )
    speed = measure(
        engine,
        batch=args.batch,
        prompt_length=args.prompt_length,
        new_tokens=args.new_tokens,
        rounds=args.rounds,
        vocabulary=vocabulary,
        progress=progress,
    )
    result = {"model": str(args.model), "engine": engine.describe(), **speed.to_dict(), **_memory(engine)}
    if text is not None:
        progress("reading the text")
        result["perplexity"] = _perplexity(engine, text, args)
    engine.close()
    return result


# --- options and ranks -----------------------------------------------------------------------------------------------


def _check(args: argparse.Namespace) -> None:
    wanted = {
        "MODEL": (args.model, "a checkpoint (folder or file), or a Hugging Face model folder or its config.json"),
        "--text": (args.text, "a text file"),
        "--nvme-path": (args.nvme_path, "a folder on an NVMe device"),
    }
    for option, (path, kind) in wanted.items():
        if path is not None and not path.exists():
            raise ConfigError(f"Got {option} {str(path)!r}, but it does not exist in {Path.cwd()}. Give {kind}.")
    ranks = _variable("WORLD_SIZE", 1)
    if args.tensor_parallel_size < 1 or ranks % args.tensor_parallel_size:
        raise ConfigError(
            f"Got --tensor-parallel-size {args.tensor_parallel_size}, but it does not divide the {ranks} ranks of this "
            f"run. Use torchrun --nproc-per-node {args.tensor_parallel_size} -m ls_strategy.cli bench-inference ..."
        )


def _join() -> int:
    """Join torchrun's process group, and return this rank."""
    if _variable("WORLD_SIZE", 1) == 1:
        return 0
    from torch import distributed as dist

    from ls_strategy import device as dev

    if not dist.is_initialized():
        dist.init_process_group(dev.default_backend())
    return dist.get_rank()


def _device(name: str) -> torch.device:
    import torch

    from ls_strategy.extras.inference.stream import usable_device

    if name == "cuda" and not torch.cuda.is_available():  # CUDA only: the option names it
        raise ConfigError("Got --device cuda, but torch finds no GPU here. Omit it to measure the CPU.")
    if name == "meta":
        raise ConfigError("Got --device meta, which computes nothing. Omit it to measure the CPU.")
    return usable_device(f"cuda:{_variable('LOCAL_RANK', 0)}" if name == "cuda" else name, "--device")


def _variable(name: str, least: int) -> int:
    """Return an integer that the launcher set in the environment."""
    text = os.environ.get(name, "")
    return accept(name, int(text) if text.strip().isdecimal() else text, int, at_least(least)) if text else least


# --- the model and its text ------------------------------------------------------------------------------------------


def _fills_in_blocks(args: argparse.Namespace) -> bool:
    """Return whether a transformers folder is read block by block, since it may be larger than memory."""
    compares = args.text is not None and args.quantize is not None  # needs the full model before quantization
    from_folder = args.module is None and args.model.is_dir() and any(args.model.glob("*.safetensors"))
    return args.offload is not None and from_folder and not compares and args.device == "cpu"


def _load(path: Path, module: str | None, *, on_meta: bool = False) -> nn.Module:
    """Load the model from a checkpoint or from transformers, with weights, with random weights, or on meta."""
    if module is not None:
        return _of_checkpoint(path, module)
    folder = path if path.is_dir() else path.parent
    if not (folder / "config.json").is_file() or (path.is_file() and path.name != "config.json"):
        raise ConfigError(
            f"Got {path}, which is neither a transformers folder with a config.json, nor a config.json. For a "
            "checkpoint of a LightningModule give its class: --module recipes.gpt.model.GPTModule."
        )
    import torch

    try:
        import transformers  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"Got {path}, which needs transformers. Install it: pip install 'ls_strategy[huggingface]'."
        ) from error
    transformers.logging.set_verbosity_error()
    config: Any = transformers.AutoConfig.from_pretrained(folder)
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    if on_meta:
        with torch.device("meta"):
            return auto.from_config(config)
    if path.is_dir() and any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        return auto.from_pretrained(folder)
    return auto.from_config(config)


def _of_checkpoint(path: Path, name: str) -> nn.Module:
    """Return the LightningModule, or the network in it that reads with a cache."""
    from ls_strategy.lightning.checkpointing.loading import load_from_checkpoint

    owner, _, cls = name.rpartition(".")
    try:
        sys.path.insert(0, str(Path.cwd()))  # as python -m does, to find recipes
        found = getattr(importlib.import_module(owner), cls)
    except Exception as error:  # the user's module may raise anything
        raise ConfigError(f"Got --module {name}: {error}. Give an importable class, package.module.Class.") from error
    finally:
        sys.path.pop(0)
    module = load_from_checkpoint(found, path)
    return next((m for m in module.modules() if callable(getattr(m, "make_cache", None))), module)


def _vocabulary(model: nn.Module) -> int:
    config = getattr(model, "config", None)
    size = getattr(config, "vocab_size", None)
    if not isinstance(size, int):
        raise ConfigError(f"Got a {type(model).__name__} without a vocabulary size. Set model.config.vocab_size.")
    return size


def _check_lengths(args: argparse.Namespace, model: nn.Module) -> None:
    """Check lengths against the model's context, and set the default of ``--context``."""
    config = getattr(model, "config", None)
    limit = getattr(config, "block_size", None) or getattr(config, "max_position_embeddings", None)
    limit = limit if isinstance(limit, int) else sys.maxsize
    for option, length in (
        ("--context", args.context or 0),
        ("--prompt-length and --new-tokens", args.prompt_length + args.new_tokens),
    ):
        if length > limit:
            raise ConfigError(f"Got {option} of {length} tokens, but the model reads {limit} at once. Give fewer.")
    if args.context is None:
        args.context = min(128, limit)


def _tokens(args: argparse.Namespace, model: nn.Module, vocabulary: int) -> Tensor:
    """Tokenize the text with the model's tokenizer, or byte by byte if it has none."""
    import torch

    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ConfigError("Got --text for an encoder-decoder model, which does not continue a text. Omit it.")
    try:
        text = args.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"Got --text {args.text}, but it cannot be read as UTF-8: {error}. Give a text file."
        ) from None
    if not text:
        raise ConfigError(f"Got --text {args.text}, but the file is empty. Give another file.")
    if args.module is None and args.model.is_dir() and any(args.model.glob("tokenizer*")):
        import transformers  # pyright: ignore[reportMissingImports]

        return torch.tensor(transformers.AutoTokenizer.from_pretrained(args.model)(text)["input_ids"])
    if vocabulary < 256:
        raise ConfigError(f"Got --text for a vocabulary of {vocabulary} tokens, but bytes need 256. Omit --text.")
    return torch.tensor(list(text.encode()))


def _perplexity(forward: Any, text: Tensor, args: argparse.Namespace) -> float:
    from ls_strategy.extras.inference.measure import perplexity

    return perplexity(forward, text, context=args.context, windows=args.windows)


# --- results ---------------------------------------------------------------------------------------------------------


def _memory(engine: InferenceEngine) -> dict[str, int]:
    from ls_strategy import device as dev

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = {"peak_resident_bytes": peak}
    if dev.is_in_use():
        found["peak_device_bytes"] = dev.peak_bytes(dev.current())
    if engine.quantization is not None:
        found["weight_bytes_before"] = engine.quantization.bytes_before
        found["weight_bytes"] = engine.quantization.bytes_after
    if engine.stream is not None:
        found["resting_bytes"] = engine.stream.stored_nbytes
    return found


def _table(result: dict[str, Any]) -> str:
    rows = [
        ("batch, prompt, new tokens", f"{result['batch']}, {result['prompt_length']}, {result['new_tokens']}"),
        ("time to first token", f"{1e3 * result['first_token_s']:.1f} ms"),
        ("time per token", f"{1e3 * result['token_s']:.2f} ms"),
        ("tokens per second", f"{result['tokens_per_s']:.1f}"),
        ("weights read per token", f"{result['weights_read'] / 1e6:,.1f} MB"),
        ("memory bandwidth (triad)", f"{result['triad_gbs']:.1f} GB/s"),
        ("fraction of that limit", f"{100 * result['bandwidth_share']:.0f} %"),
        ("peak resident memory", f"{result['peak_resident_bytes'] / 1e6:,.0f} MB"),
    ]
    if "perplexity" in result:
        rows.append(("perplexity", f"{result['perplexity']:.3f}"))
    if "perplexity_before" in result:
        change = f"{result['perplexity_before']:.3f}, {100 * result['perplexity_change']:+.2f} %"
        rows.append(("before quantization, change", change))
    return "\n".join([result["engine"], *(f"{name:<28}{value}" for name, value in rows)])
