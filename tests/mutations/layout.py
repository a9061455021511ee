"""Where elements are: slots, shards, parts of tensors, and which parameters form a unit."""

from __future__ import annotations

from tests.mutations import Mutation

LAYOUT = (
    Mutation(
        "parts of a tensor whose shares are uneven begin without the offset of the remainder",
        "ls_strategy/layout.py",
        "first = index * low + min(index, more)",
        "first = index * low",
        ("tests/unit/test_tensor_part.py::test_parts_make_up_the_whole_and_copies_are_alike",),
    ),
    Mutation(
        "a part of a tensor has the wrong place in the full parameter",
        "ls_strategy/layout.py",
        "lo, hi - lo, first + lo - at",
        "lo, hi - lo, first + lo",
        ("tests/unit/test_tensor_part.py::test_boxes_of_a_part_are_boxes_of_the_whole",),
    ),
    Mutation(
        "the box of full rows of a range is off by one row",
        "ls_strategy/layout.py",
        "Box((first_full, *zeros), ",
        "Box((first_full + 1, *zeros), ",
        ("tests/unit/test_commit.py::test_boxes_tile_the_range_in_order",),
    ),
    Mutation(
        "a block of exactly min_unit_numel elements is no unit",
        "ls_strategy/zero/setup/partition.py",
        "sizes[block_name] >= max(min_unit_numel, 1)",
        "sizes[block_name] > max(min_unit_numel, 1)",
        ("tests/unit/test_partition.py",),
    ),
    Mutation(
        "ranks keep their own first values instead of taking rank 0's",
        "ls_strategy/zero/flat/initial.py",
        "    flat.comm.broadcast_(buffer)\n    return buffer",
        "    return buffer",
        ("tests/dist/test_init.py::test_all_ranks_start_from_the_values_of_rank_0",),
    ),
    Mutation(
        "buffers of the model are never broadcast",
        "ls_strategy/engine.py",
        "            self.broadcast_buffers()\n        self._broadcast",
        "            pass\n        self._broadcast",
        ("tests/unit/test_engine.py::test_buffers_are_those_of_rank_0_in_every_step_that_asks_for_it",),
    ),
)
