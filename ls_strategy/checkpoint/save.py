"""One save of all ranks, up to the commit: a folder, or one file. An error on one rank is raised on all.

::

    rank 0     begin ──┐                                  ┌── metadata, meta.pt, manifest, rename ──┐
    every rank         └── write its file, sync, report ──┘                                         └── same result
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

from ls_strategy.checkpoint import commit
from ls_strategy.checkpoint.files import RankFile
from ls_strategy.checkpoint.manifest import FileRecord, Manifest, record_of
from ls_strategy.checkpoint.metadata import Item, Path, write_metadata
from ls_strategy.checkpoint.place import CheckpointPath
from ls_strategy.checkpoint.reshard import CheckpointEntry, by_flat, write_entries
from ls_strategy.checkpoint.shared_file import Piece, SharedArchive, SharedFile
from ls_strategy.checkpoint.target import META
from ls_strategy.errors import CheckpointError
from ls_strategy.layout import flat_offset


class ReportExchange(Protocol):
    """Gives every rank's value to all ranks, in rank order. Collective."""

    def __call__(self, value: dict[str, Any], /) -> list[dict[str, Any]]:
        """Exchange ``value``, which consists of JSON types: data from other processes is never unpickled."""
        ...


class SaveTarget:
    """Destination of a save: here a folder that gets its name when the save is committed, see `commit`."""

    def begin(self, path: str, save_id: str) -> AbstractContextManager[object]:
        """Prepare, and return what the save holds until it has ended. Rank 0 only."""
        return commit.begin(path, save_id)

    def folder(self, path: str, save_id: str) -> CheckpointPath:
        """Return the folder that this rank writes to."""
        return commit.staging(path, save_id)

    def written(self, path: str, save_id: str, file: str, record: FileRecord) -> None:
        """Follow the end of this rank's file. On every rank."""

    def commit(self, path: str, save_id: str, manifest: Manifest) -> None:
        """Make the save count. Rank 0 only."""
        commit.commit(path, save_id, manifest)

    def ended(self, path: str, save_id: str, rank: int, *, failed: bool) -> None:
        """Remove what the save leaves behind. On every rank, when all know whether it has failed."""
        if failed and rank == 0:
            commit.discard(path, save_id)


@dataclass
class Save:
    """Contribution of one rank to a folder: its entries and random states; rank 0 also writes the small data."""

    path: str
    entries: list[CheckpointEntry]
    random: dict[str, Any]
    """States of this rank's random number generators."""

    manifest: Manifest
    """Without files. Rank 0's is used."""

    write_meta: Callable[[str], None]
    """Writes the small data to the path that it gets. Called on rank 0."""

    writes: Callable[[Path], bool] | None = None
    """Which unsharded values this rank writes, by path. Default: rank 0 writes all."""

    target: SaveTarget = field(default_factory=SaveTarget)

    names: Sequence[str] = ()
    """Names of the module's state dict in order, with those that only other pipeline stages have."""

    def begin(self, first: _SaveReport) -> AbstractContextManager[object]:
        """Prepare, and return what is held until the end. Rank 0 only, as `commit`."""
        return self.target.begin(first.path, first.save_id)

    def write(self, report: _SaveReport, rank: int, begun: _SaveReport) -> None:
        """Write this rank's file, and report it."""
        place = self.target.folder(begun.path, begun.save_id)
        file = RankFile(place, f"__{rank}_0.distcp")
        try:
            report.aliases = write_entries(file, self.entries, self.writes or (lambda _: rank == 0))
            file.add_object(("random_states", f"rank_{rank}"), self.random)
            report.record = file.close()
        except BaseException:
            file.abandon()
            raise
        report.file, report.items = file.name, file.items
        self.target.written(begun.path, begun.save_id, file.name, report.record)

    def commit(self, begun: _SaveReport, reports: list[_SaveReport]) -> None:
        """Write metadata and manifest, and give the folder its name."""
        place = self.target.folder(begun.path, begun.save_id)
        files: dict[str, FileRecord] = {}
        aliases: dict[Path, Path] = {}
        for report in reports:
            assert report.record is not None
            files[report.file] = report.record
            aliases |= report.aliases
        items = [(report.file, item) for report in reports for item in report.items]
        files |= write_metadata(place, items, aliases, _order(self))
        self.write_meta(f"{place}/{META}")
        files[META] = record_of(place, META)
        self.manifest.files = files
        self.target.commit(begun.path, begun.save_id, self.manifest)

    def ended(self, begun: _SaveReport, rank: int, *, failed: bool) -> None:
        """Remove what the save leaves behind. On every rank."""
        self.target.ended(begun.path, begun.save_id, rank, failed=failed)


