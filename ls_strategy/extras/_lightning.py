"""Private names of Lightning that only side products need; all others are in `ls_strategy.lightning._private`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from torch import Tensor, nn

from ls_strategy import host
from ls_strategy.lightning._private import Once, metric_snapshot, reported_metrics, set_reported_metrics


def before_iterators(trainer: Any, call: Callable[[], None]) -> None:
    """Make the fit loop call ``call()`` when it has its training data, before it makes the first iterator over them.

    An iterator that user code has caused earlier is replaced: see `around_data_setup`.
    """
    Once(trainer.fit_loop, "_load_combined_loader_states", call)


def around_fetches(trainer: Any, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
    """Make the fit loop call ``before()`` and ``after()`` around every fetch of a batch, from the next epoch on.

    Returns:
        a function that undoes this.
    """
    loop = trainer.fit_loop.epoch_loop
    begin, end = loop._on_before_fetch, loop._on_after_fetch

    def on_before_fetch() -> None:
        before()
        begin()

    def on_after_fetch() -> None:
        end()
        after()

    loop._on_before_fetch, loop._on_after_fetch = on_before_fetch, on_after_fetch

    def undo() -> None:
        loop.__dict__.pop("_on_before_fetch", None)
        loop.__dict__.pop("_on_after_fetch", None)

    return undo


def training_data(trainer: Any) -> Any:
    """Return a new result of ``train_dataloader`` for the fit that is about to begin."""
    return trainer.fit_loop._data_source.dataloader()


def trains_on_given_data(trainer: Any) -> bool:
    """Return whether the loaders were given to ``trainer.fit``, so that `training_data` returns the same objects."""
    return not trainer.fit_loop._data_source.is_module()


def take_signals_over(trainer: Any, restore: Callable[[], None]) -> None:
    """Prevent Lightning from registering its signal handlers, and call ``restore`` when it would restore the old ones.

    Its SIGTERM handler broadcasts from inside the handler, its SLURM handler saves from inside it, and
    ``_broadcast_sigterm_tensor`` broadcasts on the device and waits for it before every batch.
    """
    connector: Any = trainer._signal_connector
    connector.register_signal_handlers = _do_nothing
    connector.teardown = restore
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    epoch_loop._broadcast_sigterm_tensor = _do_nothing


def give_signals_back(trainer: Any) -> None:
    """Undo `take_signals_over`. A second call does nothing."""
    for owner, names in (
        (trainer._signal_connector, ("register_signal_handlers", "teardown")),
        (trainer.fit_loop.epoch_loop, ("_broadcast_sigterm_tensor",)),
    ):
        for name in names:
            vars(owner).pop(name, None)


def _do_nothing() -> None:
    """Replace a method of Lightning that must not run."""


class Unnamed(str):
    """The path of a file that nobody has named: no code in it may run, whatever the user allows for other files."""

    __slots__ = ()


def choose_checkpoint(trainer: Any, choose: Callable[[Any], Any]) -> None:
    """Make the next restore use ``choose(ckpt_path)``, which gets what the user gave, or None.

    Of several choices the last one comes first, and gives its result to the one before it. What is `Unnamed` is loaded
    with ``weights_only=True``.
    """
    connector: Any = trainer._checkpoint_connector
    before = vars(connector).get("resume_start")

    def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        if before is None:
            vars(connector).pop("resume_start", None)
        else:
            connector.resume_start = before
        chosen = choose(checkpoint_path)
        if isinstance(chosen, Unnamed):
            chosen, weights_only = str(chosen), True
        connector.resume_start(chosen, weights_only=weights_only)

    connector.resume_start = resume_start


def name_logs(trainer: Any, name: str) -> None:
    """Give TensorBoard's loggers without a version of their own the folder ``name``, so that restarts continue in it.

    Loggers of CSV files would empty the folder. Call it before they write.
    """
    loggers = host.import_part("pytorch.loggers")
    for logger in trainer.loggers:
        if isinstance(logger, loggers.TensorBoardLogger) and logger._version is None:
            logger._version = name


def before_batches(trainer: Any, action: Callable[[], None]) -> Callable[[], None]:
    """Make the fit loop call ``action()`` before it fetches a batch: validation and schedulers are done with the last.

    Returns:
        a function that undoes this.
    """
    advance = _advance_of(trainer)
    advance.actions.append(action)

    def undo() -> None:
        advance.actions.remove(action)
        advance.end_if_unused()

    return undo


def around_batches(
    trainer: Any,
    run: Callable[[Callable[[], None]], None],
    fetch: Callable[[Any], Any],
    ended: Callable[[], bool | None],
) -> Callable[[], None]:
    """Make the fit loop get its batches from a caller that may run some of them again.

    Args:
        trainer: of the fit.
        run: called for every batch with a function that runs one. It may call that again, if an exception ended it.
        fetch: gets Lightning's fetcher, and returns what ``next`` of it would.
        ended: called after it; returns whether the batch is the last one, or None to ask the fetcher.

    Returns:
        a function that undoes this.
    """
    advance = _advance_of(trainer)
    advance.run, advance.fetch, advance.ended = run, fetch, ended

    def undo() -> None:
        advance.run = advance.fetch = advance.ended = None
        advance.end_if_unused()

    return undo


class _Advance:
    """The ``advance`` of a fit loop, which runs one batch, with what callbacks do around it."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._loop = trainer, trainer.fit_loop.epoch_loop
        self.actions: list[Callable[[], None]] = []
        self.run: Callable[[Callable[[], None]], None] | None = None
        self.fetch: Callable[[Any], Any] | None = None
        self.ended: Callable[[], bool | None] | None = None

    def __call__(self, data_fetcher: Any) -> None:
        given = data_fetcher if self.fetch is None else _Fetches(data_fetcher, self)

        def once() -> None:
            for each in list(self.actions):
                each()
            module, connector = self._trainer.lightning_module, self._trainer._logger_connector
            before = module._current_fx_name, connector._current_fx
            try:
                type(self._loop).advance(self._loop, given)
            except Exception:
                module._current_fx_name, connector._current_fx = before
                raise

        if self.run is None:
            once()
        else:
            self.run(once)

    def end_if_unused(self) -> None:
        if not self.actions and self.run is None:
            vars(self._loop).pop("advance", None)


