"""`Run`: a training run, as every target describes it, and the words that start it on a node."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ls_strategy.errors import ConfigError

SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Variable of torchrun: seconds that its ranks have after SIGTERM, before it kills them."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Storage that outlives the machines of a run, and the path where its processes see it."""

    source: str  # on Kubernetes the name of a PersistentVolumeClaim, for SkyPilot the address of a bucket
    path: str

    @classmethod
    def parse(cls, text: str) -> Storage:
        """Read ``SOURCE:/path``.

        Raises:
            ConfigError: it is not of that form.
        """
        source, colon, path = text.rpartition(":")
        if not colon or not source or not path.startswith("/") or path.startswith("//"):
            raise ConfigError(
                f"Got --storage {text!r}. Give SOURCE:/path: the name of a volume claim or the address of a bucket, "
                "and the folder where the processes see it."
            )
        return cls(source=source, path=path)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run. Words and values are passed on as they are; every target quotes them as it must."""

    name: str
    module: str
    """What runs as ``python -m``."""

    arguments: Sequence[str]
    nodes: int = 1
    ranks_per_node: int = 1
    gpus_per_node: int = 0
    cpus_per_rank: int | None = None
    env: Sequence[tuple[str, str]] = ()
    setup: Sequence[str] = ()
    """Lines of bash that run first."""

    seconds_to_save: int = 120
    """Between the signal and the end of the processes."""

    storage: Storage | None = None
    image: str | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"Got --name {self.name!r}. Use letters, digits, dot, dash and underscore: it is also a file name."
            )
        for name, _ in self.env:
            if not _VARIABLE.fullmatch(name):
                raise ConfigError(f"Got --env {name}=..., but a name has letters, digits and underscores only.")

    @property
    def variables(self) -> dict[str, str]:
        """The environment of every process: what a run needs, and over it what the user gave."""
        own = {
            "PYTHONFAULTHANDLER": "1",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": str(self.cpus_per_rank or 1),
            SHUTDOWN: str(self.seconds_to_save),
        }
        return {**own, **dict(self.env)}

    def launch(self, python: str, *options: str) -> list[str]:
        """Return the words that start the ranks of a node: torchrun with ``options``, then the program."""
        return [python, "-m", "torch.distributed.run", *options, "-m", self.module, *self.arguments]


def to_yaml(document: dict[str, Any], comment: str) -> str:
    """Return ``document`` as YAML under a comment. Texts of several lines are written as blocks, where YAML can."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Dumper of this call alone, so that no representer is registered with PyYAML globally."""

    def text(dumper: yaml.SafeDumper, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    lines = "".join(f"# {line}\n" for line in comment.splitlines())
    return lines + yaml.dump(document, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=2**16)
