"""Run a module's ``training_step`` without its Trainer: logging is dropped, and the caller runs backward.

Works by method names, with any module that has them, such as a LightningModule.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ls_strategy import device as dev
from ls_strategy._torch import tree_iter, tree_map
from ls_strategy.errors import PlanError
from ls_strategy.extras.planner.trace import Step


class _StandIn:
    """Replaces an optimizer or scheduler in manual optimization, and does nothing."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    zero_grad = toggle_model = step


@contextmanager
def without_trainer(module: nn.Module, optimizers: list[Optimizer]) -> Generator[None, None, None]:
    """Replace the module's calls to its Trainer by calls that do nothing, until the exit."""

    def nothing(*_: Any, **__: Any) -> None:
        return None

    stand_ins: list[Any] = [_StandIn(o) for o in optimizers]
    first = stand_ins[0] if len(stand_ins) == 1 else stand_ins
    replaced: dict[str, Callable[..., Any]] = dict.fromkeys(
        ("log", "log_dict", "print", "clip_gradients", "toggle_optimizer", "untoggle_optimizer"), nothing
    )
    replaced |= {"optimizers": lambda *_, **__: first, "lr_schedulers": lambda *_: _StandIn(None)}
    try:
        for name, stand_in in replaced.items():
            if hasattr(type(module), name):
                object.__setattr__(module, name, stand_in)
        yield
    finally:
        for name in replaced:
            module.__dict__.pop(name, None)


def training_step(module: Any, optimizers: list[Optimizer]) -> Step:
    """Return a step that runs backward on the loss of ``training_step``, or where it calls ``manual_backward``."""

    def step(batch: Any, backward: Callable[[Tensor], None]) -> None:
        module.train()
        with without_trainer(module, optimizers):
            if not getattr(module, "automatic_optimization", True):
                object.__setattr__(module, "manual_backward", lambda loss, *_, **__: backward(loss))
                try:
                    module.training_step(batch, 0)
                finally:
                    del module.manual_backward
                return
            backward(_loss_of(module.training_step(batch, 0)))

    return step


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise PlanError(
            f"training_step returned {type(output).__name__} for the first batch, but it must return a loss, or a "
            "mapping with one under 'loss'."
        )
    return loss


def first_batch(loader: Any) -> Any:
    """Return a batch as the loader creates it: its first samples, collated, in this process. No sampler is used.

    The random state is restored afterwards.

    Raises:
        PlanError: the loader is empty.
    """
    loader = getattr(loader, "iterables", loader)  # of a CombinedLoader
    if isinstance(loader, Mapping):
        return {name: first_batch(each) for name, each in loader.items()}
    if isinstance(loader, (list, tuple)):
        return [first_batch(each) for each in loader]
    devices = {torch.device("cpu"), *([dev.current()] if dev.is_in_use() else [])}
    states = {device: dev.random_state(device) for device in devices}
    try:
        samples = _samples(loader)
        return next(iter(loader)) if samples is None else samples
    except StopIteration:
        raise PlanError("Got training data without a batch to plan for. Check its length and batch size.") from None
    finally:
        for device, state in states.items():
            dev.set_random_state(state, device)


def _samples(loader: Any) -> Any:
    """Return the first collated samples; None if the loader is not torch's, or batches in another way."""
    data, collate = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if data is None or collate is None or not isinstance(size, int):
        return None
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        size = min(size, len(data))
        if not size:
            raise StopIteration
        get_all: Any = getattr(data, "__getitems__", None)  # as torch's loader fetches a batch
        return collate(get_all(list(range(size))) if callable(get_all) else [data[i] for i in range(size)])
    samples = list(itertools.islice(iter(data), size))
    if not samples:
        raise StopIteration
    return collate(samples)


# --- the batch of a plan: its samples, its tokens, and the same batch with others -------------------------------------


def rows_of(batch: Any) -> int:
    """Return the number of samples of a batch: the rows of its first tensor."""
    return next((len(leaf) for leaf in tree_iter(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)


def length_of(batch: Any) -> int | None:
    """Return the tokens of a sample: the second dimension of the first tensor that has one; None without."""
    return next((leaf.shape[1] for leaf in tree_iter(batch) if isinstance(leaf, Tensor) and leaf.dim() > 1), None)


def resized(batch: Any, samples: int) -> Any:
    """Return an empty batch of another number of samples: tensors with a row per sample get as many rows."""
    rows = rows_of(batch)

    def other(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or len(leaf) != rows:
            return leaf
        return leaf.new_zeros((samples, *leaf.shape[1:]))

    return tree_map(other, batch)


def of_length(batch: Any, tokens: int) -> Any:
    """Return an empty batch with samples of another length: in tensors whose second dimension is that of the first.

    A mask for pairs of tokens changes in both dimensions.
    """
    length = length_of(batch)

    def other(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() < 2:
            return leaf
        shape = list(leaf.shape)
        is_mask = leaf.dim() == 4 or (leaf.dim() > 2 and leaf.dtype == torch.bool)
        for dim in (1, *((leaf.dim() - 2, leaf.dim() - 1) if is_mask and shape[-1] == shape[-2] else ())):
            shape[dim] = tokens if shape[dim] == length else shape[dim]
        return leaf.new_zeros(shape)

    return tree_map(other, batch)


def batch_bytes(batch: Any) -> int:
    """Return the bytes of a batch."""
    return sum(leaf.nbytes for leaf in tree_iter(batch) if isinstance(leaf, Tensor))
