"""Trusted runs are computed once: by a worker of pytest, and whichever tests compare with them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

from ls_strategy.testing import spawn

T = TypeVar("T")
_RESULTS: dict[bytes, bytes] = {}


def once(fn: Callable[..., T], world_size: int, *args: object, **options: Any) -> list[T]:
    """Return what `spawn` returns, without starting ranks when this worker has computed the same call before.

    The call is known by its pickled arguments, so equal arguments may be computed twice, and others are never mixed up.
    Everyone gets a copy of the results, tensors included. The first one waits with ``timeout_s``.

    Args:
        fn: depends on its arguments alone, and leaves nothing behind that a test needs: no files.
        world_size: number of ranks.
        *args: of ``fn``.
        **options: of `spawn`. Trainers make their own process group unless it says ``init_process_group=True``.
    """
    options = {"init_process_group": False, **options}
    call = pickle.dumps((fn, world_size, args, options))
    if call not in _RESULTS:
        _RESULTS[call] = pickle.dumps(spawn(fn, world_size, *args, **options))
    return pickle.loads(_RESULTS[call])
