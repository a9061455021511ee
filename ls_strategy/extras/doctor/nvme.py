"""Check the folder of the NVMe tier: file system, free space, and direct I/O."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

from ls_strategy.errors import LSError
from ls_strategy.extras.doctor.finding import Finding, note_if

_PROBE_BYTES = 1 << 20


def folder(path: str) -> Iterator[Finding]:
    """Check the folder, with `check_path` as training does. An empty path means that there is none."""
    from ls_strategy.extras.planner.sizes import show_bytes
    from ls_strategy.tiers.nvme_folder import check_path, in_memory, mount_of

    if not path:
        yield Finding("folder", "none given (LS_STRATEGY_NVME_PATH, --nvme-path): states stay in memory")
        return
    place = Path(path)
    if not place.exists():
        cure = f"Create it on a local NVMe device (mkdir -p {path}), or correct the path."
        yield Finding("folder", f"{path} does not exist", "problem", cure)
        return
    mount = mount_of(place)
    kind = f"{path}: {mount.kind} on {mount.point} ({mount.source})"
    try:
        check_path(place, 0)
    except LSError as error:
        where = "memory" if in_memory(mount) else "not usable"
        cure = "Use a local ext4 or XFS file system; offload.nvme_allow_ram=True accepts memory, for tests."
        yield Finding("folder", f"{kind}, which is {where}: {error}", "problem", cure)
        return
    yield Finding("folder", kind)
    usage = shutil.disk_usage(place)
    value = f"{show_bytes(usage.free)} of {show_bytes(usage.total)} free"
    cure = "Free some space: NVMe devices write slowly when they are nearly full."
    yield note_if(usage.free < 0.05 * usage.total, "room", value, cure)
    yield direct_io(place)


def direct_io(folder: Path) -> Finding:
    """Write and read 1 MiB with direct I/O."""
    from ls_strategy.tiers.buffers import AlignedBuffer
    from ls_strategy.tiers.nvme_folder import open_scratch

    logger = logging.getLogger("ls_strategy.tiers")
    quiet, logger.disabled = logger.disabled, True  # it would repeat this finding as a warning
    try:
        file = open_scratch(folder, _PROBE_BYTES, rank=0, direct=True)
        try:
            written, read = AlignedBuffer(_PROBE_BYTES), AlignedBuffer(_PROBE_BYTES)
            written.tensor.random_(256)
            file.write(written.view, 0)
            file.sync()
            file.read(read.view, 0)
            direct, same = file.direct, bool((written.tensor == read.tensor).all())
        finally:
            file.close()
    except (LSError, OSError) as error:
        return Finding(
            "direct I/O", str(error), "problem", "Use a folder on another device; check dmesg for the reason."
        )
    finally:
        logger.disabled = quiet
    if not same:
        cure = "The device or its file system is broken: check dmesg and smartctl, and use another one."
        return Finding("direct I/O", "the bytes read differ from those written", "problem", cure)
    if not direct:
        cure = "Use a local ext4 or XFS file system. Without direct I/O, the page cache takes host memory and CPU time."
        return Finding("direct I/O", "the file system refuses O_DIRECT", "note", cure)
    return Finding("direct I/O", "works; `ls-strategy tune-io` measures how fast")