@dataclass
class SharedFileSave:
    """One file on a disk of this host, to which every rank writes its elements."""

    path: str
    value: dict[str, Any]
    """What is written, with stand-ins for sharded tensors. Rank 0's is used."""

    entries: list[CheckpointEntry]
    """The stand-ins and where their elements are; the same ones in the same order on all ranks."""

    _archive: SharedArchive | None = None

    def begin(self, first: _SaveReport) -> AbstractContextManager[object]:
        """Lay the file out, and create it. Rank 0 only, as `commit`."""
        archive = SharedArchive(self.value, [entry.value for entry in self.entries])
        held = commit.begin(first.path, first.save_id, folder=False)
        try:
            archive.create(commit.staging(first.path, first.save_id).path)
        except BaseException:
            held.release()
            raise
        self._archive, first.places = archive, archive.places
        first.path = str(CheckpointPath(first.path))  # other ranks may have another working directory
        return held

    def write(self, report: _SaveReport, rank: int, begun: _SaveReport) -> None:
        """Write this rank's elements, and report which."""
        if len(begun.places) != len(self.entries):
            raise CheckpointError(
                f"rank 0 saves {len(begun.places)} sharded values, and this rank {len(self.entries)}."
            )
        numbers = {id(entry.value): number for number, entry in enumerate(self.entries)}
        file = SharedFile(commit.staging(begun.path, begun.save_id).path)
        try:
            for entry in by_flat(self.entries):
                number = numbers[id(entry.value)]
                if begun.places[number] >= 0 and entry.source is not None:
                    for offsets, values in entry.source.boxes():
                        first = flat_offset(entry.value.shape, offsets) * values.element_size()
                        file.write(number, begun.places[number], first, values.to("cpu"))
            report.pieces = file.close()
        except BaseException:
            file.abandon()
            raise

    def commit(self, begun: _SaveReport, reports: list[_SaveReport]) -> None:
        """Complete the file, and give it its name."""
        assert self._archive is not None
        path = commit.staging(begun.path, begun.save_id).path
        self._archive.complete(path, [piece for report in reports for piece in report.pieces])
        commit.take_name(begun.path, begun.save_id)

    def ended(self, begun: _SaveReport, rank: int, *, failed: bool) -> None:
        """Remove what a failed save leaves behind."""
        if failed and rank == 0:
            commit.discard(begun.path, begun.save_id)


@dataclass
class FileSave:
    """One file, which rank 0 writes. All ranks have contributed to it already."""

    path: str
    value: dict[str, Any]
    """What is written. Rank 0's is used."""

    write: Callable[[dict[str, Any]], int]
    """Writes it and returns its bytes. Called on rank 0."""


