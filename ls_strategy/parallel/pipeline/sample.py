"""A sample batch of a data loader, for its shapes, that leaves all data of the loader for training."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, cast

from torch.utils.data import DataLoader, IterableDataset

from ls_strategy.errors import PlanError


def sample_batch(loader: Any) -> Any:
    """Return one batch. Starts no workers and does not use the sampler; random numbers may be drawn.

    Args:
        loader: A DataLoader, of which the first samples are collated; or any iterable that starts again for each
            ``iter``, of which the first element is returned.

    Raises:
        PlanError: There is no batch, or the sample would be missing in training.
    """
    if not isinstance(loader, DataLoader):
        return _first(loader)
    size: int | None = getattr(loader.batch_sampler, "batch_size", loader.batch_size)
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        samples: Any = _first(dataset) if size is None else list(islice(_restart(dataset), size))
    elif loader.batch_sampler is None:
        samples = dataset[0]
    else:
        indices = _first(loader.batch_sampler) if size is None else list(range(min(size, len(dataset))))
        get_all = getattr(dataset, "__getitems__", None)
        samples = get_all(indices) if callable(get_all) else [dataset[i] for i in indices]
    return loader.collate_fn(samples)


def _restart(source: Any) -> Any:
    found = iter(cast("Iterable[Any]", source))
    if found is source:
        raise PlanError(
            f"a {type(source).__name__} gives every batch once, so a batch that is used to count operations would be "
            'missing in training. Use parallel.pipeline.partition="parameters".'
        )
    return found


def _first(source: Any) -> Any:
    for element in _restart(source):
        return element
    raise PlanError(
        f"a {type(source).__name__} has no batch to count operations with. Add data, or use "
        'parallel.pipeline.partition="parameters".'
    )
