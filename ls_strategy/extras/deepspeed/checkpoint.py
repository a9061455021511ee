"""Read checkpoints of DeepSpeed (ZeRO stages 0 to 3, with or without Lightning) as Lightning's dictionary.

Does not need DeepSpeed. Tensors are read where they are used, so that only a part of one is in memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ls_strategy._torch import make_wrapper
from ls_strategy.checkpoint.consolidate import write_file
from ls_strategy.checkpoint.output import Progress
from ls_strategy.checkpoint.source import numbered
from ls_strategy.errors import CheckpointError
from ls_strategy.extras.deepspeed.folder import Files, is_deepspeed, open_save
from ls_strategy.meta_init.lazy import LazyTensor

# Stages 1 and 2 concatenate all parameters of an optimizer group and partition the result over the ranks. Stage 3
# partitions every parameter over the ranks and concatenates the partitions, in sub-groups.


class InParts(LazyTensor):
    """A tensor that is the concatenation of parts of other tensors, up to its size. Read when it is used."""

    portions: list[Tensor]

    @staticmethod
    def __new__(cls: Any, portions: list[Tensor], shape: Sequence[int], dtype: torch.dtype) -> InParts:
        self = make_wrapper(cls, shape, dtype)
        self.portions = portions
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"InParts(shape={tuple(self.shape)}, dtype={self.dtype}, portions={len(self.portions)})"

    @override
    def load(self, start: int, stop: int) -> Tensor:
        found, at = [], 0
        for portion in self.portions:
            first, last = max(start - at, 0), min(stop - at, portion.numel())
            if first < last:
                found.append(portion[first:last].to(self.dtype))
            at += portion.numel()
        return torch.cat(found) if found else torch.empty(0, dtype=self.dtype)


@dataclass(frozen=True)
class ParamPlace:
    """Location of the elements of one parameter."""

    shape: tuple[int, ...]
    group: int
    ranges: tuple[tuple[int, int, int, int], ...]  # ``(rank, buffer, start, stop)``, in the order of the elements

    def portions(self, buffers: Callable[[int, int], Tensor]) -> list[Tensor]:
        """Return views of the elements, in order. ``buffers(rank, number)`` returns a flat buffer."""
        return [buffers(rank, number).reshape(-1)[start:stop] for rank, number, start, stop in self.ranges]


def places(files: Files) -> dict[str, ParamPlace]:
    """Return the location of every trainable parameter, by name, in the optimizer's order."""
    groups: list[Mapping[str, Any]] = files.models[0]["param_shapes"]
    groups = [groups] if isinstance(groups, Mapping) else groups
    return _places_in_slices(files, groups) if files.stage == 3 else _places_end_to_end(files, groups)


def _places_end_to_end(files: Files, groups: Sequence[Mapping[str, Any]]) -> dict[str, ParamPlace]:
    found = {}
    paddings = files.parts[0].get("param_alignment_paddings")
    for number, shapes in enumerate(groups):
        sizes = [part["single_partition_of_fp32_groups"][number].numel() for part in files.parts]
        at = 0
        for i, (name, shape) in enumerate(shapes.items()):
            stop = at + prod(shape)
            ranges = tuple((rank, number, a, b) for rank, a, b in _within(sizes, at, stop))
            found[name] = ParamPlace(tuple(shape), number, ranges)
            at = stop + (paddings[number][i] if paddings is not None else 0)
        if at > sum(sizes):
            raise CheckpointError(
                f"{files.folder}: the parameters of group {number} have {at} elements, but the ranks' files have "
                f"{sum(sizes)}. A file belongs to another save. Copy all files of one save."
            )
    return found


