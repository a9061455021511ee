"""``from_pretrained`` of transformers, of which no rank reads all: the one file that touches the package's internals.

transformers' own loader runs, with its renaming, conversion, tying, its random numbers for missing entries, and its
report. These of its functions are replaced while ``configure_model`` runs on the meta device:

==============================  ======================================================================================
``PreTrainedModel``
  ``.from_pretrained``          runs on the CPU, where it fills what no file has (missing entries, buffers)
  ``._load_pretrained_model``   gets tensors that record what is done to them, instead of slices that it would read
  ``.resize_token_embeddings``  gets embeddings that have their values, and resizes them on the CPU
``set_param_for_module``        puts a meta parameter in the model, with the record of where its values are
``get_torch_context_manager_``  does not say that the device is meta, where a model made by ``from_config`` would skip
``or_global_device``            its ``_init_weights``
==============================  ======================================================================================

Where every rank needs the full model, ``configure_model`` runs as it is, and these are replaced:

==============================  ======================================================================================
``PreTrainedModel``
  ``._load_pretrained_model``   gets tensors that record what is done to them, as above
``set_param_for_module``        puts a parameter with memory in the model, and notes where its values are
``convert_and_load_state_       at its end the values are read, together with the other ranks
dict_in_model``
==============================  ======================================================================================
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from ls_strategy.distributed.comm import Comm
from ls_strategy.errors import PlanError
from ls_strategy.meta_init.deferred import marking_recorded, note_replaced
from ls_strategy.meta_init.lazy import LazyTensor, give_source, note_owner, source_of
from ls_strategy.meta_init.on_meta import DataOnMeta, OnMeta
from ls_strategy.pretrained.safetensors import read_safetensors
from ls_strategy.pretrained.together import LoadTarget, fill, is_reading_together, reading_together

_MODULE = "transformers.modeling_utils"
_CONTEXT_DEVICE = "get_torch_context_manager_or_global_device"

_REFUSED = {
    "device_map": "every rank stores its shard on its own device. Leave it out",
    "quantization_config": "quantized weights cannot be sharded and trained. Leave it out",
    "load_in_8bit": "quantized weights cannot be sharded and trained. Leave it out",
    "load_in_4bit": "quantized weights cannot be sharded and trained. Leave it out",
    "gguf_file": "ranges are read of safetensors files only. Convert the model: load it once without this strategy, "
    "and call save_pretrained(folder)",
    "tp_plan": "the strategy partitions layers. Leave it out, and set parallel={'tensor': ...} on the strategy",
    "tp_size": "the strategy partitions layers. Leave it out, and set parallel={'tensor': ...} on the strategy",
    "distributed_config": "the strategy shards the model. Leave it out",
}
"""Arguments of ``from_pretrained`` that cannot work, with the reason and the cure."""


@contextmanager
def without_memory(device: torch.device, *, reports: bool = True, draws: bool = True) -> Generator[None, None, None]:
    """Build models on meta, and keep track of the values that they would have.

    What is loaded by ``from_pretrained`` is read later, by every rank its shards. Everything else is done again when a
    parameter gets its memory.

    Args:
        device: where the values are made.
        reports: whether this rank logs missing and unexpected keys.
        draws: as for `OnMeta`.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.device("meta"))
        on_meta = stack.enter_context(OnMeta(device, draws=draws))
        stack.enter_context(DataOnMeta(on_meta))
        if draws:
            stack.enter_context(marking_recorded())
        stack.callback(register_module_parameter_registration_hook(note_replaced).remove)

        _when_imported(stack, lambda module: _replaced(module, on_meta, reports))
        yield


@contextmanager
def with_memory(comm: Comm, device: torch.device) -> Generator[None, None, None]:
    """Build models that every rank needs in full, and read the files of ``from_pretrained`` only once for all ranks."""
    with ExitStack() as stack:
        stack.enter_context(reading_together(comm, device))
        _when_imported(stack, _filled_together)
        yield


def _when_imported(stack: ExitStack, replaced: Callable[[ModuleType], AbstractContextManager[None]]) -> None:
    """Enter ``replaced`` of transformers' module, now or when it is imported, until the stack is left."""

    def replace(module: ModuleType) -> None:
        stack.enter_context(replaced(module))

    if _MODULE in sys.modules:
        replace(sys.modules[_MODULE])
    else:
        finder = _TransformersFinder(replace)
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)


class _TransformersFinder:
    """Finds the module through the other finders, and acts when it has executed."""

    def __init__(self, action: Callable[[ModuleType], None]) -> None:
        self._action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                _act_after(spec.loader, self._action)
                return spec
        return None


def _act_after(loader: Loader, action: Callable[[ModuleType], None]) -> None:
    execute = loader.exec_module

    def execute_and_act(module: ModuleType) -> None:
        execute(module)
        action(module)

    loader.exec_module = execute_and_act  # type: ignore[method-assign]


