"""Drops or zeroes gradients: those of autograd and their averages."""

from __future__ import annotations

from ls_strategy.zero.flat.parameters import grad_of, set_grad
from ls_strategy.zero.flat.units import Flat


def zero_flats(flats: list[Flat], *, set_to_none: bool, transient: bool) -> None:
    """Drop or zero all gradients of buffers (``optimizer.zero_grad()``).

    ``transient``: gradients of this rank are in a buffer during backward only, which is freed.
    """
    for flat in flats:
        if set_to_none:
            flat.local.give_back(range(len(flat.params)))
            flat.local.forget()
            flat.averages.forget()
            if transient and flat.local.buffer is not None:
                flat.local.free()
        else:
            flat.averages.zero()
            for rows in flat.local.rows.values():
                rows[1:].zero_()
        for param in flat.params:
            grad = grad_of(param)
            if grad is None:
                continue
            if set_to_none:
                set_grad(param, None)
                if param.grad_dtype != param.dtype:  # type: ignore[attr-defined]
                    param.grad_dtype = param.dtype  # type: ignore[attr-defined]
            else:
                grad.zero_()


def zero_averages(flats: list[Flat], wanted: set[int], *, set_to_none: bool) -> None:
    """Drop the averaged gradients of the parameters with an ``id`` in ``wanted``, but not their ``p.grad``."""
    for flat in flats:
        for i, (param, piece) in enumerate(zip(flat.params, flat.pieces, strict=True)):
            if id(param) not in wanted:
                continue
            if set_to_none:
                flat.local.give_back([i])
                flat.local.mask[i] = flat.local.filled[i] = False
            flat.averages.zero(piece.start, piece.stop)
