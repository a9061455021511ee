"""``ls-strategy plan CONFIG...``: predict what a recipe needs, without a GPU."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import runpy
import sys
import traceback
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ls_strategy.autoload import ALIASES, unknown_name
from ls_strategy.checked import accept, at_least
from ls_strategy.errors import ConfigError, LSError, PlanError
from ls_strategy.extras.cli import arguments, job_program
from ls_strategy.extras.cli.arguments import keep_what_follows_two_dashes
from ls_strategy.extras.cli.status_line import Progress

_NAMED = 4  # combinations without time that are named


def add_search(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--search", action="store_true",
        help="also search tensor, context, expert and pipeline parallelism, with the same global batch, and print "
        "memory against time; needs --tflops and --link",
    )  # fmt: skip
    parser.add_argument(
        "--search-seconds", type=arguments.number(), default=9.0, metavar="S",
        help="begin nothing new in the search after this time (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="with --search: draw memory against time into a file, as front.png"
    )


def check_search(args: argparse.Namespace) -> None:
    """Refuse options that the search needs and does not have.

    Raises:
        ConfigError: with the cure.
    """
    if args.picture is not None and not args.search:
        raise ConfigError("Got --picture without --search, which finds what it shows. Add --search.")
    if args.search and (args.tflops is None or args.link is None):
        raise ConfigError(
            "Got --search without --tflops and --link, but it compares times. Give both, for example --tflops 300 "
            "--link 50; with several nodes also --inter-node 100Gbit."
        )
    if args.picture is not None and not args.picture.parent.is_dir():
        raise ConfigError(f"Got --picture {args.picture}, but {args.picture.parent} is no folder. Create it first.")
    if args.picture is not None:
        from ls_strategy.extras.plots.front import check_picture

        check_picture(args.picture)


def run_search(args: argparse.Namespace, question: Any, hardware: Any) -> Any:
    """Search, and draw the picture if there is one to draw. Returns a `ls_strategy.extras.planner.search.Found`."""
    from ls_strategy.extras.planner.search import search

    found = search(question, hardware, seconds=args.search_seconds)
    if args.picture is not None and found.front:
        from ls_strategy.extras.plots.front import draw_front

        points = [(o.costs.seconds[1], o.peak.device / 1e9) for o in found.front]
        draw_front(points, f"memory against time, {hardware.ranks} ranks", "s per step, at most", "GB", args.picture)
    return found


def found_lines(found: Any, hardware: Any) -> list[str]:
    """Return what the search found, for the terminal."""
    from ls_strategy.extras.planner.search import NO_TIME, explanation, front_table

    lines = [front_table(found)] if found.options else []
    lines += explanation(found, hardware)
    late = [what for what, why in found.skipped.items() if why == NO_TIME]
    if late:
        more = "" if len(late) <= _NAMED else f" and {len(late) - _NAMED} more"
        lines.append(f"not tried, no time was left (--search-seconds): {'; '.join(late[:_NAMED])}{more}")
    lines += [f"without {what}: {why}" for what, why in found.skipped.items() if why != NO_TIME]
    return lines


def found_json(found: Any) -> dict[str, Any]:
    """Return what the search found, for JSON."""
    return {
        "global_batch": found.global_batch,
        "seconds": found.seconds,
        "front": [option.to_dict() for option in found.front],
        "traced": found.traced,
        "skipped": found.skipped,
    }


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``plan`` subcommand."""
    parser = subcommands.add_parser(
        "plan",
        help="predict memory, traffic and time of every strategy for a recipe, without a GPU",
        usage="ls-strategy plan CONFIG [CONFIG ...] [options] [-- options of the program]",
        description="Predict what a LightningCLI program needs per rank with every strategy, and recommend the "
        "first strategy that fits. One training step runs on tensors without memory: the model's weights are never "
        "allocated, and only the shapes of the first batch are used. Activations are counted as the CPU's operations "
        "save them, with fused attention. In the first table every rank holds the full model, whatever kinds of "
        "parallelism the recipe uses; --search covers these.",
    )
    parser.add_argument("config", nargs="*", help="YAML files of the program; later files override earlier ones")
    parser.add_argument("--config", action="append", dest="more", default=[], metavar="FILE", help="one more YAML file")
    parser.add_argument(
        "--module", help="program to run as python -m MODULE (default: recipes.gpt for recipes/gpt/configs/x.yaml)"
    )
    parser.add_argument(
        "--gpus", type=arguments.integer(0), default=0, metavar="N", help="ranks (default: the recipe's, on the CPU)"
    )
    parser.add_argument(
        "--gpus-per-node",
        "--node-size",
        type=arguments.integer(most=1024),
        default=8,
        metavar="N",
        help="default: %(default)s",
    )
    parser.add_argument("--gpu-memory", type=arguments.size, metavar="SIZE", help="memory of each GPU: 80GB, 141GB")
    parser.add_argument("--host-memory", type=arguments.size, metavar="SIZE", help="host memory of each node: 1TB")
    parser.add_argument("--nvme", type=arguments.size, metavar="SIZE", help="free NVMe space of each node: 4TB")
    parser.add_argument("--tflops", type=arguments.number(), help="peak TFLOP/s of a GPU, to predict the step time")
    parser.add_argument("--link", type=arguments.number(), metavar="GB/S", help="bandwidth of a rank to the others")
    parser.add_argument(
        "--inter-node", type=arguments.rate, metavar="RATE",
        help="bandwidth of a node to the others, as 100Gbit or 25GB/s; also plans for groups of ranks by node",
    )  # fmt: skip
    parser.add_argument("--bus", type=arguments.number(), metavar="GB/S", help="bandwidth between a GPU and its host")
    parser.add_argument("--drive", type=arguments.number(), metavar="GB/S", help="NVMe bandwidth per rank")
    parser.add_argument("--scaling", action="store_true", help="also print states and traffic on 8 to 4,096 ranks")
    parser.add_argument(
        "--longest", action="store_true",
        help="also print the longest samples and the largest micro-batch that fit with every strategy, and the bytes "
        "of one more token; needs --gpu-memory, on the CPU --host-memory",
    )  # fmt: skip
    add_search(parser)
    parser.add_argument(
        "--forget", action="store_true",
        help="remove the steps that runs with zero_auto have measured on this machine, which correct predicted times",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, extra=[])
    keep_what_follows_two_dashes(parser)


