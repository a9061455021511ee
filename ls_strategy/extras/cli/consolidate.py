"""``ls-strategy consolidate DIR OUT``: write a sharded checkpoint as one file, as safetensors, or for transformers."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from ls_strategy.checked import above
from ls_strategy.errors import ConfigError
from ls_strategy.extras.cli import arguments
from ls_strategy.extras.cli.status_line import show_status

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``consolidate`` subcommand."""
    parser = subcommands.add_parser(
        "consolidate",
        help="write a sharded checkpoint, ours or DeepSpeed's, as one file, or as safetensors",
        description="Write a sharded checkpoint, ours or DeepSpeed's, as one .ckpt file that every strategy resumes "
        "from, or its weights as safetensors, or a folder that from_pretrained of transformers opens. Needs memory for "
        "a part of one tensor. --format ckpt unpickles the "
        "objects in the checkpoint, as torch.load(weights_only=False) does: use it only for checkpoints that you "
        "trust.",
    )
    parser.add_argument("source", metavar="DIR", type=arguments.location, help="checkpoint folder (or file)")
    parser.add_argument(
        "target", metavar="OUT", type=arguments.path, help="output file; with --format safetensors or hf, output folder"
    )
    parser.add_argument(
        "--format",
        "--to",
        choices=("ckpt", "safetensors", "hf"),
        default="ckpt",
        help="output format; hf: a folder that from_pretrained opens (default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        type=arguments.path,
        help="hf: folder with the config.json of the model that was trained; its tokenizer is copied",
    )
    parser.add_argument("--module", metavar="NAME", help="hf: attribute that holds the model, if several would fit")
    parser.add_argument("--weights-only", action="store_true", help="ckpt: omit optimizers and callbacks")
    parser.add_argument(
        "--dtype", choices=("keep", *DTYPES), default="keep", help="safetensors, hf: dtype of the weights"
    )
    parser.add_argument(
        "--max-shard-gb",
        type=arguments.number(above(0, 1e6)),
        default=5.0,
        metavar="GB",
        help="safetensors, hf: maximum file size (default: %(default)s)",
    )
    parser.add_argument(
        "--rename",
        nargs="+",
        default=[],
        metavar="OLD=NEW",
        help="safetensors, and DeepSpeed's checkpoints: replace a prefix of names; --rename model.= removes the "
        "prefix 'model.', --rename =model. adds it",
    )
    parser.add_argument("--ema", action="store_true", help="safetensors, hf: write the averaged weights (ShardedEMA)")
    parser.add_argument(
        "--split-experts",
        action="store_true",
        help="safetensors: write stacked experts one by one, experts.up.weight as experts.0.up.weight and so on",
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the file or files, and print what was written, how long it took, and how to load it."""
    _check(args)
    pairs: list[tuple[str, str]] = [(old, new) for old, _, new in (pair.partition("=") for pair in args.rename)]
    from ls_strategy.extras.deepspeed.checkpoint import consolidate_deepspeed, is_deepspeed

    theirs = is_deepspeed(args.source)
    if theirs and args.format != "ckpt":
        raise ConfigError(
            f"Got {args.source}, which is a DeepSpeed checkpoint. Write a .ckpt first (--format ckpt), and export that."
        )
    if args.format == "ckpt" and args.rename and not theirs:
        raise ConfigError(_ONLY_SAFETENSORS)
    progress = ProgressLine(str(args.target))
    if theirs:
        consolidate_deepspeed(
            args.source,
            args.target,
            weights_only=args.weights_only,
            rename=pairs,
            force=args.force,
            progress=progress,
        )
    elif args.format == "ckpt":
        from ls_strategy.checkpoint.consolidate import consolidate

        consolidate(args.source, args.target, weights_only=args.weights_only, force=args.force, progress=progress)
    elif args.format == "hf":
        _export_for_transformers(args, progress)
    else:
        _export(args, pairs, progress)
    progress.finish()
    print("\n".join(_what_it_is(args)))
    return 0


_ONLY_SAFETENSORS = "--dtype, --rename and --ema need --format safetensors; a .ckpt keeps everything as it was saved."


def _check(args: argparse.Namespace) -> None:
    """Refuse what is wrong whatever the source holds.

    Raises:
        ConfigError: options contradict each other, or the target exists or has no folder.
        CheckpointError: the source does not exist.
    """
    if args.format == "ckpt" and (args.dtype != "keep" or args.ema):
        raise ConfigError(_ONLY_SAFETENSORS)
    if args.format == "ckpt" and args.split_experts:
        raise ConfigError("--split-experts needs --format safetensors; a .ckpt keeps everything as it was saved.")
    if args.format != "ckpt" and args.weights_only:
        raise ConfigError("--weights-only needs --format ckpt; safetensors contain only weights. Omit it.")
    _check_for_transformers(args)
    if not all("=" in pair for pair in args.rename):
        raise ConfigError(f"Got --rename {' '.join(args.rename)}, but it needs OLD=NEW: a prefix and its replacement.")
    arguments.require_checkpoint(args.source)
    target: Path = args.target
    if not target.parent.is_dir():
        raise ConfigError(f"{target.parent} is not a folder. Create it first: mkdir -p {target.parent}")
    if target.is_file() and not (target.is_symlink() or args.force or Path(args.source).resolve() == target.resolve()):
        raise ConfigError(f"{target} exists. Give another name, or --force (force=True) to replace it.")


def _check_for_transformers(args: argparse.Namespace) -> None:
    hf = args.format == "hf"
    if hf != (args.model is not None):
        raise ConfigError(
            "--format hf and --model belong together: a folder for from_pretrained needs the config.json of the model "
            "that was trained. Give both, as in --format hf --model FOLDER."
        )
    if hf and (args.rename or args.split_experts):
        raise ConfigError(
            "--rename and --split-experts need --format safetensors; hf has transformers' names. Omit them."
        )
    if args.module is not None and not hf:
        raise ConfigError("--module needs --format hf; other formats keep all of the module. Omit it.")


def _export(args: argparse.Namespace, pairs: list[tuple[str, str]], progress: ProgressLine) -> None:
    import torch

    from ls_strategy.checkpoint.safetensors import export_safetensors, rename_prefixes, split_experts

    renamed = rename_prefixes(pairs)
    export_safetensors(
        args.source,
        args.target,
        dtype=None if args.dtype == "keep" else getattr(torch, DTYPES[args.dtype]),
        max_shard_bytes=max(int(args.max_shard_gb * 1e9), 1),
        rename=split_experts(renamed) if args.split_experts else renamed,
        average=args.ema,
        force=args.force,
        progress=progress,
    )


def _export_for_transformers(args: argparse.Namespace, progress: ProgressLine) -> None:
    import torch

    from ls_strategy.extras.huggingface.from_checkpoint import export_for_transformers

    export_for_transformers(
        args.source,
        args.target,
        model=args.model,
        module=args.module,
        dtype=None if args.dtype == "keep" else getattr(torch, DTYPES[args.dtype]),
        max_shard_bytes=max(int(args.max_shard_gb * 1e9), 1),
        average=args.ema,
        force=args.force,
        progress=progress,
    )


def _what_it_is(args: argparse.Namespace) -> list[str]:
    """Return what was written and how to load it, in lines to print."""
    target = str(args.target)
    if args.format == "hf":
        return [
            f"wrote {target}: a folder for transformers",
            f"  in Python     AutoModelForCausalLM.from_pretrained({target!r}), or the class in its config.json",
        ]
    if args.format == "safetensors":
        files = sorted(args.target.glob("*.safetensors"))
        first = str(files[0])
        more = f", and so on for {len(files)} files" if len(files) > 1 else ""
        return [
            f"wrote {target}: weights in {len(files)} {'files' if more else 'file'} of safetensors",
            f"  in torch      safetensors.torch.load_file({first!r}){more}",
            f"  in a module   ls_strategy.load_safetensors(module, {target!r})",
            "  Hugging Face's from_pretrained needs its config.json and its names too: see --format hf",
        ]
    content = "weights and hyper-parameters" if args.weights_only else "all of the checkpoint"
    load = [
        f"wrote {target}: {content} in one file of torch.save",
        f"  in a module   YourModule.load_from_checkpoint({target!r})",
        f"  in torch      torch.load({target!r}, weights_only=True)['state_dict']",
    ]
    return load if args.weights_only else [*load, f"  in a Trainer  trainer.fit(..., ckpt_path={target!r})"]


class ProgressLine:
    """A status line on stderr: overwritten on a terminal; otherwise only the last one is printed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = time.monotonic()
        self._shown = 0.0
        self._done = self._total = 0

    def __call__(self, done: int, total: int) -> None:
        """Show the bytes written so far, and the total."""
        self._done, self._total = done, total
        if sys.stderr.isatty() and time.monotonic() - self._shown > 0.2:
            self._shown = time.monotonic()
            show_status(self._line())

    def finish(self) -> None:
        """Print the last line."""
        seconds = time.monotonic() - self._started
        line = f"{self._line()} in {seconds:.1f} s"
        print(f"\r{line:<79}" if sys.stderr.isatty() else line, file=sys.stderr, flush=True)

    def _line(self) -> str:
        unit, name = (1e9, "GB") if self._total >= 1e9 else (1e6, "MB")
        return f"{self._name}: {self._done / unit:.2f} of {self._total / unit:.2f} {name}"
