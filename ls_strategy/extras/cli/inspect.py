"""``ls-strategy inspect PATH``: print what a checkpoint, folder or file, contains, and check its integrity."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ls_strategy.extras.cli import arguments
from ls_strategy.extras.cli.parser import print_error

if TYPE_CHECKING:
    from ls_strategy.checkpoint.describe import DescribedEntry, Description


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``inspect`` subcommand."""
    parser = subcommands.add_parser(
        "inspect",
        help="print what a checkpoint contains, and check its integrity",
        description="Print step, epoch, time, the layout it was saved from, and sizes. PATH is a folder or a file of "
        "this package, of Lightning and its strategies, of DeepSpeed, or of safetensors. The exit status is 1 if it is "
        "no complete checkpoint: a folder that was not committed, a file that is missing or has another size. No "
        "tensor is read, and no object that a file names is built.",
    )
    parser.add_argument("path", metavar="PATH", type=arguments.location, help="checkpoint: folder or file")
    parser.add_argument("--tensors", action="store_true", help="list every tensor with shape, dtype and size")
    parser.add_argument("--verify", action="store_true", help="read every file and compare its checksums")
    parser.add_argument("--json", action="store_true", help="print JSON, with every tensor")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Verify and print."""
    arguments.require_checkpoint(args.path)
    from ls_strategy.checkpoint.describe import describe, verify_all

    description = _of_others(args.path)
    if args.verify and description is None:  # before anything is parsed, so that the error names the damaged file
        broken = verify_all(args.path, lambda name: print(f"reading {name}", file=sys.stderr))
        for message in broken:
            print_error("ls-strategy inspect", message)
        if broken and args.json:
            arguments.print_json(args, {"error": "\n".join(broken)})
        if broken:
            return 1
    description = description or describe(args.path)
    verified = args.verify and description.has_checksums
    if args.json:
        arguments.print_json(args, {**description.to_dict(), "verified": verified})
    else:
        print(description.to_text(tensors=args.tensors))
        print(f"{'integrity':<18}{_integrity(description, verified)}")
    return 0


def _of_others(path: str) -> Description | None:
    """Describe what neither this package nor Lightning wrote, or what was exported; None if it is something else."""
    from ls_strategy.checkpoint.describe import of_tensors
    from ls_strategy.checkpoint.inert import tensors_in
    from ls_strategy.extras.deepspeed.checkpoint import is_deepspeed, read_deepspeed
    from ls_strategy.pretrained.safetensors import files_of, is_index, read_safetensors

    if "://" in path:
        return None
    place = Path(path)
    if is_deepspeed(path):
        saved = read_deepspeed(path, by_name=True)
        files = [file for file in place.rglob("*.pt") if file.is_file()]
        step, epoch = int(saved["global_step"]), int(saved["epoch"])
        return _foreign(place, "folder of DeepSpeed", files, of_tensors(tensors_in(saved)), step, epoch)
    if place.suffix == ".safetensors" or is_index(place) or any(place.glob("*.safetensors")):
        tensors = read_safetensors(place).items()
        entries = of_tensors((("state_dict", name), tensor) for name, tensor in tensors)
        return _foreign(place, "safetensors", files_of(place), entries)
    return None


def _foreign(
    path: Path,
    kind: str,
    files: list[Path],
    entries: list[DescribedEntry],
    step: int | None = None,
    epoch: int | None = None,
) -> Description:
    from ls_strategy.checkpoint.describe import Description

    written = max((file.stat().st_mtime for file in files), default=None)
    sizes = {file.name: file.stat().st_size for file in sorted(files)}
    return Description(str(path), kind, step, epoch, written, sizes, entries)


def _integrity(description: Description, verified: bool) -> str:
    if not description.has_checksums:
        return "readable; this format has no checksums to compare"
    whole = "committed" if description.format == "folder" else "complete"
    return f"{whole}, {'every checksum is right' if verified else 'sizes are right; --verify compares checksums'}"
