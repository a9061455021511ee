"""Find the folders that are runs: those in which a logger of Lightning has written."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from ls_strategy.errors import ConfigError
from ls_strategy.extras.run_file import RUN_FILE

EVENTS, METRICS = "events.out.tfevents.", "metrics.csv"
_DEEPEST = 5
MOST_RUNS = 32


def is_run(names: Iterable[str]) -> bool:
    """Return whether files of these names make a folder a run."""
    return any(name.startswith(EVENTS) or name in (METRICS, RUN_FILE) for name in names)


def runs_in(given: Iterable[Path]) -> list[Path]:
    """Return the folders of all runs in ``given``, each once, in the order of their names in each of ``given``.

    Raises:
        ConfigError: a path is not a folder, has no run, or there are too many runs.
    """
    found: dict[Path, None] = {}
    for path in given:
        if not path.is_dir():
            what = "a file" if path.exists() else "not there"
            raise ConfigError(
                f"Got {str(path)!r}, but a run is the folder of a logger, and this is {what}. Give a folder such as "
                "lightning_logs/version_0."
            )
        here = _below(path)
        if not here:
            raise ConfigError(
                f"Got {str(path)!r}, but no logger has written there: neither {EVENTS}* nor {METRICS} is in it or in "
                'the folders below it. Give the log_dir of a run with Trainer(logger=TensorBoardLogger("runs")) or '
                "CSVLogger."
            )
        found |= dict.fromkeys(each.resolve() for each in here)
    if len(found) > MOST_RUNS:
        raise ConfigError(
            f"Got folders with {len(found)} runs, but a report compares at most {MOST_RUNS}. Give the folders of the "
            "runs that you want to compare."
        )
    return list(found)


def _below(path: Path) -> list[Path]:
    found: list[Path] = []
    for folder, below, names in os.walk(path):
        here = Path(folder)
        depth = len(here.relative_to(path).parts)
        below[:] = [] if depth >= _DEEPEST else [b for b in below if not b.startswith(".") and b != "checkpoints"]
        if is_run(names):
            found.append(here)
    return sorted(found, key=lambda each: _natural(str(each.relative_to(path))))


def _natural(text: str) -> list[tuple[int, str]]:
    """Return a key that sorts version_2 before version_10."""
    return [(int(part), "") if i % 2 else (-1, part) for i, part in enumerate(re.split(r"([0-9]{1,17})", text))]


def names_of(folders: Iterable[Path]) -> list[str]:
    """Return short names that differ: paths from the folder that all have in common."""
    folders = list(folders)
    if len(folders) == 1:
        return [folders[0].name or str(folders[0])]
    common = Path(os.path.commonpath(folders))
    return [str(folder.relative_to(common)) if folder != common else folder.name for folder in folders]
