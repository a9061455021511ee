"""All checks, in the order in which they are shown."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from ls_strategy.doctor.finding import Finding, one_line
from ls_strategy.errors import ConfigError

TOPICS = ("software", "compilers", "kernels", "host", "gpus", "drive", "slurm", "launcher", "collectives")
"""Names of the checks."""


@dataclass(frozen=True)
class Check:
    """One topic."""

    topic: str
    doing: str
    """What is shown while it runs."""

    run: Callable[[], Iterator[Finding]]


def checks(*, nvme_path: str = "", timeout_s: float = 60.0) -> list[Check]:
    """All of them.

    Args:
        nvme_path: folder of the NVMe tier; empty: LS_STRATEGY_NVME_PATH, or none.
        timeout_s: of each pair of ranks.
    """
    from ls_strategy.doctor import cluster, collective, gpus, host, kernels, software
    from ls_strategy.doctor import nvme as drive

    path = nvme_path or os.environ.get("LS_STRATEGY_NVME_PATH", "")
    return [
        Check("software", "versions", software.versions),
        Check("compilers", "compilers", software.compilers),
        Check("kernels", "kernels; compiling takes some ten seconds the first time", kernels.kernels),
        Check("host", "processors, memory, limits", host.host),
        Check("gpus", "GPUs", gpus.gpus),
        Check("drive", "the NVMe folder", partial(drive.drive, path)),
        Check("slurm", "SLURM", partial(cluster.slurm, os.environ)),
        Check("launcher", "variables of launchers", partial(cluster.launcher, os.environ)),
        Check(
            "collectives",
            f"two ranks that add up numbers; up to {timeout_s:g} s",
            partial(collective.collectives, timeout_s),
        ),
    ]


def examine(
    chosen: Sequence[Check], found: Callable[[str, Finding], None], progress: Callable[[str], None]
) -> list[tuple[str, Finding]]:
    """Run checks one after the other.

    Args:
        chosen: from `checks`.
        found: is told every finding, with its topic, as soon as it is there.
        progress: is told what begins.

    Returns:
        All findings. A check that itself fails is a problem, and the others go on.
    """
    findings: list[tuple[str, Finding]] = []

    def report(topic: str, finding: Finding) -> None:
        findings.append((topic, finding))
        found(topic, finding)

    for check in chosen:
        progress(check.doing)
        try:
            for finding in check.run():
                report(check.topic, finding)
                progress(check.doing)
        except Exception as error:  # whatever it is, the other checks are worth having
            cure = f"This is a fault of the check itself: report it, and leave it out with --skip {check.topic}."
            told = f"{type(error).__name__}: {one_line(str(error))}"
            report(check.topic, Finding(check.topic, f"could not be found out: {told}", "problem", cure))
    return findings


def choose(all_checks: Sequence[Check], *, only: Sequence[str], skip: Sequence[str]) -> list[Check]:
    """The checks that were asked for.

    Raises:
        ConfigError: a name is unknown, or nothing is left.
    """
    unknown = sorted({*only, *skip} - {check.topic for check in all_checks})
    if unknown:
        raise ConfigError(f"no check {', '.join(unknown)}: there are {', '.join(check.topic for check in all_checks)}.")
    chosen = [check for check in all_checks if (not only or check.topic in only) and check.topic not in skip]
    if not chosen:
        raise ConfigError("--only and --skip leave no check: name others.")
    return chosen
