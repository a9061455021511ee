"""Which boxes a rank writes, and how they come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ls_strategy.checkpoint.files import RankFile, Reader
from ls_strategy.checkpoint.metadata import write_metadata
from ls_strategy.checkpoint.place import CheckpointPath
from ls_strategy.checkpoint.reshard import Contents, SavedTensor, Source, assemble, separate, write_entries
from ls_strategy.errors import CheckpointError
from ls_strategy.layout import FlatLayout, TensorPart
from tests.unit.fake_flats import FakeFlat, fake_flats, full_values, source_of


def joined(shape: tuple[int, ...], sources: list[Source]) -> Tensor:
    """A tensor put together from the boxes of all ranks, which must not overlap or leave a gap."""
    out = torch.full(shape, float("nan"))
    for source in sources:
        for offsets, values in source.boxes():
            target = out[tuple(slice(at, at + size) for at, size in zip(offsets, values.shape, strict=True))]
            assert target.isnan().all(), "two ranks wrote one element"
            target.copy_(values)
    return out


@pytest.mark.parametrize(("slot", "name"), list(enumerate(full_values())))
def test_the_ranks_boxes_make_up_the_parameter(slot: int, name: str) -> None:
    expected = full_values()[name]
    assert torch.equal(joined(tuple(expected.shape), [source_of(flat, slot) for flat in fake_flats()]), expected)


def test_a_parameter_is_split_over_the_ranks() -> None:
    numbers = [sum(values.numel() for _, values in source_of(flat, 0).boxes()) for flat in fake_flats()]
    assert numbers == [12, 3, 0]


def test_a_replica_that_is_not_counted_saves_nothing() -> None:
    flat = fake_flats()[0]
    flat.counted = False
    assert list(source_of(flat, 0).boxes()) == []


def test_boxes_of_tensor_parallel_ranks_have_offsets_in_the_full_parameter() -> None:
    full = torch.arange(24.0).view(4, 6)
    sources = []
    for rank in range(2):
        part = TensorPart.cut((4, 6), 1, rank, 2, sections=(4, 2))
        mine = torch.cat([full[:, first : first + length] for first, length in part.runs], dim=1)
        layout = FlatLayout.pack([("w", part.shape)], 1, parts={"w": part})
        buffer = torch.zeros(layout.numel)
        buffer[: mine.numel()] = mine.flatten()
        sources.append(source_of(FakeFlat(layout, (0, layout.numel), buffer), 0))
    assert torch.equal(joined((4, 6), sources), full)


def collected(flat: FakeFlat) -> tuple[dict[str, Any], Contents]:
    """What Lightning collects on a rank: two weights under three names, and an optimizer."""
    contents = Contents()
    weight = contents.stand_in(source_of(flat, 0), torch.float32)
    moment = contents.stand_in(source_of(flat, 0), torch.float32)
    checkpoint = {
        "epoch": 3,
        "state_dict": {"a": weight, "tied": weight, "buffer": torch.ones(2)},
        "optimizer_states": [{"state": {"a": {"exp_avg": moment}}, "param_groups": [{"lr": 0.1, "params": ["a"]}]}],
    }
    return checkpoint, contents


def test_a_placeholder_has_the_full_shape_and_no_elements() -> None:
    placeholder = Contents().stand_in(source_of(fake_flats()[1], 0), torch.bfloat16)
    assert (placeholder.shape, placeholder.dtype, placeholder.is_meta) == ((3, 5), torch.bfloat16, True)


def test_separate_keeps_small_data_and_names_entries_by_their_keys() -> None:
    """Only placeholders have a source."""
    entries, kept = separate(*collected(fake_flats()[0]))
    assert kept == {"epoch": 3}
    assert [(entry.path, entry.source is not None) for entry in entries] == [
        (("model", "a"), True),
        (("model", "tied"), True),
        (("model", "buffer"), False),
        (("optimizer_0", "state", "a", "exp_avg"), True),
        (("optimizer_0", "param_groups"), False),
    ]


@pytest.mark.parametrize("where", ["state_dict", "mine"])
def test_a_hook_that_computed_with_a_placeholder_is_named(where: str) -> None:
    checkpoint, contents = collected(fake_flats()[0])
    value = {"a": checkpoint["state_dict"]["a"] * 2}
    checkpoint[where] = value if where == "state_dict" else {"deep": {"deeper": value}}
    with pytest.raises(CheckpointError, match=rf"{'model.a' if where == 'state_dict' else 'mine'}: a hook"):
        separate(checkpoint, contents)


@pytest.fixture
def folder(tmp_path: Path) -> Reader:
    """The checkpoint of `collected`, as all ranks write it."""
    place = CheckpointPath(tmp_path)
    items, aliases = [], {}
    for rank, flat in enumerate(fake_flats()):
        file = RankFile(place, f"__{rank}_0.distcp")
        aliases |= write_entries(file, separate(*collected(flat))[0], lambda _, rank=rank: rank == 0)
        file.close()
        items += [(file.name, item) for item in file.items]
    write_metadata(place, items, aliases)
    return Reader(tmp_path, None)


def test_a_saved_tensor_has_the_parameters_values_and_reads_any_range_or_box(folder: Reader) -> None:
    saved, full = SavedTensor(folder, ("model", "a")), full_values()["a"]
    assert torch.equal(saved + 0, full)
    for start, stop in ((0, 15), (4, 11), (7, 7), (14, 15)):
        assert torch.equal(saved.range(start, stop), full.flatten()[start:stop])
    assert torch.equal(saved.box((1, 2), (2, 3)), full[1:3, 2:5])


def test_a_tied_weight_is_written_once_and_unsharded_values_by_the_chosen_rank(folder: Reader) -> None:
    places = folder.metadata.storage_data
    names = ("a", "tied", "buffer")
    chunks = {name: [i for index, i in places.items() if index.fqn == f"model.{name}"] for name in names}
    assert chunks["a"] == chunks["tied"]
    assert {info.relative_path for info in chunks["a"]} == {"__0_0.distcp", "__1_0.distcp"}
    assert [info.relative_path for info in chunks["buffer"]] == ["__0_0.distcp"]


def test_assemble_gives_lightnings_dictionary(folder: Reader) -> None:
    checkpoint = assemble(folder, {"epoch": 3}, weights_only=True)
    assert checkpoint.keys() == {"epoch", "state_dict", "optimizer_states"}
    assert checkpoint["optimizer_states"][0]["param_groups"] == [{"lr": 0.1, "params": ["a"]}]
    assert torch.equal(checkpoint["state_dict"]["tied"] + 0, full_values()["a"])
