"""Ranges of tensors in safetensors files, without the package and without mapping files into memory."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path, PureWindowsPath
from typing import cast

import torch
from torch import Tensor
from typing_extensions import override

from ls_strategy.checkpoint.files import as_bytes
from ls_strategy.checkpoint.place import open_file
from ls_strategy.errors import CheckpointError
from ls_strategy.meta_init.recipe import Recipe, RecipeTensor, RecordedTensor, runs_in
from ls_strategy.pretrained.header import parse_json, read_header

_INDEX = ".safetensors.index.json"

_SMALL_GAP = 64
"""Bytes between two runs that are always read along: a system call costs more. Wider gaps are, up to an eighth of a
run, so that all ranks together read little more than the file."""

_AT_ONCE = 1 << 24
"""Maximum bytes of a read that includes gaps."""


@dataclass(frozen=True)
class Stored(Recipe):
    """A tensor in a file, row by row from byte ``first`` on."""

    path: Path
    name: str
    first: int

    @override
    def flat(self, start: int, stop: int) -> Tensor:
        out = torch.empty(stop - start, dtype=self.dtype, device="cpu")
        read_into(self.path, self.first + start * self.dtype.itemsize, as_bytes(out), self.name)
        return out

    @override
    def box(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Read a rectangular part: each of its runs, or neighbouring runs together with small gaps between them."""
        numel = math.prod(sizes)
        if numel == 0:
            return torch.empty(sizes, dtype=self.dtype, device="cpu")
        run, starts = runs_in(self.shape, offsets, sizes)
        if run == numel:
            (only,) = starts
            return self.flat(only, only + run).view(sizes)
        out = torch.empty(numel // run, run, dtype=self.dtype, device="cpu")
        size, rows = self.dtype.itemsize, list(starts)
        gap = max(_SMALL_GAP // size, run // 8)
        row = 0
        while row < len(rows):
            end = row + 1
            while (
                end < len(rows)
                and rows[end] - rows[end - 1] - run <= gap
                and (rows[end] + run - rows[row]) * size <= _AT_ONCE
            ):
                end += 1
            got = self.flat(rows[row], rows[end - 1] + run)
            for i in range(row, end):
                at = rows[i] - rows[row]
                out[i] = got[at : at + run]
            row = end
        return out.view(sizes)


def read_into(path: Path, first: int, target: memoryview, what: str) -> None:
    """Fill ``target`` from byte ``first`` of a file on. ``what``: for messages.

    Raises:
        CheckpointError: the file cannot be read, or ends too early.
    """
    try:
        with cast("FileIO", open_file(path, buffering=0)) as file:
            file.seek(first)
            done = 0
            while done < len(target):
                moved = file.readinto(target[done:])
                if not moved:
                    raise CheckpointError(f"{path} ends inside {what}: it is incomplete. Copy it again.")
                done += moved
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


def read_safetensors(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, recording: bool = False
) -> dict[str, Tensor]:
    """Return the tensors of a file, of several, or of all files of a folder, by name. Each is read when it is used.

    With ``recording``, what is done to them is recorded, and they are read when the result's values are needed. In a
    folder with an index (``model.safetensors.index.json``), every tensor is that of the file which the index names for
    it, and tensors that it does not name are left out. Of a list, the last file that has a name counts.

    Raises:
        CheckpointError: a file is missing or is not a complete safetensors file, an index names files outside its
            folder or tensors that are not there, or two files of a folder without an index have a name.
    """
    if not isinstance(path, (str, os.PathLike)):
        listed: dict[str, Tensor] = {}
        for each in path:
            listed |= read_safetensors(each, recording=recording)
        return listed
    kind = RecordedTensor if recording else RecipeTensor
    place = Path(path)
    if is_index(place):
        return _of_index(place, kind)
    if not place.is_dir():
        return _tensors_of(place, kind)
    index = index_in(place)
    return _of_folder(place, kind) if index is None else _of_index(index, kind)


def files_of(path: Path) -> list[Path]:
    """Return the files that are read of a file, an index or a folder."""
    index = path if is_index(path) else index_in(path) if path.is_dir() else None
    if index is not None:
        return [index.parent / file for file in sorted(set(_map_of(index).values()))]
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def is_index(path: Path) -> bool:
    """Return whether a path has the name of an index."""
    return path.name.endswith(_INDEX)


def index_in(folder: Path) -> Path | None:
    """Return the index of a folder, if it has one.

    Raises:
        CheckpointError: it has several, or an index of the model and a file ``model.safetensors`` beside it.
    """
    model, alone = folder / f"model{_INDEX}", folder / "model.safetensors"
    indexes = [model] if model.exists() else sorted(folder.glob(f"*{_INDEX}"))
    if len(indexes) > 1:
        raise CheckpointError(
            f"{folder} has the indexes {', '.join(index.name for index in indexes)}. Give the path of one of them."
        )
    if model.exists() and alone.exists() and alone.name not in map(os.path.normpath, _map_of(model).values()):
        raise CheckpointError(
            f"{folder} has both {alone.name} and {model.name}, which does not name it, and programs differ in which of "
            "them they read. Give the path of one of them."
        )
    return indexes[0] if indexes else None


def _of_folder(folder: Path, kind: type[RecipeTensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    holders: dict[str, Path] = {}
    files = files_of(folder)
    if not files:
        raise CheckpointError(f"{folder} has no *.safetensors. Give a safetensors file, or a folder of them.")
    for file in files:
        for name, tensor in _tensors_of(file, kind).items():
            if name in holders:
                raise CheckpointError(
                    f"{folder} has {name} in {holders[name].name} and in {file.name}, and no index that says which of "
                    "them counts. Give the file that you mean, or a list of files, of which the last counts."
                )
            found[name], holders[name] = tensor, file
    return found


def _of_index(index: Path, kind: type[RecipeTensor]) -> dict[str, Tensor]:
    wanted: defaultdict[str, list[str]] = defaultdict(list)
    for name, file in _map_of(index).items():
        wanted[file].append(name)
    found: dict[str, Tensor] = {}
    for file in sorted(wanted):
        tensors = _tensors_of(index.parent / file, kind)
        missing = [name for name in wanted[file] if name not in tensors]
        if missing:
            raise CheckpointError(
                f"{index} says that {missing[0]} is in {file}, but it is not. Copy both again, or give the files "
                "themselves as a list."
            )
        here = set(wanted[file])
        found |= {name: tensor for name, tensor in tensors.items() if name in here}
    return found


def _map_of(index: Path) -> dict[str, str]:
    """Return the file of each tensor as an index says it: a file in its folder, which may be a link to anywhere."""
    try:
        with open_file(index) as text:
            files = parse_json(text.read())["weight_map"]
        if not isinstance(files, dict) or not all(isinstance(file, str) and file for file in files.values()):
            raise ValueError("its weight_map does not map names to files")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index} cannot be read: {error!r}. Copy it again.") from error
    for file in set(files.values()):
        parts = PureWindowsPath(file)  # of any system: the same files are read everywhere
        if parts.drive or parts.root or ".." in parts.parts or "\0" in file:
            raise CheckpointError(
                f"{index} names the file {file!r}, which is not in its folder. Move the file there, and name it "
                "without a path."
            )
    return files


def _tensors_of(path: Path, kind: type[RecipeTensor]) -> dict[str, Tensor]:
    entries, begin = read_header(path)
    return {
        name: kind(Stored(entry.shape, entry.dtype, path, name, begin + entry.begin)) for name, entry in entries.items()
    }
