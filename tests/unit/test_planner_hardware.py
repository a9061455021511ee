"""Sizes, and the room that hardware leaves for tensors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ls_strategy.errors import ConfigError
from ls_strategy.extras.planner.hardware import Hardware, _free_on_nvme
from ls_strategy.extras.planner.search import _far
from ls_strategy.extras.planner.sizes import parse_bytes, show_bytes
from ls_strategy.host_memory import _left_in_control_group


@pytest.mark.parametrize("text", ["80 bananas", "", "GB", "-1GB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="is not a size"):
        parse_bytes(text)


def test_sizes_are_shown_and_read():
    assert [parse_bytes(t) for t in ("12", "1kB", "1.5GiB", "2T")] == [12, 1000, 1610612736, 2 * 10**12]
    assert [show_bytes(n) for n in (0, 999, 1e6, 7.5e10)] == ["0 B", "999 B", "1 MB", "75 GB"]


def test_a_device_keeps_a_share_and_a_constant():
    hardware = Hardware(device_memory=100 << 30)
    assert hardware.device_room == int((100 << 30) * 0.92) - (1 << 30)


def test_ranks_on_the_cpu_share_the_hosts_memory():
    hardware = Hardware(ranks=4, ranks_per_node=2, device="cpu", host_memory=64 << 30, reserved_bytes=0)
    assert hardware.device_room == int((32 << 30) * 0.92)


def test_ranks_of_a_node_share_its_host_memory_and_nvme():
    hardware = Hardware(ranks=16, ranks_per_node=8, host_memory=80, drive=80, reserved_share=0.0, reserved_bytes=0)
    assert (hardware.host_room, hardware.drive_room) == (10, 10)


def test_a_run_smaller_than_a_node_shares_among_its_own_ranks():
    assert Hardware(ranks=2, ranks_per_node=8, drive=80).drive_room == 40


def test_unknown_memory_leaves_room_unknown():
    hardware = Hardware(drive=None)
    assert (hardware.device_room, hardware.host_room, hardware.drive_room) == (None, None, None)


def test_no_ranks_are_refused():
    with pytest.raises(ConfigError, match="Got 0 ranks"):
        Hardware(ranks=0)


def test_a_control_group_leaves_its_limit_minus_its_use(tmp_path):
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert _left_in_control_group(tmp_path) == 600


@pytest.mark.parametrize("limit", ["max", "nonsense"])
def test_a_control_group_without_a_limit_is_unknown(tmp_path, limit):
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text("400")
    assert _left_in_control_group(tmp_path) is None


def test_a_folder_to_be_created_has_the_space_of_the_one_above(tmp_path):
    free = _free_on_nvme(tmp_path / "a" / "b")
    assert free is not None
    assert free > 0


def test_nothing_leaves_the_only_node():
    def far(ranks: int, stages: int) -> int:
        parallel = SimpleNamespace(tensor=1, context=1, expert=1, pipeline=stages)
        return _far("pipeline", 1000, SimpleNamespace(parallel=parallel, ranks=ranks, node_size=8))

    assert [far(8, stages) for stages in (1, 2, 4, 8)] == [0, 0, 0, 0]
    assert far(16, 2) == 1000
    assert 0 < far(16, 4) < 1000
