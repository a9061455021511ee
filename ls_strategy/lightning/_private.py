"""Private names of Lightning, so that a new release breaks one file at most.

Those that only side products need are in `ls_strategy.extras._lightning`, those of uneven data in `_private_uneven`.
The exceptions are `lightning/strategy.py` and `lightning/ranks.py`: as subclasses they use private members of
Lightning's strategy.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ls_strategy import host
from ls_strategy._torch import tree_unflatten
from ls_strategy.distributed.lockstep import REQUEUE, STOP
from ls_strategy.errors import ConfigError

AFTER_SAVE = "Trainer.save_checkpoint"
"""Name of the barrier at the end of this method."""


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the user's optimizer inside a LightningOptimizer; any other optimizer is returned as it is."""
    return getattr(optimizer, "_optimizer", optimizer)


def forward_methods_of_fabric(names: Iterable[str]) -> None:
    """Make ``zero_grad`` of Fabric's wrappers call that of the optimizer, or module, inside.

    Otherwise torch's method runs on the wrapper, past what is attached to the inner object.

    Args:
        names: other methods of optimizers, which not all of them have.
    """
    wrappers: Any = host.import_part("fabric.wrappers")

    def of_optimizer(self: Any, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def of_module(self: Any, set_to_none: bool = True) -> None:
        self._original_module.zero_grad(set_to_none=set_to_none)

    wrappers._FabricOptimizer.zero_grad = of_optimizer
    wrappers._FabricModule.zero_grad = of_module
    for name in names:
        setattr(wrappers._FabricOptimizer, name, property(attrgetter(f"_optimizer.{name}")))


def is_mock_optimizer(optimizer: Optimizer) -> bool:
    """Return whether this is Lightning's placeholder for ``configure_optimizers`` that returned None."""
    return type(optimizer).__name__ == "_MockOptimizer"


def replace_links(trainer: Any, link: Callable[[Any, str, str], None]) -> None:
    """Make `ModelCheckpoint` call ``link(trainer, path, name)`` on all ranks for its ``save_last="link"``."""
    for callback in trainer.checkpoint_callbacks:
        if hasattr(callback, "_link_checkpoint"):
            callback._link_checkpoint = link


def replace_experiments(called: Callable[[str, Sequence[Any], Mapping[str, Any]], None]) -> None:
    """Make the dummy experiment that Lightning's loggers have on ranks above 0 report every call to ``called``."""
    dummy = host.import_part("fabric.loggers.logger")._DummyExperiment

    def get(_: Any, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: called(name, args, kwargs)

    dummy.__getattr__ = get


def logs_graph(logger: Any) -> bool:
    """Return whether a logger traces the model when training starts (``TensorBoardLogger(log_graph=True)``)."""
    return bool(vars(logger).get("_log_graph"))  # by vars: the logger of fast_dev_run has every attribute


class Once:
    """Takes the place of a loop's method for one call: does something first, then calls the method."""

    def __init__(self, loop: Any, name: str, first: Callable[[], None]) -> None:
        self._loop, self._name, self._first = loop, name, first
        before = vars(loop).get(name)
        self.own: Any = before.own if isinstance(before, Once) else before  # of a fit that ended before it began
        setattr(loop, name, self)

    def __call__(self) -> None:
        loop, name = self._loop, self._name
        if vars(loop).get(name) is self:
            delattr(loop, name)
            if self.own is not None:
                setattr(loop, name, self.own)
        self._first()
        getattr(type(loop), name)(loop) if self.own is None else self.own()


def around_data_setup(
    trainer: Any, context: Callable[[], AbstractContextManager[None]], go_on: Callable[[list[Any]], bool]
) -> None:
    """Make the fit loop create its training data, and the first iterator over them, inside ``context()``.

    Code that asks for ``trainer.estimated_stepping_batches`` has created both earlier, before Lightning restored the
    progress of a checkpoint and the states of loaders.

    Args:
        trainer: about to fit.
        context: entered once, when the progress is restored.
        go_on: gets loaders that were created earlier, inside the context. Returns whether new iterators are needed.
    """
    loop = trainer.fit_loop

    def begin() -> None:
        early = loop._combined_loader is not None and not loop._should_reload_train_dl
        with context():
            loop.setup_data()
            if early and loop._data_fetcher is not None:
                waits = isinstance(vars(loop).get("_load_combined_loader_states"), Once)  # of `before_iterators`
                waits |= loop.restarting and bool(loop._combined_loader_states_to_load)
                if go_on(training_loaders(trainer)) | waits:
                    loop._load_combined_loader_states()
                    iter(loop._data_fetcher)

    Once(loop, "run", begin)


def before_first_fetch(trainer: Any, call: Callable[[], None]) -> None:
    """Make the fit loop call ``call()`` before it fetches the first batch, and again later in that epoch."""
    Once(trainer.fit_loop.epoch_loop, "_on_before_fetch", call)


def around_batches(
    trainer: Any,
    begin: Callable[[str, str, Callable[[], bool]], None],
    end: Callable[[], None],
    *,
    evaluation: bool,
    fetcher: Callable[[Any, Any], Any] = lambda _, given: given,
) -> None:
    """Call ``begin(what, limit, is_last)`` and ``end()`` around every pass over the batches of a loader.

    ``end`` comes before the hooks that follow the last batch, and not after an exception.

    Args:
        trainer: about to run.
        begin: gets the kind of pass, the Trainer's option that limits it, and a function that returns whether the
            fetched batch is the last one.
        end: called without arguments.
        evaluation: also around validation, test and prediction.
        fetcher: gets a loop and its data fetcher, after ``begin``; returns the one that the loop uses.
    """
    epochs = trainer.fit_loop.epoch_loop

    def is_last() -> bool:
        progress = epochs.batch_progress
        last = progress.is_last_batch or progress.current.ready >= trainer.num_training_batches
        return last and not _reaches_max_steps(trainer)

    def run(data_fetcher: Any) -> None:
        begin("training epoch", "limit_train_batches", is_last)
        type(epochs).run(epochs, fetcher(epochs, data_fetcher))
        end()

    epochs.run = run
    for what, limit, loop in (
        ("validation", "limit_val_batches", epochs.val_loop),
        ("validation", "limit_val_batches", trainer.validate_loop),
        ("test", "limit_test_batches", trainer.test_loop),
        ("prediction", "limit_predict_batches", trainer.predict_loop),
    ):
        for name in ("on_run_start", "on_run_end"):
            vars(loop).pop(name, None)
        if evaluation:
            _around_evaluation(loop, partial(begin, what, limit, partial(_is_last_batch, loop)), end, fetcher)


def _reaches_max_steps(trainer: Any) -> bool:
    """Return whether all ranks stop after this batch because of ``max_steps``, even if their loaders have more."""
    module, epochs = trainer.lightning_module, trainer.fit_loop.epoch_loop
    ends_accumulation = epochs.batch_progress.current.ready % trainer.accumulate_grad_batches == 0
    return module.automatic_optimization and ends_accumulation and epochs.global_step + 1 == trainer.max_steps


def _is_last_batch(loop: Any) -> bool:
    return getattr(loop._data_fetcher, "all_done", loop.batch_progress.is_last_batch)


def _around_evaluation(
    loop: Any, begin: Callable[[], None], end: Callable[[], None], fetcher: Callable[[Any, Any], Any]
) -> None:
    def on_run_start() -> None:
        type(loop).on_run_start(loop)
        begin()
        loop._data_fetcher = fetcher(loop, loop._data_fetcher)

    def on_run_end() -> Any:
        end()
        return type(loop).on_run_end(loop)

    loop.on_run_start, loop.on_run_end = on_run_start, on_run_end


def around_dumps(trainer: Any, context: Callable[[], AbstractContextManager[bool]]) -> None:
    """Make ``trainer.save_checkpoint`` collect its contents inside ``context()``, or nothing if that yields False."""
    connector = trainer._checkpoint_connector

    def dump_checkpoint(weights_only: bool | None = None) -> dict[str, Any]:
        with context() as wanted:
            return type(connector).dump_checkpoint(connector, weights_only) if wanted else {}

    connector.dump_checkpoint = dump_checkpoint


def load_state(module_class: Any, checkpoint: dict[str, Any], **options: Any) -> Any:
    """Build a LightningModule from its class and a checkpoint, as ``load_from_checkpoint`` does."""
    return host.import_part("pytorch.core.saving")._load_state(module_class, checkpoint, **options)


def migrate_checkpoint(checkpoint: dict[str, Any], path: str) -> dict[str, Any]:
    """Migrate a checkpoint of an earlier Lightning to the installed one."""
    return host.import_part("pytorch.utilities.migration.utils")._pl_migrate_checkpoint(checkpoint, path)


def plain_checkpoint_io(checkpoint_io: Any) -> Any:
    """Return the innermost `CheckpointIO`, without its wrappers."""
    module: Any = host.loaded_part("pytorch.plugins.io.wrapper")  # None in a program with Fabric alone
    while (
        module is not None
        and isinstance(checkpoint_io, module._WrappingCheckpointIO)
        and checkpoint_io.checkpoint_io is not None
    ):
        checkpoint_io = checkpoint_io.checkpoint_io
    return checkpoint_io


def training_loaders(trainer: Any) -> list[Any]:
    """Return the loaders of the running fit, without the wrapper that combines them."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def batches_of(trainer: Any) -> Any:
    """Return what the Trainer will loop over, before it prepares it: a loader, or a collection of loaders."""
    loops = {
        "fit": trainer.fit_loop,
        "validate": trainer.validate_loop,
        "test": trainer.test_loop,
        "predict": trainer.predict_loop,
    }
    loaders = loops[str(trainer.state.fn.value)]._data_source.dataloader()
    return getattr(loaders, "iterables", loaders)


def note_module_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    """Set the ``dtype`` that a LightningModule, and every one inside it, reports."""
    host.import_part("fabric.utilities.device_dtype_mixin")._update_properties(module, dtype=dtype)


def rewinds_pruned_weights(callback: Any) -> bool:
    """Return whether a `ModelPruning` ever resets weights to their initial values."""
    return bool(callback._use_lottery_ticket_hypothesis)


def metric_state(metric: Any) -> tuple[int, dict[str, Any]]:
    """Return how often a torchmetrics ``Metric`` was updated, and its state."""
    return metric._update_count, dict(metric.metric_state)


def set_metric_state(metric: Any, state: tuple[int, dict[str, Any]]) -> None:
    """Give a ``Metric`` the state of another rank's metric."""
    metric._update_count = state[0]
    metric._computed = None
    for name, value in state[1].items():
        setattr(metric, name, value.to(metric.device) if isinstance(value, Tensor) else value)


def metric_snapshot(module: nn.Module) -> Callable[[], None]:
    """Return a function that gives a module's torchmetrics the states that they have now."""
    kept = []
    each: Any = module.modules()
    for part in each:
        if hasattr(part, "_defaults") and hasattr(part, "metric_state"):
            names = ("_update_count", "_computed", "_forward_cache", "_is_synced", "_cache", *part._defaults)
            values = {name: vars(part).get(name, getattr(part, name, None)) for name in names}
            kept.append((part, {name: _copied(value) for name, value in values.items()}))

    def restore() -> None:
        for part, values in kept:
            for name, value in values.items():
                setattr(part, name, value)

    return restore


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


def defer_signals(trainer: Any, note: Callable[[int], None], agreed: Callable[[], int]) -> None:
    """Make Lightning's signal handlers only record requests, which all ranks serve between two batches.

    Lightning's handler of SIGTERM broadcasts, and that of SLURM's signal saves, wherever the signal arrives: for
    example between two collectives of a backward, where they would be matched with other ranks' collectives. Does
    nothing after `take_signals_over`. A SIGTERM that no batch has served when the run is over has its default effect.

    Args:
        trainer: about to run.
        note: called from the handlers, with `REQUEUE` or `STOP`.
        agreed: called before every training batch on all ranks; returns the request that all of them serve now, or 0.
    """
    connector: Any = trainer._signal_connector
    if "register_signal_handlers" in vars(connector):
        return
    forwarded: list[int] = []

    def on_sigterm(number: int, _frame: Any) -> None:
        note(STOP)
        if trainer.world_size == 1:
            connector.received_sigterm = True
        launcher = trainer.strategy.launcher
        if launcher is not None and not forwarded:
            launcher.kill(number)  # ranks that this process has started
        forwarded.append(number)

    def on_requeue(_number: int, _frame: Any) -> None:
        note(REQUEUE)

    def before_batch() -> None:
        todo = agreed()
        if todo == STOP:
            raise_sigterm(trainer)
        if todo == REQUEUE:
            type(connector)._slurm_sigusr_handler_fn(connector, signal.SIGUSR1, None)

    connector._sigterm_notifier_fn = on_sigterm
    _deliver_afterwards(trainer, connector, forwarded)
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = before_batch
    if trainer.world_size > 1:  # Lightning does not call before_batch in a single process
        connector._slurm_sigusr_handler_fn = on_requeue


def _deliver_afterwards(trainer: Any, connector: Any, received: list[int]) -> None:
    """Deliver a SIGTERM that arrived during the run to the process, once the run has restored the signal handlers.

    A run that an exception has ended delivers none.
    """

    def teardown() -> None:
        vars(connector).pop("teardown", None)
        connector.teardown()
        if received and not trainer.interrupted:
            deliver_sigterm()

    connector.teardown = teardown


def raise_sigterm(trainer: Any) -> None:
    """End the run as Lightning does after SIGTERM.

    Raises:
        SIGTERMException: always; it is a ``SystemExit``.
    """
    trainer._signal_connector.received_sigterm = True
    raise host.import_part("pytorch.utilities.exceptions").SIGTERMException()


def deliver_sigterm() -> None:
    """Let a SIGTERM that came to a run which is over end this process. A handler of the user has got it already."""
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        sys.stderr.write("ls_strategy: SIGTERM came when the run was about to end, so this process ends after it.\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGTERM)


def fetches_one_by_one(trainer: Any) -> bool:
    """Return whether the fit fetches a batch when it trains on it: not one ahead, and not inside ``training_step``."""
    fetcher = trainer.fit_loop._data_fetcher
    fetchers = host.import_part("pytorch.loops.fetchers")
    ahead = isinstance(fetcher, fetchers._PrefetchDataFetcher) and fetcher.length is None and fetcher.prefetch_batches
    return not ahead and not isinstance(fetcher, fetchers._DataLoaderIterDataFetcher)


def dump_for_resume(trainer: Any) -> dict[str, Any]:
    """Return what ``trainer.save_checkpoint`` would save. Collective as that is."""
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)


def dump_again(trainer: Any, dumped: dict[str, Any]) -> dict[str, Any]:
    """Collect what ``trainer.save_checkpoint`` has collected once more. Collective as that is.

    Keys that a user's Trainer has added or removed since then stay so.
    """
    again = trainer._checkpoint_connector.dump_checkpoint("optimizer_states" not in dumped)
    return {key: again.get(key, value) for key, value in dumped.items()}


def end_restart(trainer: Any, then: Callable[[], None]) -> None:
    """Let a fit that continues between two batches go on as if it had never stopped, and call ``then()`` there.

    Lightning takes a fit that restarts to be at the end of a batch: it would validate again or not at all, count a step
    of the loggers twice, and leave out schedulers that follow a metric until the epoch has ended.
    """
    loop = trainer.fit_loop.epoch_loop

    def on_run_start(data_fetcher: Any) -> None:
        vars(loop).pop("on_run_start", None)
        loop.on_run_start(data_fetcher)
        trainer.fit_loop.restarting = False
        then()

    loop.on_run_start = on_run_start


def loader_states(trainer: Any) -> list[dict[str, Any]]:
    """Return the states of training loaders that have one, as Lightning saves rank 0's."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else combined._state_dicts()


def set_loader_states(checkpoint: dict[str, Any], states: list[dict[str, Any]]) -> None:
    """Replace rank 0's states of training loaders in a checkpoint that is about to be restored."""
    checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = states


def epoch_values(trainer: Any) -> dict[str, dict[str, Any]]:
    """Return what ``training_step`` has logged in the epoch so far, by key, in types that a checkpoint may hold.

    Raises:
        ConfigError: a value is averaged over a process group of the user, which is another one after a restart.
    """
    found: dict[str, dict[str, Any]] = {}
    for key, metric in trainer.fit_loop.epoch_loop._results.items():
        if metric.has_reset:
            continue
        meta, sync = metric.meta, metric.meta.sync
        if sync.group is not None:
            raise ConfigError(
                f"Got self.log({meta.name!r}, sync_dist_group=...) in a run with ElasticTraining, but that process "
                "group does not exist after a restart. Leave sync_dist_group out, or log with on_epoch=False through "
                "self.logger."
            )
        names = metric._defaults if metric.is_tensor else ()  # a torchmetric has its states in the module
        found[key] = {
            "meta": {name: getattr(meta, name) for name in _META} | {"reduce_fx": meta.reduce_fx.__name__},
            "sync": {"_should": sync.should, "rank_zero_only": sync.rank_zero_only},
            "is_tensor": metric.is_tensor,
            "state": {name: _copied(getattr(metric, name)) for name in names},
            "count": metric._update_count,
            "last": _copied(metric._forward_cache),
        }
    return found


_META = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx",
    "metric_attribute",
)  # fmt: skip


def add_epoch_values(trainer: Any, module: nn.Module, saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Continue an epoch of the training loop with what `epoch_values` has returned.

    Call it before the first batch.
    """
    results, device = trainer.fit_loop.epoch_loop._results, trainer.strategy.root_device
    classes = host.import_part("pytorch.trainer.connectors.logger_connector.result")
    for key, values in saved.items():
        meta = classes._Metadata(**values["meta"])
        meta.sync = classes._Sync(fn=trainer.strategy.reduce, **values["sync"])
        metric = classes._ResultMetric(meta, values["is_tensor"]).to(device)
        if not metric.is_tensor:
            metric.value = module.get_submodule(meta.metric_attribute)
        for name, state in values["state"].items():
            setattr(metric, name, state.to(device))
        metric._update_count, last = values["count"], values["last"]
        metric._forward_cache = last.to(device) if isinstance(last, Tensor) else last
        results[key] = metric
    # Not the first batch of an epoch, at which Lightning resets what the hook has logged.
    trainer._logger_connector._first_loop_iter = True


def reported_metrics(trainer: Any) -> dict[str, dict[str, Any]]:
    """Return the last values that callbacks, loggers and the progress bar got."""
    connector = trainer._logger_connector
    trainer.callback_metrics  # noqa: B018 - brings the dictionary up to date
    return {name: dict(getattr(connector, name)) for name in _REPORTED}


def set_reported_metrics(trainer: Any, saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Restore the result of `reported_metrics`."""
    for name in _REPORTED:
        getattr(trainer._logger_connector, name).update(saved.get(name, {}))


_REPORTED = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


def metric_states(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the states of a module's torchmetrics that have counted something, by name."""
    found: dict[str, dict[str, Any]] = {}
    for name, part in module.named_modules():
        metric: Any = part
        if hasattr(metric, "_defaults") and hasattr(metric, "metric_state") and metric._update_count:
            state = {key: _copied(getattr(metric, key)) for key in metric._defaults}
            found[name] = {"state": state, "count": metric._update_count}
    return found


def set_metric_states(module: nn.Module, saved: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
    """Restore results of `metric_states`; those of several ranks are combined as at the end of an epoch."""
    parts = dict(module.named_modules())
    for name in dict.fromkeys(name for each in saved for name in each):
        metric: Any = parts.get(name)
        if metric is None:
            continue
        values = [each[name] for each in saved if name in each]
        for key in metric._defaults:
            states = [each["state"][key] for each in values if key in each["state"]]
            if states:
                setattr(metric, key, _combined_state(states, metric._reductions[key], metric.device))
        metric._update_count, metric._computed = sum(each["count"] for each in values), None


def _combined_state(states: list[Any], reduction: Any, device: Any) -> Any:
    if isinstance(states[0], list):
        return [each.to(device) for state in states for each in state]
    if len(states) == 1:
        return states[0].to(device)
    stacked = torch.stack([state.to(device) for state in states])
    return stacked if reduction is None else reduction(stacked)


def name_logs_by_job(trainer: Any, job: str, choose: Callable[[str, str], str]) -> None:
    """Give loggers that are named after a SLURM job their own folder. Call it before they write.

    Lightning's default logger uses the job's number as its version: job 12 writes logs and checkpoints into
    ``version_12``, even if that is another run's. It becomes ``job_12``, as `ls-strategy submit` sets it.

    Args:
        trainer: about to run.
        job: id of the job, with the task of an array.
        choose: takes the folder of all versions and ``job_...``; returns the name of the folder.
    """
    environments, loggers = host.import_part("fabric.plugins.environments"), host.import_part("pytorch.loggers")
    for logger in trainer.loggers:
        named = isinstance(logger, (loggers.TensorBoardLogger, loggers.CSVLogger)) and logger._version is not None
        if named and logger._version in (environments.SLURMEnvironment.job_id(), f"job_{job}"):
            logger._version = choose(logger.root_dir, f"job_{job}")


def free_main_port(environment: Any, choose: Callable[[], int]) -> None:
    """Set the rendezvous port of a run that Lightning's own launcher starts, unless it is already fixed."""
    if type(environment) is not _plain_environment() or environment.creates_processes_externally:
        return
    if environment._main_port == -1 and "MASTER_PORT" not in os.environ and "STANDALONE_PORT" not in os.environ:
        environment._main_port = choose()


def accept_any_size(environment: Any) -> None:
    """Leave it to the strategy to compare the ranks that ``torchrun`` has started with the Trainer's options.

    Lightning compares them before a callback of the run is asked, which may follow the launcher.
    """
    if isinstance(environment, host.import_part("fabric.plugins.environments").TorchElasticEnvironment):
        environment.validate_settings = lambda num_devices, num_nodes: None


def is_started_by_lightning(environment: Any) -> bool:
    """Return whether Lightning's launcher started this process as a rank above 0."""
    return type(environment) is _plain_environment() and environment.local_rank() > 0


def is_interactive() -> bool:
    """Return whether Lightning takes this process for a notebook or Python prompt, without a script to start again."""
    return bool(host.import_part("fabric.utilities.imports")._IS_INTERACTIVE)


def show_as_text(trainer: Any) -> None:
    """Let progress and tables of a rank that was forked from a Jupyter kernel reach the notebook. Call it in the rank.

    Only text does: what rich and widgets send from a forked process is dropped, with a line in the kernel's log each.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is None:
        return
    if "rich" in sys.modules:
        sys.modules["rich"].reconfigure(force_jupyter=False)
    import tqdm.std

    bars: Any = host.import_part("pytorch.callbacks.progress.tqdm_progress")
    bars.Tqdm = type("Tqdm", (tqdm.std.tqdm,), {"format_num": staticmethod(bars.Tqdm.format_num)})
    rich_bar = host.import_part("pytorch.callbacks").RichProgressBar
    for place, callback in enumerate(trainer.callbacks):
        if isinstance(callback, rich_bar):
            bar: Any = bars.TQDMProgressBar(refresh_rate=max(callback.refresh_rate // 10, 1))
            bar.get_metrics = callback.get_metrics
            if callback.is_disabled:
                bar.disable()
            trainer.callbacks[place] = bar


def before_launch(strategy: Any, check: Callable[[], None]) -> None:
    """Call ``check`` each time before the strategy's launcher starts ranks."""
    launcher = strategy._launcher
    launch = launcher.launch

    def checked_launch(*args: Any, **kwargs: Any) -> Any:
        check()
        return launch(*args, **kwargs)

    launcher.launch = checked_launch


def _plain_environment() -> Any:
    """Return the class of the environment in which Lightning starts the ranks."""
    return host.import_part("fabric.plugins.environments").LightningEnvironment


def active_loaders(trainer: Any) -> Any:
    """Return the CombinedLoader of the running loop: training, or the validation inside it, or an evaluation."""
    if trainer.training:
        return trainer.fit_loop._combined_loader
    return trainer._evaluation_loop._combined_loader


def unflatten_batch(combined: Any, batches: list[Any]) -> Any:
    """Return the batch of a CombinedLoader that is made of one batch per loader."""
    return tree_unflatten(batches, combined._spec)


class ForwardValues:
    """The values that metrics of a module have returned last, which Lightning logs for a step."""

    def __init__(self, module: nn.Module) -> None:
        self._values = [(m, m._forward_cache) for m in module.modules() if hasattr(m, "_forward_cache")]

    def restore(self) -> None:
        """Make them the last ones again."""
        for metric, value in self._values:
            metric._forward_cache = value  # type: ignore[assignment]
