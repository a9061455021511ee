"""Headers of safetensors files: what the package refuses is refused, and the rest has the package's values."""

from __future__ import annotations

import copy
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ls_strategy import load_safetensors
from ls_strategy.checkpoint.files import as_bytes
from ls_strategy.checkpoint.safetensors import DTYPES
from ls_strategy.errors import CheckpointError
from ls_strategy.pretrained.safetensors import read_safetensors
from tests.unit.checkpoint_folders import in_time

Header = dict[str, Any]


def with_header(path: Path, text: str | bytes, data: bytes = b"") -> Path:
    raw = text.encode() if isinstance(text, str) else text
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def entry(begin: int, end: int, shape: Any = (2, 2), dtype: Any = "F32") -> Header:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


DATA = as_bytes(torch.arange(1.0, 9.0)).tobytes()
"""Of the tensors a and b, of 16 bytes each."""

B = entry(16, 32)

DAMAGED: dict[str, tuple[str, bytes]] = {
    "one range twice": (json.dumps({"a": entry(0, 16), "b": entry(0, 16)}), DATA[:16]),
    "ranges that overlap": (json.dumps({"a": entry(0, 16), "b": entry(8, 24)}), DATA[:24]),
    "a hole": (json.dumps({"a": entry(0, 16), "b": entry(32, 48)}), DATA + DATA[:16]),
    "a hole at the start": (json.dumps({"b": B}), DATA),
    "trailing bytes": (json.dumps({"a": entry(0, 16), "b": B}), DATA + b"x"),
    "only trailing bytes": ("{}", b"x"),
    "a negative offset": (json.dumps({"a": entry(-16, 0), "b": B}), DATA),
    "a minus zero": (json.dumps({"a": entry(0, 16), "b": B}).replace("[0,", "[-0,"), DATA),
    "an end before the beginning": (json.dumps({"a": entry(32, 16), "b": B}), DATA),
    "a range beyond the file": (json.dumps({"a": entry(0, 16), "b": entry(16, 48)}), DATA),
    "huge offsets": (json.dumps({"a": entry(2**70, 2**70 + 16), "b": B}), DATA),
    "more digits than a number may have": ('{"a": ' + "9" * 5000 + "}", DATA),
    "negative sizes": (json.dumps({"a": entry(0, 16, [-2, -2]), "b": B}), DATA),
    "huge sizes": (json.dumps({"a": entry(0, 16, [2**62, 16]), "b": B}), DATA),
    "sizes that overflow to nothing": (json.dumps({"a": entry(0, 0, [2**32, 2**32]), "b": entry(0, 32, [8])}), DATA),
    "no elements of a huge size": (json.dumps({"a": entry(0, 0, [0, 2**62, 2**62]), "b": entry(0, 32, [8])}), DATA),
    "a bool as offset": (json.dumps({"a": entry(False, 16), "b": B}), DATA),
    "a bool as size": (json.dumps({"a": entry(0, 16, [True, 4]), "b": B}), DATA),
    "sizes with a point": (json.dumps({"a": entry(0, 16, [2.0, 2.0]), "b": B}), DATA),
    "offsets with a point": (json.dumps({"a": entry(0.0, 16.0), "b": B}), DATA),  # type: ignore[arg-type]
    "a string as size": (json.dumps({"a": {**entry(0, 16), "shape": "22"}, "b": B}), DATA),
    "no shape": (json.dumps({"a": {"dtype": "F32", "data_offsets": [0, 16]}, "b": B}), DATA),
    "three offsets": (json.dumps({"a": {**entry(0, 16), "data_offsets": [0, 16, 16]}, "b": B}), DATA),
    "an unknown dtype": (json.dumps({"a": entry(0, 16, dtype="F31"), "b": B}), DATA),
    "a list as dtype": (json.dumps({"a": entry(0, 16, dtype=["F32"]), "b": B}), DATA),
    "a dtype of another size": (json.dumps({"a": entry(0, 16, dtype="F64"), "b": B}), DATA),
    "a name twice": (json.dumps({"a": entry(0, 16), "c": entry(0, 16), "b": B}).replace('"c"', '"a"'), DATA),
    "a key twice": (json.dumps({"a": entry(0, 16), "b": B}).replace('"F32"', '"F16", "dtype": "F32"', 1), DATA),
    "half a surrogate pair": (json.dumps({"\ud800": entry(0, 32, [8])}), DATA),
    "a list as header": ("[1]", DATA),
    "a list as entry": (json.dumps({"a": [1], "b": B}), DATA),
    "nothing as entry": (json.dumps({"a": None, "b": B}), DATA),
    "metadata of numbers": (json.dumps({"__metadata__": {"x": 1}, "a": entry(0, 16), "b": B}), DATA),
    "metadata that is a list": (json.dumps({"__metadata__": [], "a": entry(0, 16), "b": B}), DATA),
    "nesting without end": ("[" * 200_000, DATA),
    "an entry without end": ('{"a": ' + "[" * 300 + "]" * 300 + "}", DATA),
    "not a number": ('{"a": NaN}', DATA),
    "no JSON": ("\xff" * 8, DATA),
    "a byte order mark": ("\ufeff" + json.dumps({"a": entry(0, 16), "b": B}), DATA),
    "no header": ("", DATA),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_header_is_named(tmp_path: Path, damage: str) -> None:
    path = with_header(tmp_path / "x.safetensors", *DAMAGED[damage])
    with pytest.raises(
        CheckpointError, match=r"x\.safetensors.*\. (Copy it again|Convert the file to one of these)\.$"
    ):
        read_safetensors(path)


def test_what_is_damaged_loads_nothing(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2, 2))

    model = Two()
    good = with_header(tmp_path / "good.safetensors", json.dumps({"a": entry(0, 16), "b": B}), DATA)
    bad = with_header(tmp_path / "bad.safetensors", *DAMAGED["ranges that overlap"])
    with pytest.raises(CheckpointError, match=r"puts b at bytes \[8, 24\) of 24, but 16 is where"):
        load_safetensors(model, bad)
    assert not model.a.any()
    assert not model.b.any()
    load_safetensors(model, good)
    assert model.b.flatten().tolist() == [5.0, 6.0, 7.0, 8.0]


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63, 2**64 - 1])
def test_lengths_of_headers(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + DATA)
    with pytest.raises(CheckpointError, match="is not a safetensors file, or is damaged"):
        read_safetensors(path)


