"""One file in the format of ``torch.save`` that all ranks write together. No rank holds what the others write.

Rank 0 pickles the value, with *stand-ins* for sharded tensors, and decides where the elements of each begin. The file
is an uncompressed archive, so that every rank can write its elements there. Rank 0 then combines the checksums of all
pieces to those of the records, and writes what is left: headers, small values and the directory of the archive.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import sys
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ls_strategy import device as dev
from ls_strategy.checkpoint.files import LARGE, as_bytes
from ls_strategy.checkpoint.place import begin_to_sync
from ls_strategy.checkpoint.torch_file import ALIGNMENT, AbsentStorage, TorchPickler, aligned_record, parts_of_storage
from ls_strategy.errors import CheckpointError

Piece = tuple[int, int, int, int]
"""Number of a stand-in, first byte among its elements, number of bytes, crc32."""


@dataclass
class _ZipRecord:
    """One record of the archive."""

    info: zipfile.ZipInfo
    data_at: int
    """First byte of its data in the file."""

    data: list[memoryview]
    """What rank 0 writes; of a stand-in, nothing."""

    number: int | None = None
    """Number of the stand-in."""


class SharedArchive:
    """The file as rank 0 lays it out, and completes it."""

    def __init__(self, value: Any, stand_ins: Sequence[Tensor]) -> None:
        """Pickle ``value``, any object that ``torch.save`` accepts. Elements of ``stand_ins`` in it are left out."""
        buffer = io.BytesIO()
        numbers = {id(tensor): number for number, tensor in enumerate(stand_ins)}
        pickler = TorchPickler(buffer, numbers)
        pickler.dump(value)
        self._records: list[_ZipRecord] = []
        self._end = 0
        self.places: list[int] = [-1] * len(stand_ins)
        """First byte of every stand-in's elements in the file; -1 if the value does not have it."""
        self._add("data.pkl", [memoryview(buffer.getbuffer())])
        for name, text in (
            (".format_version", "1"),
            (".storage_alignment", str(ALIGNMENT)),
            ("byteorder", sys.byteorder),
        ):
            self._add(name, [memoryview(text.encode())])
        for key, storage in enumerate(pickler.storages):
            if isinstance(storage, AbsentStorage) and (number := numbers.get(id(storage.tensor))) is not None:
                self.places[number] = self._add(f"data/{key}", [], storage.nbytes, number)
            else:
                self._add(f"data/{key}", list(parts_of_storage(storage)))
        self._add("version", [memoryview(b"3\n")])

    def _add(self, name: str, data: list[memoryview], nbytes: int | None = None, number: int | None = None) -> int:
        info, data_at = aligned_record(name, self._end)
        info.header_offset = self._end
        info.file_size = info.compress_size = sum(part.nbytes for part in data) if nbytes is None else nbytes
        self._records.append(_ZipRecord(info, data_at, data, number))
        self._end = data_at + info.file_size
        return data_at

    def create(self, path: str) -> None:
        """Create the file, for all ranks to open."""
        with Path(path).open("xb") as file:
            file.truncate(self._end)

    def complete(self, path: str, pieces: Iterable[Piece]) -> int:
        """Write what the ranks' pieces leave, wait until it is on disk, and return the bytes of the file.

        Raises:
            CheckpointError: The pieces do not cover each of the stand-ins once.
        """
        found: dict[int, list[Piece]] = {}
        for piece in pieces:
            found.setdefault(piece[0], []).append(piece)
        with Path(path).open("r+b") as file:
            for record in self._records:
                info = record.info
                if record.number is None:
                    info.CRC = functools.reduce(lambda crc, part: zlib.crc32(part, crc), record.data, 0)
                else:
                    info.CRC = _whole(info.filename, info.file_size, found.get(record.number, []))
                file.seek(info.header_offset)
                file.write(info.FileHeader(zip64=True))
                for part in record.data:
                    file.write(part)
            with zipfile.ZipFile(file, "w") as archive:
                archive.filelist = [record.info for record in self._records]
                archive.start_dir = self._end
            file.flush()
            os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_size