class _Fetches:
    """What the fit loop sees of a fetcher whose batches `around_batches` hands on."""

    def __init__(self, inner: Any, advance: _Advance) -> None:
        self._inner, self._advance = inner, advance

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __next__(self) -> Any:
        assert self._advance.fetch is not None
        return self._advance.fetch(self._inner)

    @property
    def done(self) -> bool:
        ended = None if self._advance.ended is None else self._advance.ended()
        return self._inner.done if ended is None else ended


def _advance_of(trainer: Any) -> _Advance:
    loop = trainer.fit_loop.epoch_loop
    if not isinstance(vars(loop).get("advance"), _Advance):
        loop.advance = _Advance(trainer)
    return loop.advance


def around_left_out_steps(
    trainer: Any, left_out: Callable[[], bool], batches: Callable[[], int], done: Callable[[bool], None]
) -> Callable[[], None]:
    """Make the fit loop count no step that was left out, and step no schedulers for it.

    Args:
        trainer: with automatic optimization.
        left_out: returns whether the optimizer's step on the current batch was left out.
        batches: returns how many batches of this epoch were, for schedulers that step after several.
        done: called twice after such a step: with False before ``on_train_batch_end``, and with True when the loop has
            nothing more to do with the batch.

    Returns:
        a function that undoes this.
    """
    loop = trainer.fit_loop.epoch_loop

    def update_lr_schedulers(interval: str, update_plateau_schedulers: bool) -> None:
        if interval != "step" or not left_out():
            type(loop).update_lr_schedulers(loop, interval, update_plateau_schedulers)
            return
        if update_plateau_schedulers:
            uncount_for_loggers(trainer)  # the loop is about to count it
        else:
            steps = loop.automatic_optimization.optim_progress.optimizer.step
            for count in (steps.total, steps.current):
                count.ready -= 1
                count.completed -= 1
        done(update_plateau_schedulers)

    def update_learning_rates(interval: str, update_plateau_schedulers: bool) -> None:
        progress, without = loop.batch_progress.current, batches() if interval == "step" else 0
        progress.ready -= without
        try:
            type(loop)._update_learning_rates(loop, interval, update_plateau_schedulers)
        finally:
            progress.ready += without

    loop.update_lr_schedulers, loop._update_learning_rates = update_lr_schedulers, update_learning_rates

    def undo() -> None:
        for name in ("update_lr_schedulers", "_update_learning_rates"):
            vars(loop).pop(name, None)

    return undo


def uncount_for_loggers(trainer: Any) -> None:
    """Count one step less in what ``self.log`` gives to loggers as the step."""
    trainer.fit_loop.epoch_loop._batches_that_stepped -= 1


