"""The one place that touches private API of torch and Lightning, so that a new release breaks one file at most.

The exception is `strategy.py`, which as a subclass uses what its base class keeps behind an underscore.
"""

# One file by design, longer than others: what a new release may break is found, and mended, in one place.

from __future__ import annotations

import copy
import inspect
import os
import signal
import socket
import stat
import sys
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import CompileContext
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_iter, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

__all__ = [
    "REQUEUE",
    "STOP",
    "StorageInfo",
    "StorageWeakRef",
    "TorchDispatchMode",
    "WeakIdKeyDictionary",
    "around_batches",
    "around_data_setup",
    "around_dumps",
    "around_fetches",
    "batches_of",
    "checkpoint_folder",
    "checkpoint_options",
    "compiled_code",
    "current_backward_pass",
    "default_store",
    "defer_signals",
    "fake_tensors",
    "foreach_function",
    "forget_step_hooks",
    "free_main_port",
    "give_data",
    "give_signals_back",
    "has_step_hooks",
    "intercept_cli",
    "is_compiled",
    "is_compiled_function",
    "is_hooked",
    "is_mock_optimizer",
    "is_started_by_lightning",
    "is_tracing",
    "is_transforming",
    "load_state",
    "logs_graph",
    "made_by_parser",
    "make_wrapper",
    "metric_state",
    "migrate_checkpoint",
    "name_logs_by_job",
    "onednn_linear",
    "open_sockets",
    "outside_transforms",
    "overwrite_saved_config",
    "parse_again",
    "persistent_buffer_names",
    "plain_checkpoint_io",
    "put_step_hooks_inside",
    "raise_sigterm",
    "replace_experiments",
    "replace_links",
    "resume_from",
    "rewinds_pruned_weights",
    "route_calls",
    "run_step_pre_hooks",
    "set_metric_state",
    "shut_sockets",
    "storage_key",
    "storage_users",
    "sync_batch_norm_error",
    "take_signals_over",
    "torch_function_is_on",
    "training_data",
    "training_loaders",
    "tree_flatten",
    "tree_iter",
    "tree_map",
    "tree_unflatten",
    "uncompiled",
    "uncompiled_code",
    "unroute_calls",
    "unwrap_optimizer",
    "version_of",
    "without_crc32",
    "without_dispatch_modes",
    "without_function_mode",
    "without_torch_function",
    "without_torch_functions",
    "world_group",
]


@cache
def onednn_linear() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """``functional.linear`` by oneDNN, for fp32 tensors of the CPU without gradients; None in a torch without it."""
    product = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
    if product is None:
        return None
    return lambda x, weight: product(x, weight, None, "none", [], "")


def current_backward_pass() -> int:
    """A number that tells backward passes apart; -1 outside of any."""
    return torch._C._current_graph_task_id()


def make_wrapper(kind: type[Any], local: torch.Tensor, shape: tuple[int, ...]) -> Any:
    """A tensor of class ``kind`` that has ``shape``, no storage, and otherwise the metadata of ``local``."""
    return torch.Tensor._make_wrapper_subclass(kind, shape, dtype=local.dtype, device=local.device)


def default_store() -> Any:
    """Rendezvous store of the default process group. Raises if there is none."""
    return dist.distributed_c10d._get_default_store()


def world_group() -> Any:
    """The default process group, None if there is none. Another one is another object."""
    return dist.group.WORLD if dist.is_initialized() else None


def open_sockets() -> set[tuple[int, int]]:
    """Sockets of this process as ``(file descriptor, inode)``. Linux; empty elsewhere."""
    result: set[tuple[int, int]] = set()
    for entry in Path("/proc/self/fd").glob("*"):
        try:
            status = os.fstat(int(entry.name))
        except OSError:  # closed meanwhile
            continue
        if stat.S_ISSOCK(status.st_mode):
            result.add((int(entry.name), status.st_ino))
    return result


