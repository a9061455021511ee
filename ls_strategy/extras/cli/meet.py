"""``ls-strategy meet``: the hub where islands that exchange rarely (`DiLoCo`) meet."""

from __future__ import annotations

import argparse

from ls_strategy.checked import above
from ls_strategy.errors import ConfigError
from ls_strategy.extras.cli import arguments
from ls_strategy.extras.requests import is_loopback


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
        "--host",
        type=arguments.host,
        help="address of this host to listen on, as the islands reach it (0.0.0.0: all of its addresses). Needs "
        "--secret, unless it is this host's own (default: 127.0.0.1)",
    )
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
    from ls_strategy.extras.islands.client import read_secret
    from ls_strategy.extras.islands.hub import Hub
    from ls_strategy.extras.islands.server import HubServer

    secret = "" if args.secret is None else read_secret(args.secret)
    host = _host(args.host, secret)
    server = HubServer(Hub(args.islands, args.patience), host=host, port=args.port, secret=secret)
    who = "those who know the secret" if secret else "this host only, as no --secret is given"
    print(f"hub for {args.islands} islands at {host}:{server.port}, for {who}", flush=True)
    server.serve()
    return 0


def _host(given: str | None, secret: str) -> str:
    """Return the address to listen on.

    Raises:
        ConfigError: other hosts would need a secret, or an address.
    """
    if given is None and secret:
        raise ConfigError(
            "Got --secret without --host, but the hub listens only at the address that islands use. Set --host to the "
            "one in DiLoCo(meet=...); to 127.0.0.1 for islands on this host or behind a tunnel; or to 0.0.0.0 for all "
            "addresses of this host."
        )
    if given is not None and not secret and not is_loopback(given):
        raise ConfigError(
            f"Got --host {given} without --secret, but then anybody who reaches it takes part. Make a secret (openssl "
            "rand -hex 32 > secret), and give it by --secret here and in DiLoCo(secret=...)."
        )
    return given or "127.0.0.1"