@dataclass
class _SaveReport:
    """Report of a rank to the others about its part of a save: the file and its items, or an error."""

    error: str | None = None
    save_id: str = ""
    path: str = ""
    file: str = ""
    record: FileRecord | None = None
    items: list[Item] = field(default_factory=list)
    aliases: dict[Path, Path] = field(default_factory=dict)
    places: list[int] = field(default_factory=list)
    """Of a file that all ranks write: where the elements of each value begin."""
    pieces: list[Piece] = field(default_factory=list)
    """What this rank wrote of them."""

    @property
    def nbytes(self) -> int:
        """Bytes that the rank wrote."""
        return sum(piece[2] for piece in self.pieces) if self.record is None else self.record.bytes

    def to_plain(self) -> dict[str, Any]:
        """Return it in JSON types."""
        return {
            **vars(self),
            "record": None if self.record is None else [self.record.bytes, self.record.parts],
            "items": [item.to_plain() for item in self.items],
            "aliases": [[list(path), list(other)] for path, other in self.aliases.items()],
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> _SaveReport:
        """Parse the result of `to_plain`.

        Raises:
            CheckpointError: It is malformed.
        """
        try:
            record = plain["record"]
            return cls(
                error=plain["error"],
                save_id=plain["save_id"],
                path=plain["path"],
                file=plain["file"],
                record=None if record is None else FileRecord(record[0], [(o, n, c) for o, n, c in record[1]]),
                items=[Item.from_plain(item) for item in plain["items"]],
                aliases={tuple(path): tuple(other) for path, other in plain["aliases"]},
                places=[int(place) for place in plain["places"]],
                pieces=[(int(n), int(at), int(size), int(crc)) for n, at, size, crc in plain["pieces"]],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"a rank's report about a save cannot be read: {error!r}.") from error


def _exchanged(exchange: ReportExchange, report: _SaveReport) -> list[_SaveReport]:
    return [_SaveReport.from_plain(plain) for plain in exchange(report.to_plain())]


def run(save: Save | SharedFileSave | FileSave, rank: int, exchange: ReportExchange) -> tuple[int, float]:
    """Write and commit. Collective.

    Returns:
        Bytes of the checkpoint, and seconds.

    Raises:
        CheckpointError: On every rank, if any rank failed. Nothing of this save remains then, and the previous
            checkpoint of the same name is intact.
    """
    started = time.perf_counter()
    if isinstance(save, FileSave):
        return _run_one(save, rank, exchange), time.perf_counter() - started
    with ExitStack() as claims:
        total = _run(save, rank, claims, exchange)
    return total, time.perf_counter() - started


def _run(save: Save | SharedFileSave, rank: int, claims: ExitStack, exchange: ReportExchange) -> int:
    first = _SaveReport(path=save.path, save_id=commit.new_save_id())
    if rank == 0:
        _attempt(first, lambda: claims.enter_context(save.begin(first)))
    begun = _exchanged(exchange, first)[0]
    mine = _SaveReport()
    if begun.error is None:
        _attempt(mine, lambda: save.write(mine, rank, begun))
    reports = _exchanged(exchange, mine)
    outcome = _SaveReport(error=_first_error([begun, *reports]))
    if rank == 0:
        if outcome.error is None:
            _attempt(outcome, lambda: save.commit(begun, reports))
            outcome.error = _first_error([outcome])
        if outcome.error is not None:
            save.ended(begun, rank, failed=True)
        claims.close()
    error = _exchanged(exchange, outcome)[0].error
    if rank != 0 or error is None:
        save.ended(begun, rank, failed=error is not None)
    if error is not None:
        raise CheckpointError(
            f"saving {begun.path} failed: {error}. Nothing of it remains; earlier checkpoints are untouched."
        )
    return sum(report.nbytes for report in reports)


def _run_one(save: FileSave, rank: int, exchange: ReportExchange) -> int:
    error: Exception | None = None
    total = 0
    if rank == 0:
        try:
            total = save.write(save.value)
        except Exception as raised:
            error = raised
    told = exchange({"error": None if error is None else described(error), "bytes": total})[0]
    if told["error"] is not None:
        raise CheckpointError(
            f"saving {save.path} failed: rank 0: {told['error']}. Earlier checkpoints are untouched."
        ) from error
    return int(told["bytes"])


def run_file(path: str, value: Any) -> None:
    """Write one file in the format of ``torch.save``, atomically on a local disk. One rank only.

    Raises:
        CheckpointError: The name belongs to something other than a checkpoint.
        OSError: It could not be written. Nothing of it remains then, and the previous file is intact.
    """
    save_id = commit.new_save_id()
    with commit.begin(path, save_id, folder=False):
        place = commit.staging(path, save_id)
        file = RankFile(place.parent, place.name, checksums=False)  # torch.save writes its own
        try:
            file.add_object((), value)
            file.close()
            commit.take_name(path, save_id)
        except BaseException:
            file.abandon()
            commit.discard(path, save_id)
            raise


def _attempt(report: _SaveReport, work: Callable[[], object]) -> None:
    try:
        work()
    except Exception as error:
        report.error = described(error)


def described(error: Exception) -> str:
    """Describe an error for the other ranks. Errors of other packages get the name of their class."""
    return str(error).rstrip(".") if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _first_error(reports: Sequence[_SaveReport]) -> str | None:
    for number, report in enumerate(reports):
        if report.error is not None:
            return f"rank {max(number - 1, 0)}: {report.error}"
    return None


def _order(save: Save) -> Callable[[Path], tuple[int, int]]:
    """Return the sort key of a checkpoint's paths: as rank 0 has them, and the others where the module has them."""
    order = {entry.path: (number, -1) for number, entry in enumerate(save.entries)}
    first: dict[str, int] = {}
    for path, (number, _) in order.items():
        first.setdefault(path[0], number)

    def key(path: Path) -> tuple[int, int]:
        return order.get(path, (len(save.entries), 0))

    for root, number in first.items():
        before = number - 1
        for position, name in enumerate(save.names):
            before, _ = order.setdefault((root, name), (before, position))
    return key
