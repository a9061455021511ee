"""The program of a job: its module, and the options that fit it to the job, from its files and its command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ls_strategy.errors import ConfigError, StateError
from ls_strategy.extras.cli import arguments

HANDLER = "ls_strategy.PreemptionHandler"
ELASTIC = "ls_strategy.ElasticTraining"
_VERSIONED = ("TensorBoardLogger", "CSVLogger")


def infer_module(config: Path) -> str:
    """Return ``recipes.gpt`` for ``recipes/gpt/configs/x.yaml``.

    Raises:
        ConfigError: no folder above the file is a program.
    """
    for folder in config.parents:
        if (folder / "__main__.py").is_file() and not folder.is_absolute():
            return ".".join(folder.parts)
        if folder.is_absolute() and (folder / "__main__.py").is_file() and folder.is_relative_to(Path.cwd()):
            return ".".join(folder.relative_to(Path.cwd()).parts)
    raise ConfigError(f"Got {config}, but no folder above it has a __main__.py. Set --module package.program.")


def require_module(module: str) -> None:
    """Refuse a program that ``python -m`` would not find here. Neither it nor its packages are imported.

    Raises:
        ConfigError: a part of the name is not there.
    """
    places: Any = None
    here, parts = str(Path.cwd()), module.split(".")
    sys.path.insert(0, here)
    try:
        for number in range(1, len(parts) + 1):
            try:
                spec = _find(".".join(parts[:number]), places)
            except KeyError:  # folders without __init__.py in each other: Python looks the outer one up as imported
                return
            places = None if spec is None else spec.submodule_search_locations
            if spec is None or (places is None and number < len(parts)):
                raise ConfigError(
                    f"Got --module {module}, but {'.'.join(parts[:number])} is neither in {here} nor an installed "
                    "package. Give a program as `python -m` takes it."
                )
    finally:
        sys.path.remove(here)


def _find(name: str, places: Any) -> Any:
    """Return where a module is, of a package in its folders ``places``; None if it is not there."""
    try:
        finders = (finder.find_spec(name, places) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        return next((spec for spec in finders if spec is not None), None)
    except (ImportError, ValueError):  # no name of a module
        return None


class Program:
    """Runs cases until the time is over, with a record that is valid whenever this process is killed."""

    def __init__(self, args: argparse.Namespace) -> None:
        configs, extra = arguments.yaml_files(args.config), args.extra
        self.configs, self.module = configs, args.module or infer_module(configs[0])
        self.name: str = args.name or f"{self.module.rsplit('.', 1)[-1]}-{configs[-1].stem}"
        self.trainer = trainer_options(configs)
        self.tasks: int = args.tasks_per_node or args.gpus_per_node or 1
        follow = accelerator_option(self.trainer, extra, args.gpus_per_node)
        check_geometry(self.trainer, extra, nodes=args.nodes, tasks=self.tasks)
        check_elastic(args.elastic, configs, extra, nodes=args.nodes, tasks=self.tasks)
        added = [HANDLER, *([ELASTIC] if args.elastic else [])]
        callbacks = [option for each in added for option in handler_option(configs, extra, each)]
        # After ``python -m module``.
        self.words: list[str] = ["fit", *(f"--config={c}" for c in configs), *callbacks, *extra, *follow]
        self.version = version_option(self.trainer, extra)
        self.env = [variable(text) for text in args.env]


def trainer_options(configs: Sequence[Path]) -> dict[str, Any]:
    """Return the ``trainer`` sections of the files; later files override earlier ones.

    Raises:
        ConfigError: a file is not valid YAML, or its section is not a mapping.
    """
    result: dict[str, Any] = {}
    for config in configs:
        result |= arguments.read_section(config, "trainer")
    return result


def handler_option(configs: Sequence[Path], extra: Sequence[str], callback: str) -> list[str]:
    """Return the option that adds a callback, unless it is configured already."""
    return [] if _is_named(callback.rsplit(".", 1)[-1], configs, extra) else [f"--trainer.callbacks+={callback}"]


def _is_named(name: str, configs: Sequence[Path], extra: Sequence[str]) -> bool:
    return any(name in text for text in (*extra, *(c.read_text(encoding="utf-8") for c in configs)))


def check_elastic(least: int | None, configs: Sequence[Path], extra: Sequence[str], *, nodes: int, tasks: int) -> None:
    """Reject a job that may continue on fewer nodes, and would train on other batches there.

    Raises:
        ConfigError: with the option to add.
    """
    if least is not None and least < nodes and not _is_named("virtual_ranks", configs, extra):
        raise ConfigError(
            f"Got --elastic {least} for {nodes} nodes without virtual ranks, but on fewer nodes the run would train on "
            f"other batches. Add `-- --trainer.strategy.init_args.parallel.virtual_ranks={nodes * tasks}`, or set "
            f"--elastic {nodes} to wait for as many nodes."
        )


def given(option: str, trainer: dict[str, Any], extra: Sequence[str]) -> tuple[Any, bool]:
    """Return what the program will use for ``trainer.<option>``, and whether its command line sets it.

    Raises:
        ConfigError: the value on the command line is not YAML.
    """
    import yaml

    value, explicit = trainer.get(option), False
    argv = list(extra)
    for i, word in enumerate(argv):
        name, equals, text = word.partition("=")
        if name != f"--trainer.{option}":
            continue
        text = text if equals else (argv[i + 1] if i + 1 < len(argv) else "")
        try:
            value, explicit = yaml.safe_load(text), True
        except (yaml.YAMLError, RecursionError, ValueError):
            raise ConfigError(f"Got --trainer.{option}={text}, which is not valid YAML. Give one value.") from None
    return value, explicit


def accelerator_option(trainer: dict[str, Any], extra: Sequence[str], gpus_per_node: int) -> list[str]:
    """Return the option that sets the accelerator to the job's.

    Raises:
        ConfigError: the command line asks for the CPU in a job with GPUs, or the files for a GPU in a job without.
    """
    value, explicit = given("accelerator", trainer, extra)
    on_cpu, on_gpu = str(value).lower() == "cpu", str(value).lower() in ("gpu", "cuda")
    if gpus_per_node and on_cpu and explicit:
        raise ConfigError(
            f"Got --gpus-per-node {gpus_per_node} and --trainer.accelerator=cpu, so the GPUs would be idle. Omit one "
            "of the two."
        )
    if not gpus_per_node and on_gpu and not explicit:
        raise ConfigError(
            f"Got trainer.accelerator={value} in the configuration and no --gpus-per-node, so the job would have no "
            "GPUs. Set --gpus-per-node N; or, if jobs get all GPUs of a node, `-- --trainer.accelerator=gpu`."
        )
    return ["--trainer.accelerator=gpu"] if gpus_per_node and not on_gpu else []


def check_geometry(trainer: dict[str, Any], extra: Sequence[str], *, nodes: int, tasks: int) -> None:
    """Reject a number of nodes or devices on the command line that differs from the job's; note one in the files.

    Raises:
        ConfigError: the command line contradicts the job.
    """
    for option, flag, number in (("num_nodes", "--nodes", nodes), ("devices", "--tasks-per-node", tasks)):
        value, explicit = given(option, trainer, extra)
        if value in (None, "auto", -1, number, str(number)):
            continue
        if explicit:
            raise ConfigError(
                f"Got --trainer.{option}={value} and a job with {flag} {number}, but the Trainer uses the job's value. "
                f"Set {flag} {value}, or omit --trainer.{option}."
            )
        print(
            f"note: the configuration has trainer.{option}={value}; the Trainer uses the job's {flag} {number}.",
            file=sys.stderr,
        )


def version_option(trainer: dict[str, Any], extra: Sequence[str]) -> list[str]:
    """Return the option that names the log folder by the job, so that a requeued job continues in it."""
    logger = trainer.get("logger")
    if not isinstance(logger, dict) or any(
        word.startswith("--trainer.logger") and "save_dir" not in word for word in extra
    ):
        return []
    known = str(logger.get("class_path", "")).rsplit(".", 1)[-1] in _VERSIONED
    fixed = "version" in (logger.get("init_args") or {})
    return ['--trainer.logger.init_args.version="job_$job"'] if known and not fixed else []


def log_folder(trainer: dict[str, Any]) -> str:
    """Return the folder of TensorBoard's logs."""
    logger = trainer.get("logger")
    named = (logger.get("init_args") or {}).get("save_dir") if isinstance(logger, dict) else None
    return str(named or f"{trainer.get('default_root_dir', '.')}/lightning_logs")


def variable(text: str) -> tuple[str, str]:
    """Return the name and the value of ``NAME=VALUE``.

    Raises:
        ConfigError: there is no value.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"Got --env {text}, but it must be NAME=VALUE.")
    return name, value


def write_new(path: Path, text: str) -> None:
    """Write the file of a job, which may not exist: a job that is waiting could get another one's command.

    Raises:
        StateError: it exists.
    """
    path.parent.mkdir(exist_ok=True)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise StateError(
            f"{path} exists: another job of this name was made in this second. Repeat the command, or give --name."
        ) from None
