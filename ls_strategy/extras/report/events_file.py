"""TensorBoard's event files, read as far as they are whole.

::

    | length: 8 bytes | checksum of it: 4 | Event, protobuf: length bytes | checksum: 4 | next record ...

The checksum of a length is compared, so that a damaged file is not read as a very long record. A run that is being
written, or was killed, ends inside a record: what is before it counts. Format: "TFRecord", tensorflow.org/tutorials/
load_data/tfrecord. The messages are those of the package ``tensorboard``.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from ls_strategy.errors import ConfigError
from ls_strategy.extras.report.series import Series

_HEADER = struct.Struct("<QI")
_LONGEST = 1 << 30  # bytes: no record is longer
_FLOATS = {1: ("<f", "float_val"), 2: ("<d", "double_val")}  # format and field by DT_FLOAT and DT_DOUBLE


@dataclass
class Image:
    """The last image of a tag."""

    step: int
    data: bytes
    width: int
    height: int


@dataclass
class EventFile:
    """Scalars, images and times that were read from one event file."""

    path: Path
    scalars: dict[str, Series] = field(default_factory=lambda: defaultdict(Series))
    images: dict[str, Image] = field(default_factory=dict)
    started: float | None = None  # time of the first event
    ended: float | None = None
    problem: str = ""  # why it was not read to its end; empty if it was


def _crc_table() -> list[int]:
    table = []
    for number in range(256):
        for _ in range(8):
            number = (number >> 1) ^ (0x82F63B78 if number & 1 else 0)
        table.append(number)
    return table


_TABLE = _crc_table()


@lru_cache(1024)
def masked_crc32c(data: bytes) -> int:
    """Return the checksum of a length in TFRecord files: there are few lengths."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def parser() -> Callable[[bytes], Any]:
    """Return the function that parses an event.

    Raises:
        ConfigError: the package tensorboard is missing.
    """
    try:
        event_pb2: Any = import_module("tensorboard.compat.proto.event_pb2")  # makes its classes when imported
    except ImportError as error:
        raise ConfigError(
            f"Got a run of TensorBoardLogger, but its files cannot be read here: {error}. Run pip install tensorboard, "
            "or give a run of CSVLogger."
        ) from None
    return event_pb2.Event.FromString


def read(path: Path) -> EventFile:
    """Read an event file.

    Raises:
        ConfigError: the package tensorboard is missing.
    """
    parse, found = parser(), EventFile(path)
    with path.open("rb") as file:
        for data in _records(file, found):
            try:
                event = parse(data)
            except Exception:  # protobuf has its own errors, by implementation
                found.problem = "a record is damaged, and what follows it is left out"
                break
            _add(event, found)
    return found


def _records(file: BinaryIO, found: EventFile) -> Iterator[bytes]:
    """Iterate over the whole records, and note why there are no more."""
    while header := file.read(_HEADER.size):
        if len(header) < _HEADER.size:
            found.problem = "it ends inside a record, because it is being written or was cut off"
            return
        length, checksum = _HEADER.unpack(header)
        if checksum != masked_crc32c(header[:8]) or length > _LONGEST:
            found.problem = "a record is damaged, and what follows it is left out"
            return
        data = file.read(length + 4)
        if len(data) < length + 4:
            found.problem = "it ends inside a record, because it is being written or was cut off"
            return
        yield data[:-4]


def _add(event: Any, found: EventFile) -> None:
    found.started = event.wall_time if found.started is None else found.started
    found.ended = event.wall_time
    for value in event.summary.value:
        kind = value.WhichOneof("value")
        if kind == "simple_value":
            found.scalars[value.tag].add(event.step, value.simple_value, event.wall_time)
        elif kind == "image":
            image = value.image
            found.images[value.tag] = Image(event.step, image.encoded_image_string, image.width, image.height)
        elif kind == "tensor" and (number := _scalar_of(value.tensor)) is not None:
            found.scalars[value.tag].add(event.step, number, event.wall_time)


def _scalar_of(tensor: Any) -> float | None:
    """Return the number of a tensor with a single float, as ``tf.summary.scalar`` writes it."""
    if tensor.tensor_shape.dim or tensor.dtype not in _FLOATS:
        return None
    code, values = _FLOATS[tensor.dtype]
    given = getattr(tensor, values)
    if len(given) == 1:
        return given[0]
    content = tensor.tensor_content
    return struct.unpack(code, content)[0] if len(content) == struct.calcsize(code) else None
