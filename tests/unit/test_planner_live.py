"""Live bytes are those of the storages that operations made."""

from __future__ import annotations

import torch

from ls_strategy.extras.planner.live import StorageWatch
from tests.live_bytes import LiveBytes


def test_live_bytes_follow_views_resizes_and_ends():
    plain = torch.UntypedStorage.resize_
    with LiveBytes() as live:
        a = torch.zeros(1000)
        view = a[3:]
        del a
        assert live.now == 4000
        view.untyped_storage().resize_(0)
        assert live.now == 0
        view.untyped_storage().resize_(800)
        assert (live.now, live.peak) == (800, 4000)
        del view
        assert live.now == 0
    assert torch.UntypedStorage.resize_ is plain


def test_a_storage_is_counted_once_and_given_back_when_its_last_view_dies():
    changes: list[tuple[int, int]] = []
    with StorageWatch(lambda number, change: changes.append((number, change))):
        a = torch.zeros(10)
        b = a[2:].view(4, 2)
        del a
        assert changes == [(0, 40)]
        del b
    assert changes == [(0, 40), (0, -40)]


def test_tensors_from_before_have_no_number():
    before = torch.zeros(10)
    with StorageWatch(lambda number, change: None) as watch:
        after = torch.zeros(10)
        assert watch.number_of(before) is None
        assert watch.number_of(after) == 0
