"""Command lines of torchrun: one bash script, which is the same on every node."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ls_strategy.errors import ConfigError
from ls_strategy.extras.clouds.run import Run

_RESTARTS = 20  # of each agent. An error of the program repeats as often.
_PORT = 29400


def render(run: Run, *, python: str, endpoint: str | None = None, elastic: int | None = None, path: str) -> str:
    """Return the script.

    Args:
        run: what it starts.
        python: the interpreter.
        endpoint: ``host:port`` where nodes meet; not needed on one node.
        elastic: the fewest nodes to continue on. None: as many as there are.
        path: of the script, for its first comment.

    Raises:
        ConfigError: several nodes have nowhere to meet, or ``elastic`` is more than there are nodes.
    """
    options = _options(run, endpoint, elastic)
    variables = run.variables
    if elastic is not None:  # a store that agents share with ranks keeps the addresses of ranks that have ended
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    where = "" if run.nodes == 1 else " on every node, at about the same time"
    lines = [
        "#!/usr/bin/env bash",
        f"# Written by `ls-strategy submit --to torchrun`. To start the run{where}: bash {shlex.quote(path)}",
        "set -euo pipefail",
        *run.setup,
        *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
        f"# SIGTERM reaches every rank of the node. They have {run.seconds_to_save} s to save.",
        f"exec {in_lines(run.launch(python, *options))}",
    ]
    return "\n".join(lines) + "\n"


def _options(run: Run, endpoint: str | None, elastic: int | None) -> list[str]:
    if elastic is not None and not 1 <= elastic <= run.nodes:
        raise ConfigError(f"Got --elastic {elastic} and --nodes {run.nodes}. Give from 1 to {run.nodes} nodes.")
    if endpoint is None and run.nodes > 1:
        raise ConfigError(
            f"Got --to torchrun with --nodes {run.nodes}, but nowhere to meet. Give --endpoint HOST:{_PORT}, with the "
            "name of one of the nodes."
        )
    ranks = f"--nproc-per-node={run.ranks_per_node}"
    if elastic is None and endpoint is None:
        return ["--standalone", "--nnodes=1", ranks]
    nodes = str(run.nodes) if elastic is None else f"{elastic}:{run.nodes}"
    restarts = [] if elastic is None else [f"--max-restarts={_RESTARTS}"]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-id={run.name}", f"--rdzv-endpoint={endpoint or f'localhost:{_PORT}'}"]
    return [f"--nnodes={nodes}", ranks, *restarts, *meeting]


def in_lines(words: Sequence[str], raw: Sequence[str] = ()) -> str:
    """Return words of a command, quoted, with one option per line; ``raw`` are quoted already, after the first line."""
    lines: list[str] = []
    for word in words:
        if lines and (not word.startswith("--") or lines[-1].endswith(" -m")):
            lines[-1] += f" {shlex.quote(word)}"
        else:
            lines.append(shlex.quote(word))
    return " \\\n  ".join([lines[0], *raw, *lines[1:]])
