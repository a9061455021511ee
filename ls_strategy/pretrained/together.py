"""Weights that every rank needs in full: each rank reads a part of the files, and the ranks exchange the parts.

::

    files    │ wte │ h.0 │ h.1 │ h.2 ...        a block of 8 MiB: neighbouring tensors, or a part of a large one
    block    [ rank 0 reads │ rank 1 reads ]    the next block is read while this one is exchanged
    tensors  <── all-gather                     in their own memory, on the host or the device

So the ranks together read the files once, and none has more in memory than the model and two blocks. The values are
there when the loader returns, so nothing that user code does with them is different.

Ranks exchange only after all of them have come with the same list of tensors (`Meeting`). Otherwise every rank reads
everything by itself, as it would without this file.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ls_strategy.distributed.comm import Comm, PendingGather
from ls_strategy.distributed.meeting import Meeting
from ls_strategy.errors import CheckpointError
from ls_strategy.meta_init.lazy import LazyTensor, parts_of
from ls_strategy.meta_init.recipe import computes, recipe_of

BLOCK_BYTES = 1 << 23
"""Bytes that are exchanged at a time."""

_ALIGNMENT = 16
"""Bytes of the largest element, so that a border between ranks is one between elements."""

_log = logging.getLogger("ls_strategy.pretrained")


class LoadTarget(NamedTuple):
    """A tensor with memory, and what it is to be filled with."""

    name: str
    tensor: Tensor
    value: LazyTensor


class _Piece(NamedTuple):
    """Elements ``[start, stop)`` of a flattened tensor, at byte ``at`` of a block."""

    target: LoadTarget
    start: int
    stop: int
    at: int

    @property
    def itemsize(self) -> int:
        return self.target.value.dtype.itemsize

    @property
    def end(self) -> int:
        return self.at + (self.stop - self.start) * self.itemsize


class _Reader:
    """Reads together with the other ranks."""

    def __init__(self, comm: Comm, device: torch.device) -> None:
        """``device``: on which the ranks exchange."""
        self.meeting = Meeting(comm)
        self._comm = comm
        self._wire = device if comm.native else torch.device("cpu")
        self._error: Exception | None = None

    def fill(self, targets: Sequence[LoadTarget]) -> None:
        """Fill tensors, the same on all ranks. Collective.

        Raises:
            CheckpointError: a rank cannot read a file.
        """
        self._error = None
        in_parts = [t for t in targets if _has_parts(t)]
        in_flight: tuple[PendingGather, list[_Piece], Tensor] | None = None
        buffers: list[Tensor | None] = [None, None]
        for i, pieces in enumerate(_blocks(in_parts)):
            share = _rounded(-(-pieces[-1].end // self._comm.world_size))
            buffer = self._buffer(buffers, i % 2, share * self._comm.world_size)
            self._read(pieces, share, buffer)
            work = self._comm.all_gather(buffer, f"pretrained weights {i % 2}")
            if in_flight is not None:
                _land(*in_flight)
            in_flight = work, pieces, buffer
        if in_flight is not None:
            _land(*in_flight)
        for i, target in enumerate(t for t in targets if not _has_parts(t)):
            self._send_in_full(target, i % self._comm.world_size)
        self._agree()

    def _buffer(self, buffers: list[Tensor | None], which: int, nbytes: int) -> Tensor:
        """Return ``nbytes`` of one of two buffers, which are made when they are needed."""
        made = buffers[which]
        if made is None or made.numel() < nbytes:
            made = buffers[which] = torch.empty(nbytes, dtype=torch.uint8, device=self._wire)
        return made[:nbytes]

    def _read(self, pieces: Sequence[_Piece], share: int, buffer: Tensor) -> None:
        """Read this rank's bytes of a block."""
        low = self._comm.rank * share
        for piece in pieces:
            begin, end = max(piece.at, low), min(piece.end, low + share)
            if begin < end and self._error is None:
                start, stop = (piece.start + (at - piece.at) // piece.itemsize for at in (begin, end))
                try:
                    read = piece.target.value.range(start, stop)
                except Exception as error:  # raised on all ranks after the exchange
                    self._error = error
                else:
                    buffer[begin:end].copy_(read.contiguous().view(torch.uint8))

    def _send_in_full(self, target: LoadTarget, source: int) -> None:
        """Fill a tensor of which no part can be made without the others: one rank makes all of it."""
        tensor, value = target.tensor, target.value
        direct = tensor.is_contiguous() and tensor.dtype == value.dtype and tensor.device.type == self._wire.type
        wire = tensor.detach() if direct else torch.empty(value.shape, dtype=value.dtype, device=self._wire)
        if self._comm.rank == source and self._error is None:
            try:
                wire.copy_(value.materialize())
            except Exception as error:  # raised on all ranks after the exchange
                self._error = error
        self._comm.broadcast_(wire.view(-1).view(torch.uint8), source)
        if not direct:
            tensor.detach().copy_(wire)

    def _agree(self) -> None:
        for rank, message in enumerate(self._comm.exchange_objects(None if self._error is None else str(self._error))):
            if message is not None:
                if rank == self._comm.rank and self._error is not None:
                    raise self._error
                raise CheckpointError(f"rank {rank}: {message}")


_reader: ContextVar[_Reader | None] = ContextVar("ls_strategy_reader", default=None)
"""Of this thread: what is loaded in another one is in no order with the other ranks'."""


@contextmanager
def reading_together(comm: Comm, device: torch.device) -> Generator[None, None, None]:
    """Let `fill` read each part of a file on one rank only, where all ranks fill the same tensors."""
    reader = _Reader(comm, device)
    token = _reader.set(reader)
    try:
        yield
    finally:
        _reader.reset(token)
        reader.meeting.leave()


def is_reading_together() -> bool:
    """Return whether `fill` may read together with other ranks."""
    return _reader.get() is not None


@torch.no_grad()
def fill(targets: Sequence[LoadTarget]) -> None:
    """Fill tensors with the values of files. Collective if all ranks do it at the same time.

    Raises:
        CheckpointError: a file cannot be read.
    """
    reader = _reader.get()
    if reader is not None and reader.meeting.is_complete("\n".join(map(_description, targets))):
        reader.fill(targets)
        return
    if reader is not None:
        _log.warning(
            "The ranks do not load the same weights at the same time, so this rank reads all of them by itself. To "
            "read the files once for all ranks, load the same model from the same path on every rank."
        )
    for target in targets:
        if not _has_parts(target):
            target.tensor.detach().copy_(target.value.materialize())
            continue
        flat = target.tensor.detach().view(-1)
        for at, part in parts_of(target.value, 0, flat.numel()):
            flat[at : at + part.numel()].copy_(part)


def _has_parts(target: LoadTarget) -> bool:
    return target.tensor.is_contiguous() and not computes(recipe_of(target.value))


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _blocks(targets: Sequence[LoadTarget]) -> Iterator[list[_Piece]]:
    """Yield the pieces of one block after the other."""
    pieces: list[_Piece] = []
    at = 0
    for target in targets:
        start, numel = 0, target.value.numel()
        while start < numel:
            stop = min(numel, start + (BLOCK_BYTES - at) // target.value.dtype.itemsize)
            if stop > start:
                pieces.append(_Piece(target, start, stop, at))
                at = _rounded(pieces[-1].end)
            start = stop
            if at >= BLOCK_BYTES:
                yield pieces
                pieces, at = [], 0
    if pieces:
        yield pieces


def _land(work: PendingGather, pieces: Sequence[_Piece], buffer: Tensor) -> None:
    """Wait for a block, and copy it to where it belongs."""
    work.wait()
    for piece in pieces:
        values = buffer[piece.at : piece.end].view(piece.target.value.dtype)
        piece.target.tensor.detach().view(-1)[piece.start : piece.stop].copy_(values)


def _description(target: LoadTarget) -> str:
    """Return a text that is the same on all ranks if they fill the same tensor with the same values."""
    tensor = target.tensor
    kind = f"{tuple(tensor.shape)} {tensor.dtype} {tensor.device.type} {tensor.is_contiguous()}"
    return f"{target.name} {kind} {_text(recipe_of(target.value))}"


def _text(value: Any) -> str:
    if isinstance(value, LazyTensor):
        return _text(recipe_of(value))
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    if is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}({', '.join(_text(getattr(value, f.name)) for f in fields(value))})"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return _text([part for item in value.items() for part in item])
    return repr(value)
