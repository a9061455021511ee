"""All checks, in the order of the output."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from ls_strategy.errors import ConfigError
from ls_strategy.extras.doctor.finding import Finding, one_line

TOPICS = ("software", "compilers", "kernels", "host", "gpus", "drive", "slurm", "launcher", "collectives")


@dataclass(frozen=True)
class Check:
    """One topic."""

    topic: str
    doing: str  # shown while it runs
    run: Callable[[], Iterator[Finding]]


def checks(*, nvme_path: str = "", timeout_s: float = 60.0) -> list[Check]:
    """Return all checks. ``timeout_s`` is for each pair of ranks. ``nvme_path`` defaults to LS_STRATEGY_NVME_PATH."""
    from ls_strategy.extras.doctor import cluster, collective, gpus, host, kernels, nvme, software

    path = nvme_path or os.environ.get("LS_STRATEGY_NVME_PATH", "")
    return [
        Check("software", "versions", software.versions),
        Check("compilers", "compilers", software.compilers),
        Check("kernels", "kernels; compiling takes ten seconds to a minute the first time", kernels.kernels),
        Check("host", "processors, memory, limits", host.host),
        Check("gpus", "GPUs", gpus.gpus),
        Check("drive", "the NVMe folder", partial(nvme.folder, path)),
        Check("slurm", "SLURM", partial(cluster.slurm, os.environ)),
        Check("launcher", "launcher variables", partial(cluster.launcher, os.environ)),
        Check(
            "collectives",
            f"an all-reduce of two ranks; up to {timeout_s:g} s",
            partial(collective.collectives, timeout_s),
        ),
    ]


def examine(
    chosen: Sequence[Check], found: Callable[[str, Finding], None], progress: Callable[[str], None]
) -> list[tuple[str, Finding]]:
    """Run checks one after the other and return their findings. A check that raises is a problem; the others still run.

    ``found`` is called with each topic and finding at once, and ``progress`` with a description of what begins.
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
        except Exception as error:  # any error: run the other checks
            cure = f"This is a bug in the check: report it, and skip it with --skip {check.topic}."
            value = f"the check failed: {type(error).__name__}: {one_line(str(error))}"
            report(check.topic, Finding(check.topic, value, "problem", cure))
    return findings


def choose(all_checks: Sequence[Check], *, only: Sequence[str], skip: Sequence[str]) -> list[Check]:
    """Return the selected checks.

    Raises:
        ConfigError: A name is unknown, or no check is left.
    """
    unknown = sorted({*only, *skip} - {check.topic for check in all_checks})
    if unknown:
        known = ", ".join(check.topic for check in all_checks)
        raise ConfigError(f"Got the unknown check {', '.join(unknown)}. The checks are {known}.")
    chosen = [check for check in all_checks if (not only or check.topic in only) and check.topic not in skip]
    if not chosen:
        raise ConfigError("--only and --skip leave no check. Select at least one.")
    return chosen