def run(args: argparse.Namespace) -> int:
    """Predict and print. Returns 1 if nothing fits."""
    if args.forget:
        from ls_strategy.extras.planner.learned import forget, path

        print(f"removed {forget()} measured run(s): {path()}")
        return 0
    configs, module = _check(args)
    print("... importing torch and Lightning", file=sys.stderr, flush=True)
    from ls_strategy.extras.planner.choice import lesson_here, timed_by
    from ls_strategy.extras.planner.forecast import fastest, lightest, scale
    from ls_strategy.extras.planner.reach import Reached

    cli = build(module, configs, args.extra)
    trainer = trainer_options(cli)
    hardware = hardware_of(args, trainer)
    if args.longest and hardware.device_room is None:
        raise ConfigError(_NO_LIMIT)  # any length would fit
    with explaining_the_program(module):
        question = question_of(cli, trainer)
    progress = Progress()
    progress.phase("... tracing a step of the model on tensors without memory")
    with question.forecaster() as forecaster:
        forecasts = forecaster.all(hardware, progress.count)
        rows = scale(forecaster, hardware) if args.scaling else []
        progress.phase("... searching for the longest samples of every strategy" if args.longest else "")
        reach = Reached(forecaster, hardware) if args.longest else None
    lesson = None
    if args.tflops is None:
        lesson = lesson_here(question.module, forecasts, hardware, question.precision.name)
    if lesson is not None:
        forecasts = timed_by(forecasts, lesson.speeds)
    progress.phase(f"... searching every kind of parallelism, {args.search_seconds:g} s" if args.search else "")
    result = Result(
        module=module,
        question=question,
        hardware=hardware,
        numel=sum(p.numel() for p in question.module.parameters()),
        forecasts=forecasts,
        chosen=lightest(forecasts),
        quickest=fastest(forecasts) if args.inter_node is not None or lesson is not None else None,
        lesson=lesson,
        bubbles=pipeline_bubbles(strategy_options(trainer)),
        rows=rows,
        reach=reach,
        found=run_search(args, question, hardware) if args.search else None,
    )
    progress.phase("")
    if args.json:
        arguments.print_json(args, result.to_json())
    else:
        print(result.to_text())
    return 0 if result.fits else 1


