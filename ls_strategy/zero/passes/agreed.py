"""Agree over all ranks on the parameters to step: those that have a gradient on any rank."""

from __future__ import annotations

import torch

from ls_strategy.distributed.comm import Comm
from ls_strategy.errors import StateError
from ls_strategy.zero.flat.units import Flat


def agree(flats: list[Flat], comm: Comm) -> tuple[list[bool], list[bool], list[bool]]:
    """Return what holds on any of the ranks. Collective.

    Returns:
        For each parameter of ``flats``: whether it got a gradient, and whether it had one when its buffer was sent; and
        for each buffer, whether gradients in it have not been sent.

    Raises:
        StateError: a parameter was written to on some ranks only.
    """
    flags = [
        [used for f in flats for used in f.local.mask],
        [sent for f in flats for sent in f.local.sent_mask],
        [f.local.dirty for f in flats],
        [f.writes.detected for f in flats],
        [not f.writes.detected for f in flats],
    ]
    agreed = comm.agree(torch.tensor([flag for each in flags for flag in each], dtype=torch.uint8))
    found = [part.bool().tolist() for part in agreed.split([len(each) for each in flags])]
    used, sent, left, written, unwritten = found
    for flat, here, elsewhere in zip(flats, written, unwritten, strict=True):
        flat.writes.detected = False
        if here and elsewhere:
            raise StateError(
                f"a parameter in the buffer of {flat.name!r} was written to on some ranks and not on others, but "
                "each rank holds a shard of it. Run the code that writes weights on every rank."
            )
    return used, sent, left


def match_sent(flat: Flat, used: list[bool], sent: list[bool]) -> None:
    """Make the averages follow ``p.grad``, which may have changed since it was sent (stages 0 and 1).

    ``used``: which parameters have a gradient on any rank; ``sent``: which had one when the buffer was sent.
    """
    # Gradients that user code has set without a backward.
    if flat.averages.in_place and any(used) and not flat.averages.hold_values:
        flat.local.allocate(flat.average_dtype)
        flat.local.take_all_replaced()
        flat.averages.hold_values = True
    for i, piece in enumerate(flat.pieces):
        if sent[i] and not used[i]:
            flat.averages.zero(piece.start, piece.stop)
        elif used[i] and flat.averages.in_place and flat.local.take_replaced(i):
            flat.local.show(i)  # another rank's
    flat.local.sent_mask = used
