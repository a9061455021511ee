"""The habits, by subject; their order here is that of the table."""

from __future__ import annotations

from importlib import import_module

from ls_strategy.extras.conformance.habit import Habit

MODULES = [
    f"{__name__}.{subject}"
    for subject in ("training", "gradients", "weights", "trainers", "after_fit", "checkpoints", "failures")
]
"""One for each subject."""


def all_habits() -> dict[str, Habit]:
    """Return every habit by its name."""
    modules = map(import_module, MODULES)
    return {each.name: each for module in modules for each in vars(module).values() if isinstance(each, Habit)}
