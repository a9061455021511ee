"""A batch of a loader, of which only the shapes matter, without using up what the loader has to give."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, cast

from torch.utils.data import DataLoader, IterableDataset

from ls_strategy.errors import PlanError


def sample_batch(loader: Any) -> Any:
    """One batch. Starts no workers, and asks no sampler; random numbers may be drawn.

    Args:
        loader: a DataLoader, of which the first samples are collated; or any iterable that begins anew for each
            ``iter``, of which it is the first element.

    Raises:
        PlanError: there is no batch in it, or what is taken from it now would be missing later.
    """
    if not isinstance(loader, DataLoader):
        return _first(loader)
    size: int | None = getattr(loader.batch_sampler, "batch_size", loader.batch_size)
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        samples: Any = _first(dataset) if size is None else list(islice(_anew(dataset), size))
    elif loader.batch_sampler is None:
        samples = dataset[0]
    else:
        indices = _first(loader.batch_sampler) if size is None else list(range(min(size, len(dataset))))
        several = getattr(dataset, "__getitems__", None)
        samples = several(indices) if callable(several) else [dataset[i] for i in indices]
    return loader.collate_fn(samples)


def _anew(source: Any) -> Any:
    found = iter(cast("Iterable[Any]", source))
    if found is source:
        raise PlanError(
            f"a {type(source).__name__} gives every batch once, so that a first one, to count operations with, would "
            'be missing in training. Use parallel.pipeline.partition="parameters".'
        )
    return found


def _first(source: Any) -> Any:
    for element in _anew(source):
        return element
    raise PlanError(f"a {type(source).__name__} has no batch to count operations with. Give it one.")