def _check(args: argparse.Namespace) -> tuple[list[Path], str]:
    """Return the files and the program, after everything that can be wrong without running it.

    Raises:
        ConfigError: something is.
    """
    configs = arguments.yaml_files((*args.config, *args.more))
    if not configs:
        raise ConfigError("Got no YAML file. Give those of the program: ls-strategy plan CONFIG [CONFIG ...]")
    check_search(args)
    if args.longest and args.gpu_memory is None and args.host_memory is None:
        raise ConfigError(_NO_LIMIT)
    trainer = job_program.trainer_options(configs)
    name, _ = job_program.given("strategy", trainer, args.extra)
    if isinstance(name, str) and name.lower().startswith(("zero", "ddp_zero")) and name.lower() not in ALIASES:
        raise unknown_name(name, difflib.get_close_matches(name.lower(), ALIASES, n=1))
    module = args.module or job_program.infer_module(configs[0])
    job_program.require_module(module)
    return configs, module


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was found, for the terminal and as JSON."""

    module: str
    question: Any
    hardware: Any
    numel: int
    forecasts: list[Any]
    chosen: Any
    quickest: Any
    lesson: Any
    bubbles: dict[str, float]
    rows: list[Any]
    reach: Any
    found: Any

    @property
    def fits(self) -> bool:
        """Whether any strategy fits, or any combination of the search."""
        return self.chosen is not None or bool(self.found is not None and self.found.options)

    def to_json(self) -> dict[str, Any]:
        """Return it in JSON types, as ``plan.schema.json`` describes it."""
        from ls_strategy.extras.planner.forecast import assumptions, reason

        return {
            "parameters": self.numel,
            "ranks": self.hardware.ranks,
            "batch": _shapes(self.question.batch),
            "strategies": [f.to_dict() for f in self.forecasts],
            "first_that_fits": None if self.chosen is None else self.chosen.candidate.name,
            "reason": reason(self.forecasts),
            "assumptions": assumptions(self.forecasts),
            "fastest": None if self.quickest is None else self.quickest.candidate.name,
            "earlier_runs": 0 if self.lesson is None else self.lesson.runs,
            "pipeline_bubbles": self.bubbles,
            "scaling": [vars(row) for row in self.rows],
            "longest": None if self.reach is None else self.reach.to_json(),
            "search": None if self.found is None else found_json(self.found),
        }

    def to_text(self) -> str:
        """Return the tables and what they mean."""
        from ls_strategy.extras.planner.forecast import assumptions, reason, scaling_table, table

        precision, batch = self.question.precision.name, _shapes(self.question.batch)
        lines = [f"{self.module}: {self.numel:,} parameters in {precision}, batch of one rank: {batch}"]
        lines += [table(self.forecasts, self.hardware), reason(self.forecasts), *assumptions(self.forecasts)]
        if self.quickest is not None and self.quickest.seconds is not None:
            at_most = f"{self.quickest.seconds[1]:.3g} s per step."
            lines.append(f"{self.quickest.candidate.name}: the fastest that fits, at most {at_most}")
        if self.lesson is not None:
            lines += self.lesson.lines()
        if self.bubbles:
            shares = ", ".join(f"{name} {bubble:.1%}" for name, bubble in self.bubbles.items())
            lines.append(f"pipeline bubble: {shares}")
        if self.rows:
            lines.append(scaling_table(self.rows))
        if self.reach is not None:
            lines += self.reach.lines()
        if self.found is not None:
            lines += found_lines(self.found, self.hardware)
        return "\n".join(lines)


_NO_LIMIT = (
    "Got --longest without a limit of memory. Give --gpu-memory, for example 80GB; for a run on the CPU --host-memory."
)


def hardware_of(args: argparse.Namespace, trainer: dict[str, Any]) -> Any:
    """Return the hardware from the arguments; for a run on the CPU, ranks are the recipe's.

    Raises:
        ConfigError: a size is invalid.
    """
    from ls_strategy.extras.planner.hardware import Hardware
    from ls_strategy.extras.planner.sizes import parse_bytes

    def size(text: str | None) -> int | None:
        return None if text is None else parse_bytes(text)

    device = "cuda" if args.gpus or trainer.get("accelerator") in ("gpu", "cuda") else "cpu"
    per_node = devices_named(trainer.get("devices")) or (args.gpus_per_node if device == "cuda" else 1)
    nodes = trainer.get("num_nodes", 1)
    return Hardware(
        ranks=args.gpus or per_node * (nodes if isinstance(nodes, int) else 1),
        ranks_per_node=args.gpus_per_node if args.gpus else per_node,
        device=device,
        device_memory=size(args.gpu_memory),
        host_memory=size(args.host_memory),
        drive=0 if args.nvme is None else size(args.nvme),
        tflops=args.tflops,
        link_gbs=args.link,
        node_gbs=args.inter_node,
        bus_gbs=args.bus,
        drive_gbs=args.drive,
    )


def devices_named(devices: Any) -> int:
    """Return how many devices a Trainer's ``devices`` names; 0 if it leaves the number open (``auto``, ``-1``)."""
    if isinstance(devices, (list, tuple)):
        return len(devices)
    if isinstance(devices, str) and "," in devices:
        return len([name for name in devices.split(",") if name.strip()])
    try:
        return max(int(devices), 0)
    except (TypeError, ValueError):
        return 0