class SharedFile:
    """The file as one rank writes its elements to it."""

    def __init__(self, path: str) -> None:
        """Open the file that rank 0 has created."""
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._checksums = ThreadPoolExecutor(1, initializer=dev.selecting())
        self._pieces: dict[int, list[Piece]] = {}

    def write(self, number: int, place: int, first: int, values: Tensor) -> None:
        """Write elements of a stand-in, which begin at the byte ``place`` of the file, from its byte ``first`` on."""
        data = as_bytes(values.detach().resolve_conj().resolve_neg().contiguous())
        pieces = self._pieces.setdefault(number, [])
        follows = bool(pieces) and pieces[-1][1] + pieces[-1][2] == first
        _, start, before, crc = pieces.pop() if follows else (number, first, 0, 0)
        if len(data) < LARGE:
            crc = zlib.crc32(data, crc)
            self._write(data, place + first)
        else:  # both release the GIL
            running = self._checksums.submit(zlib.crc32, data, crc)
            self._write(data, place + first)
            crc = running.result()
        pieces.append((number, start, before + len(data), crc))

    def _write(self, data: memoryview, at: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._descriptor, data[done:], at + done)
        begin_to_sync(self._descriptor, at, len(data))

    def close(self) -> list[Piece]:
        """Wait until everything is on disk, and return what was written."""
        os.fsync(self._descriptor)
        self.abandon()
        return [piece for pieces in self._pieces.values() for piece in pieces]

    def abandon(self) -> None:
        """Close the file, without syncing it."""
        self._checksums.shutdown()
        os.close(self._descriptor)


def can_share(folder: str, rank: int, exchange: Callable[[Any], list[Any]]) -> bool:
    """Return whether the ranks can write one file in a folder together, as a small one shows. Collective.

    They cannot if a rank sees another folder of this name or may not write there, or if files are written from begin to
    end only, as on mounts of object stores. If the disk is full, or rank 0 cannot write either, the answer is yes: the
    save will report why it fails. ``exchange`` gives every rank's value to all ranks.
    """
    path = ""
    if rank == 0:
        with contextlib.suppress(OSError):
            Path(folder).mkdir(parents=True, exist_ok=True)
            name = f"{folder}/.together.{uuid.uuid4().hex[:8]}.partial"  # removed like what a killed save leaves
            Path(name).touch(exist_ok=False)
            path = name
    path = exchange(path)[0]
    wrote = exchange(_wrote_mark(path, rank) if path else None)
    shared = None in wrote
    if rank == 0 and path:
        with contextlib.suppress(OSError):
            marks = b"".join(map(_mark, range(-1, len(wrote))))
            shared = shared or (all(wrote) and Path(path).read_bytes() == marks)
            Path(path).unlink()
    return bool(exchange(shared)[0])


def _mark(rank: int) -> bytes:
    return (rank + 1).to_bytes(8, "little")


def _wrote_mark(path: str, rank: int) -> bool | None:
    """Write the mark of a rank to its place, which is not the first. Return whether it can be; None on a full disk."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            return os.pwrite(descriptor, _mark(rank), 8 * (rank + 1)) == 8
        finally:
            os.close(descriptor)
    except OSError as error:
        return None if error.errno in (errno.ENOSPC, errno.EDQUOT) else False


def _whole(name: str, nbytes: int, pieces: list[Piece]) -> int:
    """Return the checksum of a record from those of its pieces.

    Raises:
        CheckpointError: They do not cover it once.
    """
    done, crc = 0, 0
    for _, first, length, own in sorted(pieces):
        if first != done:
            break
        crc, done = combined(crc, own, length), done + length
    if done != nbytes or sum(piece[2] for piece in pieces) != nbytes:
        raise CheckpointError(f"the ranks wrote other parts of {name} than its {nbytes} bytes.")
    return crc


# --- checksums of adjacent pieces -------------------------------------------------------------------------------------

_POLYNOMIAL = 0xEDB88320
"""Of crc32, reflected: the highest bit is x**0."""


def combined(first: int, second: int, length: int) -> int:
    """Return the crc32 of two adjacent pieces from those of each; the second has ``length`` bytes."""
    return _product(_shift(length), first) ^ second


@functools.lru_cache(maxsize=4096)
def _shift(length: int) -> int:
    """Return ``x ** (8 * length)`` modulo the polynomial: what ``length`` zero bytes do to a checksum."""
    result, power, left = 1 << 31, 1 << 23, length  # x**0 and x**8
    while left:
        if left & 1:
            result = _product(power, result)
        power, left = _product(power, power), left >> 1
    return result


def _product(a: int, b: int) -> int:
    """Return the product of two polynomials over GF(2), modulo the polynomial."""
    result = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            result ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return result