def _within(sizes: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield ``(buffer, start, stop)`` of a range of the concatenation of buffers of these sizes."""
    first = 0
    for number, size in enumerate(sizes):
        if start < first + size and first < stop:
            yield number, max(start - first, 0), min(stop - first, size)
        first += size


def _places_in_slices(files: Files, groups: Sequence[Mapping[str, Any]]) -> dict[str, ParamPlace]:
    sizes = [buffer.numel() for buffer in files.parts[0]["fp32_flat_groups"]]
    ranks, found, at = len(files.parts), {}, 0
    for number, shapes in enumerate(groups):
        for name, shape in shapes.items():
            numel = prod(shape)
            each = -(-numel // ranks)
            ranges = []
            for rank in range(ranks):
                stop = at + min(each, max(numel - rank * each, 0))
                ranges += [(rank, i, a, b) for i, a, b in _within(sizes, at, stop) if at < stop]
            found[name] = ParamPlace(tuple(shape), number, tuple(ranges))
            at += each
    if at != sum(sizes):
        raise CheckpointError(
            f"{files.folder}: the parameters have {at} elements per rank, but the files have {sum(sizes)}. DeepSpeed's "
            "checkpoints do not contain states on NVMe. Save again with offload_optimizer.device = cpu."
        )
    return found


__all__ = ["consolidate_deepspeed", "is_deepspeed", "read_deepspeed", "read_if_deepspeed"]

_log = logging.getLogger(__name__)

_OWN_KEYS = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names"),
    *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "num_experts"),
    *("checkpoint_parallel_dimensions", "universal_checkpoint_info", "ds_config", "ds_version", "autoep_layers"),
}
"""Keys that DeepSpeed writes into the model states. All others are the caller's, such as Lightning's."""

_FOREIGN_SETTINGS = ("params", "step", "bias_correction")
"""Entries of parameter groups that torch's optimizers do not have."""

_PREFIX = "_forward_module."  # prefix from the module wrapper of Lightning's older strategies
Rename = Sequence[tuple[str, str]]
"""``(old, new)``: prefixes of names and their replacements. ``("", "model.")`` adds one."""


def read_if_deepspeed(path: Any, *, weights_only: bool | None) -> dict[str, Any] | None:
    """Return the checkpoint in a folder of DeepSpeed; None for anything else. Not collective.

    Raises:
        CheckpointError: the save is incomplete or not supported.
    """
    return read_deepspeed(path, by_name=True, weights_only=weights_only) if is_deepspeed(path) else None


def read_deepspeed(
    path: str | os.PathLike[str], *, by_name: bool = False, rename: Rename = (), weights_only: bool | None = None
) -> dict[str, Any]:
    """Read a checkpoint of DeepSpeed as Lightning's dictionary. Tensors are read when they are used. Not collective.

    Args:
        path: The folder given to ``save_checkpoint``, of which the newest save is read, or the folder of one save.
        by_name: Key optimizer states by parameter name, as our folders do. Otherwise number them as torch does.
        rename: Prefixes of parameter names to replace. The first matching one applies.
        weights_only: Build only objects that torch considers safe; DeepSpeed's own are never built. False builds all
            objects: only for checkpoints that you trust. None: torch's default, True.

    Returns:
        fp32 ``state_dict``, and ``optimizer_states`` and ``lr_schedulers`` where they exist. Under Lightning, also what
        Lightning saved. A run of DeepSpeed alone has no loops: Lightning continues with weights, moments and learning
        rate, and counts epochs and steps from 0.

    Raises:
        CheckpointError: Files are missing, were written with model parallelism, or contain unsafe objects.
    """
    files = open_save(path, weights_only=weights_only is not False)
    model = files.models[0]
    names = partial(_renamed, rename=rename)
    checkpoint = {key: value for key, value in model.items() if key not in _OWN_KEYS}
    where = places(files) if files.parts else {}
    checkpoint["state_dict"] = {names(name): value for name, value in _weights(files, where).items()}
    states = _optimizer_states(files, where, names)
    if states is not None:
        checkpoint["optimizer_states"] = [states if by_name else numbered(states, str(path))]
    scale = _loss_scale(files)
    if scale is not None:
        checkpoint.setdefault("MixedPrecision", scale)
    checkpoint.setdefault("epoch", 0)
    checkpoint.setdefault("global_step", int(model.get("global_steps") or 0))
    schedule = model.get("lr_scheduler")
    checkpoint.setdefault("lr_schedulers", [schedule] if isinstance(schedule, dict) else [])
    checkpoint.setdefault("pytorch-lightning_version", "2.0.0")  # needs no migrations
    return checkpoint


def _renamed(name: str, rename: Rename) -> str:
    name = name.removeprefix(_PREFIX)
    return next((new + name[len(old) :] for old, new in rename if name.startswith(old)), name)


def _weights(files: Files, where: Mapping[str, ParamPlace]) -> dict[str, Any]:
    model = files.models[0]
    if not files.parts:
        return {name: _in_fp32(value) for name, value in model["module"].items()}
    key = "fp32_flat_groups" if files.stage == 3 else "single_partition_of_fp32_groups"
    found: dict[str, Any] = {}
    for name, place in where.items():
        portions = place.portions(lambda rank, number: files.parts[rank][key][number])
        found[name] = InParts(portions, place.shape, torch.float32)
    for name, shape in (model.get("frozen_param_shapes") or {}).items():
        holders = files.models if files.stage == 3 else files.models[:1]
        portions = [holder["frozen_param_fragments"][name].reshape(-1) for holder in holders]  # the last is padded
        dtype = torch.float32 if portions[0].is_floating_point() else portions[0].dtype
        found[name] = InParts(portions, shape, dtype)
    for name, other in (model.get("shared_params") or {}).items():
        if other in found:
            found[name] = found[other]
    buffers = set(model["buffer_names"])
    for name, value in model["module"].items():
        # Stage 1 has frozen parameters only here. Stage 3 has empty tensors here.
        if name in buffers or (name not in found and files.stage != 3):
            found[name] = _in_fp32(value)
    order = {name: i for i, name in enumerate(model["module"])}  # the module's order
    return dict(sorted(found.items(), key=lambda pair: order.get(pair[0], len(order))))


def _in_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _optimizer_states(
    files: Files, where: Mapping[str, ParamPlace], names: Callable[[str], str]
) -> dict[str, Any] | None:
    """Return the states by parameter name, or None if their form is unknown."""
    if not files.parts:
        return None
    key = "optimizer_state_dict" if files.stage == 3 else "base_optimizer_state"
    bases: list[Any] = [part.get(key) for part in files.parts]
    if not all(isinstance(base, Mapping) and base.get("state") for base in bases):
        _log.warning("%s: the optimizer states have no known form. Only weights are loaded.", files.folder)
        return None
    numbers = [number for group in bases[0]["param_groups"] for number in group["params"]]
    kept: dict[str, dict[str, Any]] = {}
    for name, place in where.items():
        if not place.ranges:
            continue
        first_rank, first_buffer, *_ = place.ranges[0]
        entries = {}
        for entry, value in bases[first_rank]["state"].get(numbers[first_buffer], {}).items():
            if isinstance(value, Tensor) and value.dim():
                portions = place.portions(lambda r, i, e=entry: bases[r]["state"][numbers[i]][e])
                entries[entry] = InParts(portions, place.shape, value.dtype)
            else:
                entries[entry] = torch.tensor(float(value)) if entry == "step" else value
        kept[names(name)] = entries
    groups = []
    for number, group in enumerate(bases[0]["param_groups"]):
        settings = {k: v for k, v in group.items() if k not in _FOREIGN_SETTINGS}
        members = _optimizer_order([name for name, place in where.items() if place.group == number], files)
        groups.append({**settings, "params": [names(name) for name in members]})
    return {"state": kept, "param_groups": groups}


def _optimizer_order(names: list[str], files: Files) -> list[str]:
    """Return a group's parameters in the optimizer's order, from the order of the flat buffer."""
    zero = (files.models[0].get("ds_config") or {}).get("zero_optimization")
    if files.stage == 3 or not isinstance(zero, Mapping) or not zero.get("round_robin_gradients"):
        return names
    ranks = len(files.parts)  # the buffer has parameters 0, ranks, 2 * ranks, ..., then 1, ranks + 1, ...
    laid = [i for first in range(ranks) for i in range(first, len(names), ranks)]
    given = dict(zip(laid, names, strict=True))
    return [given[i] for i in range(len(names))]


def _loss_scale(files: Files) -> dict[str, Any] | None:
    """Return the dynamic loss scale in the form of ``torch.amp.GradScaler``, which all fp16 precision plugins read."""
    if not files.parts or not files.parts[0].get("dynamic_loss_scale"):
        return None
    scaler = vars(files.parts[0]["loss_scaler"])
    if "cur_scale" not in scaler:
        return None
    return {
        "scale": float(scaler["cur_scale"]),
        "growth_factor": float(scaler.get("scale_factor", 2.0)),
        "backoff_factor": 1 / float(scaler.get("scale_factor", 2.0)),
        "growth_interval": int(scaler.get("scale_window", 1000)),
        "_growth_tracker": max(0, int(scaler.get("cur_iter", 0)) - int(scaler.get("last_overflow_iter", -1)) - 1),
    }


def consolidate_deepspeed(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    weights_only: bool = False,
    rename: Rename = (),
    force: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write a checkpoint of DeepSpeed as one ``.ckpt`` file, as `consolidate` does with ours.

    Builds objects in the checkpoint, as ``torch.load(weights_only=False)`` does. Use it only for checkpoints that you
    trust. See `read_deepspeed` for ``source`` and ``rename``, and `consolidate` for the rest.
    """
    read = partial(read_deepspeed, source, rename=rename, weights_only=False)
    write_file(read, source, target, weights_only=weights_only, force=force, progress=progress)