def loop_progress(trainer: Any, *, batches: bool) -> Callable[[], None]:
    """Return a function that gives the fit loop the counts of steps that it has now, between two batches.

    Collective, if values are logged with ``sync_dist`` and ``batches`` are wanted.

    Args:
        trainer: of the fit.
        batches: put back the counts of batches, too, and what was logged in the epoch so far.
    """
    loop = trainer.fit_loop.epoch_loop
    parts = [loop.automatic_optimization.optim_progress, loop.scheduler_progress]
    parts += [loop.batch_progress, loop.val_loop.batch_progress] if batches else []
    kept, stepped = [(part, copy.deepcopy(part.state_dict())) for part in parts], loop._batches_that_stepped
    logged = _logged(trainer) if batches else None

    def put_back() -> None:
        for part, state in kept:
            part.load_state_dict(copy.deepcopy(state))
        loop._batches_that_stepped = stepped
        if logged is not None:
            logged()

    return put_back


def _logged(trainer: Any) -> Callable[[], None]:
    """Return a function that puts back what was logged in the epoch so far, and whether the fit is to stop."""
    found, stops, reported = trainer.fit_loop.epoch_loop._results, trainer.should_stop, reported_metrics(trainer)
    results = dict(found)
    metrics = metric_snapshot(nn.ModuleList([*results.values(), trainer.lightning_module]))
    resets = [(metric, metric.has_reset) for metric in results.values()]

    def put_back() -> None:
        trainer.should_stop = stops
        found.clear()
        found.update(results)
        metrics()
        for metric, reset in resets:
            metric.has_reset = reset
        set_reported_metrics(trainer, reported)

    return put_back


def callbacks_of_steps(trainer: Any) -> list[Any]:
    """Return the callbacks, without those that save checkpoints and those that measure time."""
    part = host.import_part("pytorch.callbacks")
    return [each for each in trainer.callbacks if not isinstance(each, (part.Checkpoint, part.Timer))]


def averages(callback: Any) -> list[Tensor]:
    """Return the weights that one of Lightning's callbacks for averages has averaged, if it is one."""
    part = host.import_part("pytorch.callbacks")
    model = callback._average_model if isinstance(callback, part.WeightAveraging) else None
    return [] if model is None else [*model.parameters(), *model.buffers()]


def saved_paths(trainer: Any) -> set[tuple[str, int]]:
    """Return the checkpoints that the Trainer's callbacks know.

    Each comes with the step of the last save if it is of that one: ``last.ckpt`` is written again and again. Others
    come with 0.
    """
    part = host.import_part("pytorch.callbacks")
    found: set[tuple[str, int]] = set()
    for each in trainer.checkpoint_callbacks:
        if isinstance(each, part.ModelCheckpoint):
            best = each.best_model_path
            newest = {each.last_model_path, each._last_checkpoint_saved, best if each.monitor is None else ""}
            found |= {(path, each._last_global_step_saved) for path in newest}
            found |= {(path, 0) for path in {*each.best_k_models, best} - newest}
    return {(path, step) for path, step in found if path}


def forget_saves(trainer: Any, step: int) -> None:
    """Let the Trainer's callbacks save again after ``step``, from which the run goes on."""
    for each in trainer.checkpoint_callbacks:
        if hasattr(each, "_last_global_step_saved"):
            each._last_global_step_saved = min(each._last_global_step_saved, step)


@contextmanager
def silenced(trainer: Any, module: Any) -> Generator[None, None, None]:
    """Make ``self.log`` do nothing inside, where ``training_step`` runs again."""
    results, connector = trainer._results, trainer._logger_connector
    before = module._current_fx_name, connector._current_fx
    module._current_fx_name = connector._current_fx = "training_step"  # with another name values would be reset
    if results is not None:
        results.log = results.reset = lambda *_, **__: None
    try:
        yield
    finally:
        if results is not None:
            vars(results).pop("log", None)
            vars(results).pop("reset", None)
        module._current_fx_name, connector._current_fx = before


def call_hook(trainer: Any, name: str) -> None:
    """Call a hook of the training step of all callbacks and of the module."""
    call = host.import_part("pytorch.trainer.call")
    call._call_callback_hooks(trainer, name)
    call._call_lightning_module_hook(trainer, name)


