"""``ls-strategy report RUN...``: write one HTML file about a run, or a comparison of several."""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path

from ls_strategy.errors import ConfigError
from ls_strategy.extras.cli import arguments
from ls_strategy.extras.cli.status_line import show_status


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``report`` subcommand."""
    parser = subcommands.add_parser(
        "report",
        help="write one HTML file about a run: loss, speed, memory, traffic, time, events, configuration",
        description="Read the folder of a run (TensorBoard's event files or CSVLogger's metrics.csv, hparams.yaml, "
        "config.yaml, checkpoints) and write one HTML file that needs no network. Several runs, or a folder with "
        "several versions, are compared. The run may still be running. The file contains the run's configuration.",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", type=arguments.path, help="folder of a run, such as lightning_logs/version_0"
    )
    parser.add_argument(
        "-o", "--output", type=arguments.path, metavar="FILE",
        help="file to write (default: report.html in RUN, or in the current folder for several)",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read, and write the file."""
    from ls_strategy.extras.plots.figure import require

    require("report", "jinja2")
    from ls_strategy.extras.report import find
    from ls_strategy.extras.report.page import page
    from ls_strategy.extras.report.run import read

    folders = find.runs_in(args.runs)
    output: Path = args.output or (args.runs[0] if len(args.runs) == 1 else Path()) / "report.html"
    _check(output)
    runs = [read(folder, name, show_status) for folder, name in zip(folders, find.names_of(folders), strict=True)]
    show_status("")
    _write(output, page(runs))
    several = f", a comparison of {len(runs)} runs" if len(runs) > 1 else ""
    print(f"wrote {output}{several}; open it in a browser")
    return 0


def _check(output: Path) -> None:
    """Refuse to overwrite what is not a report.

    Raises:
        ConfigError: there is a folder or another file.
    """
    from ls_strategy.extras.report.page import MARK

    if not output.parent.is_dir():
        raise ConfigError(
            f"Got --output={str(output)!r}, but the folder {output.parent} does not exist. Create it first."
        )
    if output.is_dir():
        raise ConfigError(
            f"Got --output={str(output)!r}, which is a folder. Give a file, such as {output / 'report.html'}."
        )
    if output.exists():
        is_report = False
        if output.is_file():
            with output.open("rb") as file:
                is_report = MARK.encode() in file.read(4096)
        if not is_report:
            raise ConfigError(f"Got --output={str(output)!r}, which exists and is not a report. Give another file.")


def _write(output: Path, content: str) -> None:
    """Write the file completely or not at all."""
    partial = output.with_name(f".{output.name}.{secrets.token_hex(4)}")
    try:
        with partial.open("x", encoding="utf-8", errors="replace") as file:
            file.write(content)
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