_MOST_CELLS = 200_000  # maximum ranks times micro-batches of a pipeline that is simulated


class _Built(BaseException):
    """Carries the LightningCLI out of the program, past its exception handlers."""

    def __init__(self, cli: Any) -> None:
        super().__init__()
        self.cli = cli


def build(module: str, configs: Sequence[Path], extra: Sequence[str] = ()) -> Any:
    """Return a program's LightningCLI, with model and data, and a CPU Trainer that does not train.

    The program runs as ``python -m module fit --config ...`` up to where training would start.

    Args:
        module: the program.
        configs: its YAML files.
        extra: more options for the program, which override the files.

    Raises:
        ConfigError: it is not a LightningCLI program, or rejects the files or options.
    """
    from ls_strategy.extras._lightning import intercept_cli

    def stop(cli: Any) -> None:
        raise _Built(cli)

    command, argv, here = [module, "fit", *(f"--config={c}" for c in configs), *extra], sys.argv, str(Path.cwd())
    sys.path.insert(0, here)
    try:
        sys.argv = command
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
            stack.enter_context(explaining_the_program(module))
            stack.enter_context(weightless())
            stack.enter_context(intercept_cli(stop, _bare_trainer))
            print(f"... running {module} up to its first step", flush=True)  # a line of its own: the program prints
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except _Built as built:
        return built.cli
    except SystemExit as error:
        raise ConfigError(
            f"`python -m {' '.join(command)}` ended with status {error.code}; its output is above. Correct what it "
            "names in the files, or in the options after --."
        ) from None
    finally:
        sys.path.remove(here)
        sys.argv = argv
    raise ConfigError(f"`python -m {module} fit` made no LightningCLI. Give a program that does: --module.")


@contextlib.contextmanager
def explaining_the_program(module: str) -> Generator[None, None, None]:
    """Turn an error in the program into one that names the program, the line and what to try.

    Raises:
        ConfigError: for all errors except this package's own.
    """
    try:
        yield
    except LSError:
        raise
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{module} ended with {type(error).__name__} before its first step: {str(error).rstrip('.')}. Raised at "
            f"{at.filename}:{at.lineno}. A plan needs the program's model and one batch of its data. Give options of "
            "the program after --, for example data of this machine: ls-strategy plan CONFIG -- --data.OPTION=VALUE"
        ) from error


def trainer_options(cli: Any) -> dict[str, Any]:
    """Return the program's Trainer options from files, command line, environment and defaults."""
    config = cli.config if cli.subcommand is None else cli.config[cli.subcommand]
    section = config.get("trainer")
    return section.as_dict() if hasattr(section, "as_dict") else dict(section or {})


def _bare_trainer(options: Any) -> Any:
    """Return a Trainer with what a module may read: steps, epochs, accumulation, precision."""
    from ls_strategy.host.pytorch import pl

    kept = ("max_steps", "max_epochs", "accumulate_grad_batches", "limit_train_batches", "val_check_interval")
    given = {name: options[name] for name in kept if options.get(name) is not None}
    return pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, check_val_every_n_epoch=options.get("check_val_every_n_epoch", 1), **given,
    )  # fmt: skip