def accumulates(trainer: Any) -> bool:
    """Return whether gradients of earlier batches wait for the next one."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready % trainer.accumulate_grad_batches != 0


def overwrite_saved_config(trainer: Any) -> None:
    """Let LightningCLI overwrite ``config.yaml`` in the log folder of a resumed run. Call it before its ``setup``."""
    cli = host.loaded_part("pytorch.cli")
    for callback in trainer.callbacks if cli is not None else ():  # type: ignore[attr-defined]
        if isinstance(callback, cli.SaveConfigCallback):  # type: ignore[union-attr]
            callback.overwrite = True


def checkpoint_folder(callback: Any, trainer: Any) -> str:
    """Return where ``callback`` will save; works before its ``setup``, too."""
    resolve: Any = callback._ModelCheckpoint__resolve_ckpt_dir  # type: ignore[attr-defined]
    return str(resolve(trainer))


def give_data(trainer: Any, source: Any) -> None:
    """Make a Trainer that does not run take its training data from ``source``, to count the steps of a fit."""
    trainer.fit_loop._data_source.instance = source
    trainer.fit_loop.max_epochs = trainer.fit_loop.max_epochs or (-1 if trainer.max_steps > 0 else 1000)


@contextmanager
def intercept_cli(stop: Callable[[Any], None], make_trainer: Callable[[Any], Any]) -> Generator[None, None, None]:
    """Make a LightningCLI create its Trainer by ``make_trainer`` and call ``stop`` instead of training.

    Its parser's errors come without the usage of all options.

    Args:
        stop: gets the LightningCLI.
        make_trainer: gets the options of the Trainer.
    """
    with ExitStack() as stack:
        for package in host.installed():  # the program decides which one it uses
            stack.enter_context(_intercept(host.import_from(package, "pytorch.cli"), stop, make_trainer))
        yield


@contextmanager
def _intercept(
    module: Any, stop: Callable[[Any], None], make_trainer: Callable[[Any], Any]
) -> Generator[None, None, None]:
    cli, parser = module.LightningCLI, module.LightningArgumentParser
    run, instantiate = cli._run_subcommand, cli.instantiate_trainer
    usage = vars(parser).get("print_usage")
    parser.print_usage = lambda *_: None  # hundreds of lines before the error
    cli._run_subcommand = lambda self, _name: stop(self)
    cli.instantiate_trainer = lambda self, **_: make_trainer(self._get(self.config_init, "trainer", default={}))
    try:
        yield
    finally:
        cli._run_subcommand, cli.instantiate_trainer = run, instantiate
        if usage is None:
            del parser.print_usage
        else:
            parser.print_usage = usage


def made_by_parser() -> bool:
    """Return whether jsonargparse, alone or in a LightningCLI, creates the object whose ``__init__`` is running."""
    return any(str(frame.f_globals.get("__name__")).startswith("jsonargparse.") for frame in _callers())


def _callers() -> Generator[FrameType, None, None]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def parse_again(kind: type, defaults: Mapping[type, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the strategy's arguments as a LightningCLI parses them with other defaults.

    Call it while that LightningCLI creates the strategy. None without one, or if its Trainer has another strategy.

    Args:
        kind: the class of the strategy.
        defaults: by class (``kind`` or the class of an argument): defaults of its constructor.
    """
    module = host.loaded_part("pytorch.cli")
    made = [f for f in _callers() if module and isinstance(f.f_locals.get("self"), module.LightningCLI)]
    outer = next((frame for frame in made if frame.f_code is module.LightningCLI.__init__.__code__), None)  # type: ignore[union-attr]
    if outer is None:
        return None
    cli, given = copy.copy(outer.f_locals["self"]), outer.f_locals
    cli.parser_class = type("Again", (cli.parser_class,), {})  # a new class: jsonargparse caches parsers by class
    with ExitStack() as stack:
        for each, changed in defaults.items():
            stack.enter_context(_with_defaults(each.__init__, changed))
        cli.setup_parser(given["run"], *cli._setup_parser_kwargs(cli.parser_kwargs))
        cli.parse_arguments(cli.parser, given["args"])
    section = cli.config[cli.config["subcommand"]] if given["run"] else cli.config
    strategy = section["trainer"].get("strategy")
    found = strategy.get("init_args") if hasattr(strategy, "get") else None
    if found is None:
        return None
    return found.as_dict() if hasattr(found, "as_dict") else dict(found)


@contextmanager
def _with_defaults(init: Any, defaults: Mapping[str, Any]) -> Generator[None, None, None]:
    """Make the signature of a constructor show other defaults inside."""
    before = vars(init).get("__signature__")
    signature = inspect.signature(init)
    changed = [p.replace(default=defaults.get(n, p.default)) for n, p in signature.parameters.items()]
    init.__signature__ = signature.replace(parameters=changed)
    try:
        yield
    finally:
        if before is None:
            del init.__signature__
        else:
            init.__signature__ = before