# --- what is no file -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["file", "index", "named by an index", "read later"])
def test_pipes_are_not_waited_for(tmp_path: Path, place: str) -> None:
    path = tmp_path / "x.safetensors"
    index = tmp_path / "model.safetensors.index.json"
    if place == "index":
        os.mkfifo(index)
        with_header(path, json.dumps({"a": entry(0, 16), "b": B}), DATA)
    elif place == "read later":
        with_header(path, json.dumps({"a": entry(0, 16), "b": B}), DATA)
        found = read_safetensors(path)
        path.unlink()
        os.mkfifo(path)
        error = in_time(found["a"].sum)
        assert isinstance(error, CheckpointError)
        return
    else:
        os.mkfifo(path)
    if place == "named by an index":
        index.write_text('{"weight_map": {"a": "x.safetensors"}}')
    error = in_time(lambda: read_safetensors(path if place == "file" else tmp_path))
    assert isinstance(error, CheckpointError)
    assert "is a pipe or a device" in str(error)


def test_devices_and_folders_are_refused(tmp_path: Path) -> None:
    for device in ("/dev/zero", "/dev/null"):
        with pytest.raises(CheckpointError, match="is a pipe or a device, but only files are read"):
            read_safetensors(device)
    (tmp_path / "x.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="Is a directory"):
        read_safetensors(tmp_path)
    with pytest.raises(CheckpointError, match="is missing"):
        read_safetensors(tmp_path / "y.safetensors")
    with pytest.raises(CheckpointError, match="is not a path"):
        read_safetensors("x\0y")


# --- the same as the package -----------------------------------------------------------------------------------------


KNOWN = [dtype for dtype, name in DTYPES.items() if name in ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "U8")]
"""Dtypes that old versions of the package read too."""