@contextlib.contextmanager
def weightless() -> Generator[None, None, None]:
    """Move each parameter of a new module to the meta device when it is registered, until the exit."""
    from torch import nn

    plain = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        plain(module, name, param)
        if param is not None and not param.is_meta:
            module._parameters[name] = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]


def question_of(cli: Any, trainer_section: dict[str, Any]) -> Any:
    """Return module, optimizers and first batch of a program.

    Raises:
        PlanError: there is no training data.
    """
    import torch

    from ls_strategy.extras._lightning import give_data
    from ls_strategy.extras.planner.choice import Question
    from ls_strategy.extras.planner.forecast import Run
    from ls_strategy.extras.planner.step import first_batch
    from ls_strategy.precision import resolve_precision

    module, data, trainer = cli.model, cli.datamodule, cli.trainer
    source = data if data is not None else module
    trainer.strategy.connect(module)
    module.trainer = trainer
    trainer.datamodule = data
    give_data(trainer, source)
    with contextlib.redirect_stdout(sys.stderr):
        if data is not None:
            data.trainer = trainer
            data.prepare_data()
            data.setup("fit")
        module.setup("fit")
        with weightless(), torch.device("meta"):
            module.configure_model()
        batch = first_batch(source.train_dataloader())
        optimizers = list(optimizers_in(module.configure_optimizers()))
    options = strategy_options(trainer_section)
    precision = resolve_precision(_precision_name(trainer_section.get("precision")))
    run_ = Run(
        config=base_config(options),
        micro_batches=accept(
            "accumulate_grad_batches", trainer_section.get("accumulate_grad_batches") or 1, int, at_least(1, 1 << 20)
        ),
        clips=bool(trainer_section.get("gradient_clip_val")),
    )
    return Question(module, optimizers, precision, batch, run_)


def _precision_name(given: Any) -> str:
    names = {"bf16": "bf16-mixed", "16": "16-mixed", "32": "32-true", "None": "32-true"}
    return names.get(str(given), str(given))


def strategy_options(trainer: dict[str, Any]) -> dict[str, Any]:
    """Return ``init_args`` of the recipe's strategy."""
    strategy = trainer.get("strategy")
    options = strategy.get("init_args") if isinstance(strategy, dict) else None
    return accept("strategy.init_args", options or {}, dict[str, Any])


def base_config(options: dict[str, Any]) -> Any:
    """Return the options that every candidate keeps."""
    from ls_strategy.config import ZeROConfig

    given = {name: options[name] for name in ("sharding", "precision") if options.get(name) is not None}
    # A stage at which all of them may be given; candidates leave out what theirs does not know.
    config = ZeROConfig.of(3, **given)
    return replace(config, sharding=replace(config.sharding, rank_weights=None))


def optimizers_in(configured: Any) -> Iterator[Any]:
    """Yield the optimizers in what ``configure_optimizers`` returned."""
    from torch.optim import Optimizer

    if isinstance(configured, Optimizer):
        yield configured
    elif isinstance(configured, dict):
        yield from optimizers_in(configured.get("optimizer"))
    elif isinstance(configured, (list, tuple)):
        for each in configured:
            yield from optimizers_in(each)


def pipeline_bubbles(options: dict[str, Any]) -> dict[str, float]:
    """Return the bubble of the recipe's pipeline by schedule, as a fraction of the time; empty without a pipeline."""
    from ls_strategy.config import ZeROConfig
    from ls_strategy.parallel.pipeline.schedules import SCHEDULES, make_table
    from ls_strategy.parallel.pipeline.simulate import simulate

    given = {"parallel": options["parallel"]} if options.get("parallel") is not None else {}
    pipeline = ZeROConfig.of(3, **given).parallel.pp
    ranks = pipeline.size
    if ranks == 1:
        return {}
    micro_batches = pipeline.micro_batches or 4 * ranks
    if ranks * micro_batches > _MOST_CELLS:
        return {}  # simulating would take minutes
    result: dict[str, float] = {}
    for schedule in SCHEDULES:
        try:
            result[schedule] = simulate(make_table(schedule, ranks, micro_batches)).bubble
        except PlanError:
            continue  # too few micro-batches for this one
    return result


def _shapes(batch: Any) -> str:
    from torch import Tensor

    from ls_strategy._torch import tree_iter

    tensors = [leaf for leaf in tree_iter(batch) if isinstance(leaf, Tensor)]
    return ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors) or "no tensors"