def shut_sockets(sockets: set[tuple[int, int]], *, except_port: int) -> None:
    """Shut connections down without closing their descriptors, whose owner (gloo) then sees an error, as its peer does.

    gloo's groups cannot be aborted: ``ProcessGroup.abort`` does nothing there, and ``destroy_process_group`` leaves the
    connections open for as long as the process lives. Connections to or from ``except_port`` stay.
    """
    for fd, _ in sockets & open_sockets():
        try:
            with socket.socket(fileno=os.dup(fd)) as connection:
                if except_port not in (connection.getsockname()[1], connection.getpeername()[1]):
                    connection.shutdown(socket.SHUT_RDWR)
        except (OSError, IndexError):  # closed meanwhile, or a listening or a Unix socket: nobody waits on it
            continue


def copy_of_optimizer(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Return an optimizer with the same settings and state on other parameter groups; its hooks are the same."""
    copied = type(optimizer).__new__(type(optimizer))
    copied.__dict__.update(optimizer.__dict__)
    copied.param_groups = groups
    return copied


def forget_step_hooks(optimizer: Optimizer) -> None:
    """Give a copy of an optimizer its own, empty, step hooks."""
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()


def has_step_hooks(optimizer: Optimizer, *, besides: Any) -> bool:
    """Whether anything runs before or after the optimizer's ``step``, other than a method of ``besides``."""
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    return any(getattr(hook, "__self__", None) is not besides for hook in hooks)


def put_step_hooks_inside(optimizer: Optimizer, before: Any, after: Any) -> None:
    """Let a hook before ``step``, by its handle, run after all others, and one after it before all others."""
    optimizer._optimizer_step_pre_hooks.move_to_end(before.id)  # type: ignore[attr-defined]
    optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # type: ignore[attr-defined]


def run_step_pre_hooks(optimizer: Optimizer, kwargs: dict[str, Any], *, besides: Any) -> dict[str, Any]:
    """Run what runs before the optimizer's ``step``, other than methods of ``besides``; return the step's arguments.

    Raises:
        RuntimeError: as torch does, where a hook returns something else than arguments.
    """
    args: tuple[Any, ...] = (optimizer,)
    for hook in list(optimizer._optimizer_step_pre_hooks.values()):
        if getattr(hook, "__self__", None) is besides:
            continue
        result = hook(optimizer, args, kwargs)
        if result is not None:
            if not (isinstance(result, tuple) and len(result) == 2):
                raise RuntimeError(f"{hook} must return None or a tuple of (new_args, new_kwargs), but got {result}.")
            args, kwargs = result  # type: ignore[assignment]
    return kwargs


@contextmanager
def without_step_pre_hooks(optimizer: Optimizer, *, besides: Any) -> Generator[None, None, None]:
    """Inside, nothing runs before the optimizer's ``step`` but methods of ``besides``."""
    hooks = optimizer._optimizer_step_pre_hooks
    kept = [(key, hook) for key, hook in hooks.items() if getattr(hook, "__self__", None) is besides]
    optimizer._optimizer_step_pre_hooks = OrderedDict(kept)
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks = hooks


def persistent_buffer_names(model: nn.Module) -> set[str]:
    """Names of the buffers that are in ``model.state_dict()``."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, _ in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def sync_batch_norm_error() -> str | None:
    """Why ``torch.nn.SyncBatchNorm`` cannot run here, or None where it can."""
    return None if torch.cuda.is_available() else "torch.nn.SyncBatchNorm has no CPU implementation"


def unwrap_optimizer(optimizer: Any) -> Any:
    """The user's optimizer inside a LightningOptimizer, which imitates its class; any other as it is."""
    return getattr(optimizer, "_optimizer", optimizer)


def is_mock_optimizer(optimizer: Optimizer) -> bool:
    """Whether this is Lightning's stand-in for ``configure_optimizers`` that returned None."""
    return type(optimizer).__name__ == "_MockOptimizer"


@contextmanager
def without_crc32() -> Generator[None, None, None]:
    """Inside, ``torch.save`` leaves out the checksums of its zip records, which ``torch.load`` does not read."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def replace_links(trainer: Any, link: Callable[[Any, str, str], None]) -> None:
    """Let `ModelCheckpoint` make its ``save_last="link"`` by ``link(trainer, path, name)``, called on all ranks."""
    for callback in trainer.checkpoint_callbacks:
        if hasattr(callback, "_link_checkpoint"):
            callback._link_checkpoint = link


def replace_experiments(called: Callable[[str, Sequence[Any], Mapping[str, Any]], None]) -> None:
    """Let the dummy that Lightning's loggers have on all ranks but the first call ``called`` with what it is called."""
    from lightning.fabric.loggers.logger import _DummyExperiment

    def get(_: Any, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: called(name, args, kwargs)

    _DummyExperiment.__getattr__ = get  # type: ignore[method-assign]


def logs_graph(logger: Any) -> bool:
    """Whether a logger traces the model when training starts (``TensorBoardLogger(log_graph=True)``)."""
    return bool(vars(logger).get("_log_graph"))  # the logger of fast_dev_run has every attribute that is asked for


def around_data_setup(trainer: Any, context: Callable[[], AbstractContextManager[None]]) -> None:
    """Let the fit loop make its first iterator over the training data inside ``context()``."""
    loop = trainer.fit_loop

    def setup_data() -> None:
        del loop.setup_data  # once
        with context():
            loop.setup_data()

    loop.setup_data = setup_data


def around_fetches(trainer: Any, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
    """Let the fit loop call ``before()`` and ``after()`` around every batch that it fetches, from the next epoch on.

    Returns:
        what undoes it.
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


def around_batches(
    trainer: Any, begin: Callable[[str, str, Callable[[], bool]], None], end: Callable[[], None], *, evaluation: bool
) -> None:
    """Call ``begin(what, limit, is_last)`` and ``end()`` around every pass over the batches of a loader.

    ``end`` comes before the hooks that follow the last batch, and not after an exception.

    Args:
        trainer: about to run.
        begin: gets the kind of pass, the Trainer's option that bounds it, and what tells whether a batch is the last.
        end: called without arguments.
        evaluation: also around validation, test and prediction.
    """
    epochs = trainer.fit_loop.epoch_loop

    def is_last() -> bool:
        progress = epochs.batch_progress
        last = progress.is_last_batch or progress.current.ready >= trainer.num_training_batches
        return last and not _reaches_max_steps(trainer)

    def run(data_fetcher: Any) -> None:
        begin("training epoch", "limit_train_batches", is_last)
        type(epochs).run(epochs, data_fetcher)
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
            _around_evaluation(loop, partial(begin, what, limit, partial(_is_last_batch, loop)), end)


def _reaches_max_steps(trainer: Any) -> bool:
    """Whether all ranks stop after this batch, however many more their loaders have."""
    module, epochs = trainer.lightning_module, trainer.fit_loop.epoch_loop
    ends_accumulation = epochs.batch_progress.current.ready % trainer.accumulate_grad_batches == 0
    return module.automatic_optimization and ends_accumulation and epochs.global_step + 1 == trainer.max_steps


def _is_last_batch(loop: Any) -> bool:
    return loop.batch_progress.is_last_batch


def _around_evaluation(loop: Any, begin: Callable[[], None], end: Callable[[], None]) -> None:
    def on_run_start() -> None:
        type(loop).on_run_start(loop)
        begin()

    def on_run_end() -> Any:
        end()
        return type(loop).on_run_end(loop)

    loop.on_run_start, loop.on_run_end = on_run_start, on_run_end


def around_dumps(trainer: Any, context: Callable[[], AbstractContextManager[bool]]) -> None:
    """Let every ``trainer.save_checkpoint`` collect its contents inside ``context()``; nothing if that is False."""
    connector = trainer._checkpoint_connector

    def dump_checkpoint(weights_only: bool | None = None) -> dict[str, Any]:
        with context() as wanted:
            return type(connector).dump_checkpoint(connector, weights_only) if wanted else {}

    connector.dump_checkpoint = dump_checkpoint


def load_state(module_class: Any, checkpoint: dict[str, Any], **options: Any) -> Any:
    """A LightningModule from its class and a checkpoint, as ``load_from_checkpoint`` builds it."""
    from lightning.pytorch.core.saving import _load_state

    return _load_state(module_class, checkpoint, **options)


def migrate_checkpoint(checkpoint: dict[str, Any], path: str) -> dict[str, Any]:
    """A checkpoint of an earlier Lightning, as this one writes it."""
    from lightning.pytorch.utilities.migration.utils import _pl_migrate_checkpoint

    return _pl_migrate_checkpoint(checkpoint, path)


def plain_checkpoint_io(checkpoint_io: Any) -> Any:
    """The `CheckpointIO` that does the work, without those that wrap it."""
    from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

    while isinstance(checkpoint_io, _WrappingCheckpointIO) and checkpoint_io.checkpoint_io is not None:
        checkpoint_io = checkpoint_io.checkpoint_io
    return checkpoint_io


def training_data(trainer: Any) -> Any:
    """What ``train_dataloader`` returns for the fit that is about to begin: made anew."""
    return trainer.fit_loop._data_source.dataloader()


def training_loaders(trainer: Any) -> list[Any]:
    """The loaders of the fit that runs, without what combines them."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def batches_of(trainer: Any) -> Any:
    """What the Trainer will loop over, before it prepares it: a loader, or a collection of some."""
    loops = {
        "fit": trainer.fit_loop,
        "validate": trainer.validate_loop,
        "test": trainer.test_loop,
        "predict": trainer.predict_loop,
    }
    loaders = loops[str(trainer.state.fn.value)]._data_source.dataloader()
    return getattr(loaders, "iterables", loaders)


# --- saved tensors ---------------------------------------------------------------------------------------------------


def storage_key(tensor: Tensor) -> int:
    """What tells storages apart: the same for all views, while it lives and through every resize of the storage.

    A `StorageWeakRef` to the storage keeps the number from being given to another one.
    """
    with without_torch_function():  # of a parameter that is elsewhere this asks for a key, not for values
        return tensor.untyped_storage()._cdata


def foreach_function(name: str) -> Callable[..., Any]:
    """What torch's own clipping calls on lists of tensors: ``norm``, ``mul_``, ``clamp_min_``, ..."""
    return getattr(torch, f"_foreach_{name}")


def rewinds_pruned_weights(callback: Any) -> bool:
    """Whether a `ModelPruning` ever sets weights back to their first values."""
    return bool(callback._use_lottery_ticket_hypothesis)


def storage_users(tensor: Tensor) -> int:
    """How many tensors, and others, hold the memory of this one."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def without_torch_function() -> AbstractContextManager[Any]:
    """Inside, on this thread, ``__torch_function__`` of subclasses is not called."""
    return torch._C.DisableTorchFunctionSubclass()


def torch_function_is_on() -> bool:
    """Whether this thread is not inside `without_torch_function`."""
    return torch._C._is_torch_function_enabled()


def is_tracing() -> bool:
    """Whether dynamo compiles on this thread; it looks at parameters, and on torch 2.11 at their gradients."""
    return CompileContext.try_get() is not None


def is_transforming() -> bool:
    """Whether this thread is inside a transform of `torch.func` (grad, vmap, ...)."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # type: ignore[attr-defined]


def outside_transforms() -> AbstractContextManager[Any]:
    """Inside, operations on plain tensors are seen by no transform of `torch.func`."""
    return temporarily_clear_interpreter_stack()


def version_of(tensor: Tensor) -> int:
    """How often the tensor, or another view of its memory, was changed in place."""
    return tensor._version


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Inside, operations are seen by no ``TorchDispatchMode``."""
    return _disable_current_modes()


def fake_tensors() -> AbstractContextManager[Any]:
    """Inside, tensors have shapes, dtypes and devices, and no memory; others that meet them are taken for such."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that ``torch.compile(module)`` wraps; any other as it is."""
    while "_orig_mod" in module._modules:
        module = module.get_submodule("_orig_mod")
    return module


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile(module)`` or ``module.compile()`` was called."""
    call = getattr(module, "_compiled_call_impl", None)
    return "_orig_mod" in module._modules or (call.compiled if isinstance(call, _Route) else call) is not None


def is_compiled_function(function: Any) -> bool:
    """Whether a function or method is what ``torch.compile`` made of one."""
    return hasattr(function, "_torchdynamo_orig_callable")


def uncompiled_code() -> AbstractContextManager[Any]:
    """Inside, what ``torch.compile`` made runs as it was written. Imports no compiler where none was used."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def compiled_code() -> AbstractContextManager[Any]:
    """Inside of `uncompiled_code`, undoes it."""
    return torch.compiler.set_stance("default") if "torch._dynamo" in sys.modules else nullcontext()


def is_hooked(module: nn.Module) -> bool:
    """Whether a call of the module does more than the ``forward`` of its class."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module)


class _Route:
    """What a module's call goes through instead of `Module._call_impl`; hooks are part of the call that it is given."""

    def __init__(self, module: nn.Module, route: Callable[..., Any]) -> None:
        self.compiled: Any = vars(module).get("_compiled_call_impl")
        self._call = self.compiled or module._call_impl
        self._route = route

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._route(self._call, args, kwargs)


def route_calls(module: nn.Module, route: Callable[..., Any]) -> None:
    """Let ``module(...)`` be ``route(call, args, kwargs)``, where ``call`` is the module's own, hooks included.

    Copies and pickles of the module lack the route: torch leaves this attribute, its own for ``module.compile()``, out.
    """
    vars(module)["_compiled_call_impl"] = _Route(module, route)


def unroute_calls(module: nn.Module) -> None:
    """Undo the last `route_calls`. Nothing if there was none."""
    call = vars(module).get("_compiled_call_impl")
    if isinstance(call, _Route):
        vars(module)["_compiled_call_impl"] = call.compiled


def without_torch_functions() -> AbstractContextManager[Any]:
    """Inside, neither a tensor's class nor a ``TorchFunctionMode`` sees what functions are called."""
    return torch._C.DisableTorchFunction()


@contextmanager
def without_function_mode(mode: Any) -> Generator[None, None, None]:
    """Inside, ``mode``, a ``TorchFunctionMode`` in force, is off, unless another one was entered after it."""
    if torch.overrides._get_current_function_mode() is not mode:
        yield
        return
    with torch.overrides._pop_mode_temporarily():
        yield


def checkpoint_options() -> dict[str, Any]:
    """Arguments of ``torch.utils.checkpoint.checkpoint`` that make all releases of torch do the same.

    Newer ones ask whether what a selective policy keeps goes through the hooks on saved tensors that are in force, and
    warn unless told. Older ones never do that.
    """
    asked = "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
    return {"respect_saved_tensors_hooks": False} if asked else {}


def metric_state(metric: Any) -> tuple[int, dict[str, Any]]:
    """How often a torchmetrics ``Metric`` was updated, and its state."""
    return metric._update_count, dict(metric.metric_state)


def set_metric_state(metric: Any, state: tuple[int, dict[str, Any]]) -> None:
    """Give a ``Metric`` the state of another rank's."""
    metric._update_count = state[0]
    metric._computed = None
    for name, value in state[1].items():
        setattr(metric, name, value.to(metric.device) if isinstance(value, Tensor) else value)


# --- preemption and rendezvous ---------------------------------------------------------------------------------------


def take_signals_over(trainer: Any, restore: Callable[[], None]) -> None:
    """Keep Lightning from registering handlers of its own, and call ``restore`` where it would restore the old ones.

    Its SIGTERM handler broadcasts from inside the handler, its SLURM handler saves from inside it, and
    ``_broadcast_sigterm_tensor`` broadcasts on the device and waits for it before every batch.
    """
    connector: Any = trainer._signal_connector
    connector.register_signal_handlers = _do_nothing
    connector.teardown = restore
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    epoch_loop._broadcast_sigterm_tensor = _do_nothing


REQUEUE, STOP = 1, 2
"""What a signal asks for: a checkpoint and a place in SLURM's queue, or the end."""


def defer_signals(trainer: Any, note: Callable[[int], None], agreed: Callable[[], int]) -> None:
    """Let Lightning's handlers of signals only note what is asked for; it is done between batches, on all ranks.

    Lightning's handler of SIGTERM broadcasts, and the one of SLURM's signal saves, wherever the signal meets them: say
    between two collectives of a backward, where other ranks take theirs for one of the backward. Nothing happens where
    `take_signals_over` was called before.

    Args:
        trainer: about to run.
        note: called from the handlers, with `REQUEUE` or `STOP`.
        agreed: called before every training batch, on all ranks; what all of them do now, or 0.
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
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = before_batch
    if trainer.world_size > 1:  # before_batch is not called in a single process, which waits for nobody
        connector._slurm_sigusr_handler_fn = on_requeue


def raise_sigterm(trainer: Any) -> None:
    """End the run as Lightning does after SIGTERM.

    Raises:
        SIGTERMException: a ``SystemExit``.
    """
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    trainer._signal_connector.received_sigterm = True
    raise SIGTERMException()


def give_signals_back(trainer: Any) -> None:
    """Undo `take_signals_over`. Does nothing the second time."""
    for owner, names in (
        (trainer._signal_connector, ("register_signal_handlers", "teardown")),
        (trainer.fit_loop.epoch_loop, ("_broadcast_sigterm_tensor",)),
    ):
        for name in names:
            vars(owner).pop(name, None)


def _do_nothing() -> None:
    """Lightning's version is switched off."""


def resume_from(trainer: Any, path: str) -> None:
    """Make the restore that follows use ``path`` unless the user named another checkpoint. Once."""
    connector: Any = trainer._checkpoint_connector

    def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        vars(connector).pop("resume_start", None)
        connector.resume_start(checkpoint_path or path, weights_only=weights_only)

    connector.resume_start = resume_start


def overwrite_saved_config(trainer: Any) -> None:
    """Let LightningCLI write ``config.yaml`` into the log folder of the run that goes on. Before its ``setup``."""
    cli = sys.modules.get("lightning.pytorch.cli")
    for callback in trainer.callbacks if cli is not None else ():  # type: ignore[attr-defined]
        if isinstance(callback, cli.SaveConfigCallback):  # type: ignore[union-attr]
            callback.overwrite = True


def name_logs_by_job(trainer: Any, job: str, choose: Callable[[str, str], str]) -> None:
    """Give loggers that are named after a SLURM job a folder of that job's own. Before they write.

    Lightning's default logger takes the number of the job for its version, so job 12 writes into ``version_12``, whose
    ever that is; and its checkpoints are there. It becomes ``job_12``, which `ls-strategy submit` sets for others.

    Args:
        trainer: about to run.
        job: id of the job, with the task of an array.
        choose: takes the folder of all versions and ``job_...``; returns the name of the folder.
    """
    from lightning.fabric.plugins.environments import SLURMEnvironment
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    for logger in trainer.loggers:
        named = isinstance(logger, (TensorBoardLogger, CSVLogger)) and logger._version is not None
        if named and logger._version in (SLURMEnvironment.job_id(), f"job_{job}"):
            logger._version = choose(logger.root_dir, f"job_{job}")


def checkpoint_folder(callback: Any, trainer: Any) -> str:
    """Where ``callback`` will save. Before its own ``setup``, too."""
    resolve: Any = callback._ModelCheckpoint__resolve_ckpt_dir  # type: ignore[attr-defined]
    return str(resolve(trainer))


def free_main_port(environment: Any, choose: Callable[[], int]) -> None:
    """Set the rendezvous port of a run whose ranks Lightning itself starts, where nothing has fixed it yet.

    Args:
        environment: the Trainer's cluster environment.
        choose: returns a free port.
    """
    from lightning.fabric.plugins.environments import LightningEnvironment

    if type(environment) is not LightningEnvironment or environment.creates_processes_externally:
        return
    if environment._main_port == -1 and "MASTER_PORT" not in os.environ and "STANDALONE_PORT" not in os.environ:
        environment._main_port = choose()


def is_started_by_lightning(environment: Any) -> bool:
    """Whether Lightning's launcher has started this process as a further rank."""
    from lightning.fabric.plugins.environments import LightningEnvironment

    return type(environment) is LightningEnvironment and environment.local_rank() > 0


def give_data(trainer: Any, source: Any) -> None:
    """Let a Trainer that runs nothing take its training data from ``source``, to count the steps of a fit."""
    trainer.fit_loop._data_source.instance = source
    trainer.fit_loop.max_epochs = trainer.fit_loop.max_epochs or (-1 if trainer.max_steps > 0 else 1000)


@contextmanager
def intercept_cli(stop: Callable[[Any], None], make_trainer: Callable[[Any], Any]) -> Generator[None, None, None]:
    """Inside, a LightningCLI makes its Trainer by ``make_trainer`` and calls ``stop`` where it would begin to train.

    Args:
        stop: takes the LightningCLI.
        make_trainer: takes the options of the Trainer.
    """
    from lightning.pytorch.cli import LightningCLI

    cli: Any = LightningCLI
    run, instantiate = cli._run_subcommand, cli.instantiate_trainer
    cli._run_subcommand = lambda self, _name: stop(self)
    cli.instantiate_trainer = lambda self, **_: make_trainer(self._get(self.config_init, "trainer", default={}))
    try:
        yield
    finally:
        cli._run_subcommand, cli.instantiate_trainer = run, instantiate


def made_by_parser() -> bool:
    """Whether jsonargparse, of a LightningCLI or by itself, makes the object whose ``__init__`` runs."""
    return any(str(frame.f_globals.get("__name__")).startswith("jsonargparse.") for frame in _callers())


def _callers() -> Generator[FrameType, None, None]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def parse_again(kind: type, defaults: Mapping[type, Mapping[str, Any]]) -> dict[str, Any] | None:
    """The arguments of the Trainer's strategy, of class ``kind``, as a LightningCLI parses them with other defaults.

    Called while that LightningCLI makes the strategy. None without one, or if its Trainer has another strategy.

    Args:
        kind: the class.
        defaults: by class, ``kind`` or one that an argument may have: defaults of its constructor.
    """
    module = sys.modules.get("lightning.pytorch.cli")
    made = [f for f in _callers() if module and isinstance(f.f_locals.get("self"), module.LightningCLI)]
    outer = next((frame for frame in made if frame.f_code is module.LightningCLI.__init__.__code__), None)  # type: ignore[union-attr]
    if outer is None:
        return None
    cli, given = copy.copy(outer.f_locals["self"]), outer.f_locals
    cli.parser_class = type("Again", (cli.parser_class,), {})  # jsonargparse keeps parsers, by class
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
    """Inside, the signature of a constructor shows other defaults."""
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