def some_file(chance: random.Random) -> tuple[Header, bytes]:
    """A header as other programs write it, and its data."""
    header: Header = {"__metadata__": {"format": "pt"}} if chance.random() < 0.5 else {}
    at, names = 0, [f"layers.{i}.weight" for i in range(chance.randint(1, 4))]
    for name in names:
        dtype = chance.choice(KNOWN)
        shape = [chance.choice((0, 1, 2, 3)) for _ in range(chance.randint(0, 3))]
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    entries = list(header.items())
    chance.shuffle(entries)
    return dict(entries), chance.randbytes(at)


ODD: list[Any] = [None, True, False, -1, 0, 1, 2, 8, 2**31, 2**32, 2**63, 2**64, 2**70, 1.0, "", "F32", "I8", [], {}]


def changed(chance: random.Random, header: Header) -> Header:
    """One entry has another value."""
    header = copy.deepcopy(header)
    name = chance.choice(list(header))
    kind = chance.randrange(8)
    found = header[name]
    if kind == 0:
        del header[name]
    elif kind == 1:
        header[name] = chance.choice(ODD)
    elif not isinstance(found, dict) or not found:
        header[name] = entry(0, 16)
    elif kind == 2:
        found[chance.choice(list(found))] = chance.choice(ODD)
    elif kind == 3:
        del found[chance.choice(list(found))]
    elif kind == 4:
        header[chance.choice(("b", "", "__metadata__", "ü"))] = header.pop(name)
    elif isinstance(which := found.get("data_offsets" if kind < 7 else "shape"), list):
        spot, near = chance.randrange(max(len(which), 1)), chance.choice((-8, -4, -1, 1, 4, 8))
        near += which[spot] if which and isinstance(which[spot], int) else 0
        which[spot : spot + 1] = [chance.choice((near, near, *ODD))] * chance.choice((0, 1, 1, 1, 2))
    return header


def file_of(chance: random.Random) -> bytes:
    """A file that is right, or of which something is wrong."""
    header, data = some_file(chance)
    for _ in range(chance.choice((0, 0, 1, 1, 2))):
        header = changed(chance, header) if header else header
    text = json.dumps(header, ensure_ascii=chance.random() < 0.5).encode()
    if chance.random() < 0.25 and text:
        spot = chance.randrange(len(text))
        text = text[:spot] + chance.choice((b"", b'"', b"-", b"0", b"}", b" ", b"\xff", b"\\", b",")) + text[spot + 1 :]
    elif chance.random() < 0.1:
        text += b" " * chance.randint(1, 9)
    length = len(text) + chance.choice((0,) * 12 + (-1, 1, 8, 2**40))
    data = data + bytes(chance.choice((0, 0, 0, 0, 0, 1, 8))) if chance.random() < 0.9 else data[:-1]
    return max(length, 0).to_bytes(8, "little") + text + data


def of_package(path: Path) -> dict[str, Tensor] | Exception:
    load_file = pytest.importorskip("safetensors.torch").load_file
    try:
        return load_file(path)
    except Exception as error:  # of any kind: it refuses the file
        return error


def of_this(path: Path) -> dict[str, Tensor] | None:
    try:
        return {name: tensor.clone() for name, tensor in read_safetensors(path).items()}
    except CheckpointError:
        return None


@pytest.mark.wide
def test_every_header_is_refused_or_has_the_values_of_the_package(tmp_path: Path) -> None:
    chance = random.Random(4)
    path = tmp_path / "x.safetensors"
    loaded = refused = 0
    for number in range(1500):
        raw = file_of(chance)
        path.write_bytes(raw)
        expected = of_package(path)
        found = of_this(path)
        if found is None:
            assert isinstance(expected, Exception), (number, raw)
            refused += 1
            continue
        assert not isinstance(expected, Exception), (number, raw, expected)
        assert found.keys() == expected.keys(), (number, raw)
        for name, value in expected.items():
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), (number, raw)
            assert as_bytes(found[name].contiguous()) == as_bytes(value.contiguous()), (number, raw)
        loaded += 1
    assert loaded > 200
    assert refused > 500
