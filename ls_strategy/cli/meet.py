"""``ls-strategy meet``: the hub where islands that exchange rarely (`DiLoCo`) meet."""

from __future__ import annotations

import argparse

from ls_strategy.checked import above
from ls_strategy.cli import arguments


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``meet`` subcommand."""
    parser = subcommands.add_parser(
        "meet",
        help="run the hub where islands that exchange rarely (DiLoCo) meet",
        description="Run until it is interrupted. Every rank of every island connects to it. It needs no GPU, and "
        "memory for the pseudo-gradients of one round of all islands.",
    )
    parser.add_argument(
        "--islands", type=arguments.integer(most=1024), required=True, help="how many islands there are"
    )
    parser.add_argument("--port", type=arguments.integer(most=65535), required=True, help="port to listen on")
    parser.add_argument(
        "--secret",
        type=arguments.path,
        help="file with a secret, the same one as DiLoCo(secret=...). Without it only ranks of this host can connect",
    )
    parser.add_argument(
        "--patience",
        type=arguments.number(above(0, 86400)),
        default=300.0,
        metavar="SECONDS",
        help="how long a round waits for islands that are late, and the start for islands that are missing "
        "(default: %(default)s)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve."""
    from ls_strategy.islands.client import read_secret
    from ls_strategy.islands.hub import Hub, HubServer

    secret = "" if args.secret is None else read_secret(args.secret)
    host = "" if secret else "127.0.0.1"
    server = HubServer(Hub(args.islands, args.patience), host=host, port=args.port, secret=secret)
    who = "all hosts" if secret else "this host only, as no --secret is given"
    print(f"hub for {args.islands} islands on port {server.port}, for {who}", flush=True)
    server.serve()
    return 0
