"""One rank that shards and sends as if there were others: through the communicator of its back end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CUDAAccelerator

from ls_strategy.distributed import comm
from ls_strategy.distributed.comm import Comm
from ls_strategy.lightning import connection
from ls_strategy.lightning.checkpointing import data_position
from tests import models
from tests.models import Case, Result


class One(int):
    """A world size of one that is not taken for it: what asks ``== 1`` or ``> 1`` does all that several ranks do."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return other != 1 and int(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __gt__(self, other: int) -> bool:
        return other <= 1


@contextmanager
def through_communicator() -> Iterator[list[Comm]]:
    """Let fits on one rank shard as their stage says, and send through the process group.

    Without it, one rank is trained as stage 0, and nothing is sent.

    Yields:
        The communicators of the fits inside, for their ``traffic``.
    """
    made: list[Comm] = []

    def make(*args: Any) -> Comm:
        with mock.patch.object(dist, "get_world_size", return_value=One(1)):
            made.append(comm.make_comm(*args))
        made[-1].native = True  # so that gloo takes the branches of NCCL
        return made[-1]

    with (
        mock.patch.object(connection, "make_comm", make),
        mock.patch.object(data_position, "_replicas", return_value=1),  # it is written to files
    ):
        yield made


class SameDevice(CUDAAccelerator):
    """All ranks of this host on one GPU."""

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        """Return the number of ranks."""
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """Return the first GPU for every rank."""
        return [torch.device("cuda", 0)] * int(devices)


def trained_on_ranks(rank: int, world_size: int, cases: list[Case], device: str) -> list[Result]:
    """Train one case after the other, all ranks on one device."""
    arguments = {"accelerator": SameDevice()} if device == "cuda" else {}
    return [models.run(rank, world_size, replace(case, device=device), **arguments) for case in cases]