@contextmanager
def _replaced(module: ModuleType, on_meta: OnMeta, reports: bool) -> Generator[None, None, None]:
    """Replace ``from_pretrained``; inside a call on meta, also the functions that load."""
    base: Any = module.PreTrainedModel
    original = vars(base)["from_pretrained"]

    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        bound = original.__get__(None, cls)
        if torch.empty(0).device.type != "meta":  # built under `with torch.device("cpu")`, or nested in a call
            with on_meta.paused():
                return bound(*args, **kwargs)
        _check_version(module)
        _refuse(cls, kwargs)
        with torch.device("cpu"), _loading(module, reports), on_meta.paused():
            return bound(*args, **kwargs)

    resize = base.resize_token_embeddings

    def resize_token_embeddings(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not _read_embeddings(model):
            return resize(model, *args, **kwargs)
        with torch.device("cpu"), on_meta.paused():
            return resize(model, *args, **kwargs)

    context_device = getattr(module, _CONTEXT_DEVICE, None)

    def device_for_init() -> Any:
        """Let models that are built from a config run their ``_init_weights`` on meta, where it is recorded."""
        found = context_device() if context_device is not None else None
        return None if found is not None and found.type == "meta" and not on_meta.is_paused else found

    base.from_pretrained = classmethod(from_pretrained)
    base.resize_token_embeddings = resize_token_embeddings
    if context_device is not None:
        setattr(module, _CONTEXT_DEVICE, device_for_init)
    try:
        yield
    finally:
        base.from_pretrained = original
        base.resize_token_embeddings = resize
        if context_device is not None:
            setattr(module, _CONTEXT_DEVICE, context_device)


def _read_embeddings(model: Any) -> bool:
    """Give the embeddings of the input and output their values, wherever they are used. Return whether any had none."""
    layers = [layer for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer is not None]
    read: dict[int, torch.nn.Parameter] = {}
    for param in (p for layer in layers for p in layer.parameters(recurse=False)):
        source = source_of(param)
        if source is not None and id(param) not in read:
            value = source.materialize().to(param.dtype)
            read[id(param)] = torch.nn.Parameter(value, requires_grad=param.requires_grad)
    for owner in model.modules():
        for name, param in owner._parameters.items():
            if id(param) in read:
                owner._parameters[name] = read[id(param)]
    return bool(read)


def _check_version(module: ModuleType) -> None:
    convert = getattr(module, "convert_and_load_state_dict_in_model", None)
    loader = sys.modules[convert.__module__] if convert is not None else None
    base: Any = module.PreTrainedModel
    known = isinstance(vars(base).get("_load_pretrained_model"), staticmethod) and hasattr(
        module, "log_state_dict_report"
    )
    if not known or not hasattr(loader, "set_param_for_module"):
        version = getattr(sys.modules.get("transformers"), "__version__", "of an unknown version")
        raise PlanError(
            f"transformers {version} loads models in a way that this version of ls_strategy does not know, so "
            "from_pretrained cannot be used in configure_model at stage 3 and with model parallelism. Install "
            "transformers>=5.1, or load the model under `with torch.device('cpu'):`, in full on every rank."
        )


def _refuse(cls: Any, kwargs: Mapping[str, Any]) -> None:
    for name, reason in _REFUSED.items():
        value = kwargs.get(name)
        if value is not None and value is not False:
            raise PlanError(
                f"{cls.__name__}.from_pretrained({name}={value!r}) in configure_model: {reason}, or load the model "
                "under `with torch.device('cpu'):`."
            )


@contextmanager
def _loading(module: ModuleType, reports: bool) -> Generator[None, None, None]:
    base: Any = module.PreTrainedModel
    loader: Any = sys.modules[module.convert_and_load_state_dict_in_model.__module__]
    load, set_param = vars(base)["_load_pretrained_model"], loader.set_param_for_module
    report = module.log_state_dict_report
    quiet = logging.getLogger("ls_strategy.pretrained.other_ranks")
    quiet.disabled = True

    def load_recorded(
        model: Any, state_dict: Any, checkpoint_files: Sequence[str] | None, load_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if load_config.is_quantized:
            raise PlanError(
                f"{load_config.pretrained_model_name_or_path} holds quantized weights, which cannot be sharded and "
                "trained. Give a folder with weights in floating point, and set precision.frozen to quantize them."
            )
        if state_dict is None and checkpoint_files is not None:
            state_dict, checkpoint_files = _recorded(checkpoint_files), None
        return load.__func__(model, state_dict, checkpoint_files, load_config, *args, **kwargs)

    def set_meta(model: Any, target_name: str, param_value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(param_value, LazyTensor):
            return set_param(model, target_name, param_value, *args, **kwargs)
        path, _, name = target_name.rpartition(".")
        owner = model.get_submodule(path)
        if name not in owner._parameters:
            return set_param(model, target_name, param_value.materialize(), *args, **kwargs)
        empty = torch.empty(param_value.shape, dtype=param_value.dtype, device="meta")
        before = owner._parameters[name]
        result = set_param(model, target_name, empty, *args, **kwargs)
        now = owner._parameters[name]
        if now is not None and now is not before:  # else the shapes differ, which is reported
            give_source(now, param_value)
            note_owner(owner, name, param_value)
        return result

    def report_once(*args: Any, **kwargs: Any) -> Any:
        if not reports:
            kwargs["logger"] = quiet
        return report(*args, **kwargs)

    base._load_pretrained_model = staticmethod(load_recorded)
    loader.set_param_for_module = set_meta
    module.log_state_dict_report = report_once  # type: ignore[attr-defined]
    try:
        yield
    finally:
        base._load_pretrained_model = load
        loader.set_param_for_module = set_param
        module.log_state_dict_report = report  # type: ignore[attr-defined]


def _recorded(files: Sequence[str]) -> dict[str, Tensor]:
    others = [file for file in files if not file.endswith(".safetensors")]
    if others:
        raise PlanError(
            f"from_pretrained in configure_model got {others[0]}, but ranges can be read of safetensors files only. "
            "Convert the folder once, without this strategy: AutoModel.from_pretrained(folder)"
            ".save_pretrained(new_folder); or load the model under `with torch.device('cpu'):`, in full on every rank."
        )
    return read_safetensors(files, recording=True)


@contextmanager
def _filled_together(module: ModuleType) -> Generator[None, None, None]:
    """Let the ranks read safetensors files together, if all files are of that kind. Otherwise change nothing."""
    base: Any = module.PreTrainedModel
    load = vars(base).get("_load_pretrained_model")
    convert = getattr(module, "convert_and_load_state_dict_in_model", None)
    loader = sys.modules[convert.__module__] if convert is not None else None
    known = all(hasattr(loader, name) for name in ("set_param_for_module", "get_device"))
    if not isinstance(load, staticmethod) or not known:
        yield  # a version with another loader, which reads everything on every rank
        return

    def load_together(
        model: Any, state_dict: Any, checkpoint_files: Sequence[str] | None, load_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if state_dict is not None or not checkpoint_files or not _is_plain(checkpoint_files, load_config):
            return load.__func__(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
        with _noting_targets(module, loader, load_config.device_map or {"": "cpu"}):
            return load.__func__(model, _recorded(checkpoint_files), None, load_config, *args, **kwargs)

    base._load_pretrained_model = staticmethod(load_together)
    try:
        yield
    finally:
        base._load_pretrained_model = load


def _is_plain(files: Sequence[str], load_config: Any) -> bool:
    """Return whether this thread reads safetensors files into memory, together with the other ranks."""
    places = (load_config.device_map or {}).values()
    return (
        is_reading_together()
        and all(str(file).endswith(".safetensors") for file in files)
        and load_config.hf_quantizer is None
        and getattr(load_config, "device_mesh", None) is None
        and "disk" not in places
    )


@contextmanager
def _noting_targets(module: Any, loader: Any, device_map: Mapping[str, Any]) -> Generator[None, None, None]:
    """Give parameters memory where they are set, and values when all are set."""
    convert, set_param = module.convert_and_load_state_dict_in_model, loader.set_param_for_module
    targets: list[LoadTarget] = []

    def set_empty(model: Any, target_name: str, param_value: Tensor, *args: Any, **kwargs: Any) -> Any:
        path, _, name = target_name.rpartition(".")
        owner = model.get_submodule(path)
        held = owner._parameters if name in owner._parameters else owner._buffers
        if not isinstance(param_value, LazyTensor):
            return set_param(model, target_name, param_value, *args, **kwargs)
        if name not in held:
            return set_param(model, target_name, param_value.materialize(), *args, **kwargs)
        device = loader.get_device(device_map, target_name, valid_torch_device=True)
        empty = torch.empty(param_value.shape, dtype=param_value.dtype, device=device)
        before = held[name]
        result = set_param(model, target_name, empty, *args, **kwargs)
        now = held[name]
        if now is not None and now is not before:  # else the shapes differ, which is reported
            targets.append(LoadTarget(target_name, now, param_value))
        return result

    def convert_and_fill(*args: Any, **kwargs: Any) -> Any:
        with torch.device("cpu"):
            result = convert(*args, **kwargs)
            fill(targets)
        return result

    module.convert_and_load_state_dict_in_model = convert_and_fill
    loader.set_param_for_module = set_empty
    try:
        yield
    finally:
        module.convert_and_load_state_dict_in_model = convert
        loader.set_param_for_module = set_param
