"""``ls-strategy tune-io PATH``: find the settings for reading and writing an NVMe device."""

from __future__ import annotations

import argparse
from pathlib import Path

from ls_strategy.checked import above, at_least
from ls_strategy.errors import ConfigError
from ls_strategy.extras.cli import arguments
from ls_strategy.extras.cli.status_line import show_status

MIB = 1 << 20


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``tune-io`` subcommand."""
    parser = subcommands.add_parser(
        "tune-io",
        help="find the fastest settings for the NVMe tier on a device",
        description="Write and read a file with several block sizes and numbers of threads, in interleaved rounds, "
        "and print the setting to use. The file is removed afterwards. Run it while the device is idle; several ranks "
        "on one host share the device.",
    )
    parser.add_argument("path", type=arguments.path, help="folder on the NVMe device")
    parser.add_argument(
        "--gib",
        type=arguments.number(above(0, 1 << 20)),
        default=1.0,
        help="size of the file in GiB (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=arguments.number(at_least(0, 86400)),
        default=60.0,
        help="time limit; one round is always completed (default: %(default)s)",
    )
    parser.add_argument(
        "--block-mib",
        type=arguments.number(at_least(1 / 256, 1024)),
        nargs="+",
        default=[1, 4, 8, 16],
        metavar="MIB",
        help="block sizes to try, in MiB",
    )
    parser.add_argument(
        "--parallelism",
        type=arguments.integer(most=1024),
        nargs="+",
        default=[1, 2, 4, 8],
        metavar="N",
        help="numbers of threads to try",
    )
    parser.add_argument("--buffered", action="store_true", help="use the page cache instead of direct I/O")
    parser.add_argument("--allow-ram", action="store_true", help="accept a folder in memory (tmpfs)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from ls_strategy.config import NVMeIOConfig

    path: Path = args.path
    if not path.exists():  # a typo should not create a folder
        raise ConfigError(
            f"Got {str(path)!r}, which does not exist. Give a folder on the NVMe device, or create it: mkdir -p {path}"
        )
    settings = [
        NVMeIOConfig(block_bytes=int(mib * MIB), parallelism=threads, direct=not args.buffered)
        for mib in sorted(set(args.block_mib))
        for threads in sorted(set(args.parallelism))
    ]
    nbytes = int(args.gib * 2**30)

    from ls_strategy.extras.cli.tuning import best, measure
    from ls_strategy.tiers.nvme_folder import check_path

    check_path(path, nbytes, args.allow_ram)
    print(f"{len(settings)} settings on {path}, {args.gib:g} GiB each way, up to {args.seconds:g} s", flush=True)
    results = measure(path, settings, nbytes=nbytes, seconds=args.seconds, progress=show_status)
    show_status("")
    print(f"{'block MiB':>10}{'threads':>9}{'read GB/s':>11}{'write GB/s':>12}{'both GB/s':>11}{'rounds':>8}")
    for m in sorted(results, key=lambda m: -m.both_gbs):
        print(
            f"{m.io.block_bytes / MIB:>10g}{m.io.parallelism:>9}{m.read_gbs:>11.2f}{m.write_gbs:>12.2f}"
            f"{m.both_gbs:>11.2f}{len(m.read_s):>8}"
        )
    io = best(results).io
    direct = "" if io.direct else ", direct: false"
    print(
        "\nThe fewest threads and smallest blocks within 3 % of the fastest:\n\n"
        "strategy:\n"
        "  class_path: ls_strategy.ZeROStrategy\n"
        "  init_args:\n"
        "    offload:\n"
        f"      nvme_path: {path.resolve()}\n"
        f"      nvme_io: {{block_bytes: {io.block_bytes}, parallelism: {io.parallelism}{direct}}}"
    )
    return 0
