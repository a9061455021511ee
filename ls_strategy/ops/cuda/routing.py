"""Routing on a GPU: the host's side of ``routing.cu``. Operations as in `ls_strategy.ops.permute` and ``topk``."""

from __future__ import annotations

import torch
from torch import Tensor

from ls_strategy.ops.cuda.program import Int64, Operations, Pointer, Program
from ls_strategy.ops.cuda.structs import FORMATS, RowsStruct, ScoresStruct, address, check, is_aligned

_THREADS = 256
_WARP = 32
_VECTOR = 4  # elements of a lane
_SORTED = 512  # pairs of a warp
_MOST_EXPERTS = 8192
"""One count each in a block's shared memory."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_COPIES = {16: "uint4", 4: "uint32_t", 2: "uint16_t"}  # by bytes at a time

_PAIRS = (Pointer, Pointer, Int64, Int64)  # experts, which are kept, pairs, number of experts

ROUTING = Program(
    "routing",
    {
        **{f"copy_rows_kernel<{kind}>": (RowsStruct, Int64) for kind in _COPIES.values()},
        **{
            f"{name}_kernel<{wide}>": (RowsStruct,)
            for name in ("scale_rows", "combine", "dot")
            for wide in ("false", "true")
        },
        "forget_kernel": (RowsStruct, Pointer),
        "invert_kernel": (RowsStruct, Pointer),
        "tile_counts_kernel": (*_PAIRS, Pointer),
        "places_kernel": (Pointer, Int64, Int64, Pointer),
        "place_kernel": (*_PAIRS, Pointer, Pointer),
        "topk_kernel": (ScoresStruct,),
    },
)


def sort_by_expert(indices: Tensor, kept: Tensor | None, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sort the pairs by expert."""
    indices, kept = indices.contiguous(), None if kept is None else kept.contiguous()
    pairs = indices.numel()
    check(indices, "indices", like=indices, numel=pairs, dtypes=(torch.int64,))
    if kept is not None:
        check(kept, "kept", like=indices, numel=pairs, dtypes=(torch.bool,))
    if not 0 < num_experts <= _MOST_EXPERTS:
        raise RuntimeError(f"Got {num_experts} experts, but the kernel sorts for 1 to {_MOST_EXPERTS}.")
    counts = indices.new_zeros(num_experts)
    if pairs == 0:
        return indices.new_empty(0), counts
    tiles = -(-pairs // _SORTED)
    places = indices.new_empty(tiles * num_experts)
    shared_bytes = 4 * num_experts
    given = address(indices), address(kept), pairs, num_experts
    ROUTING.launch(
        "tile_counts_kernel", indices, tiles, _WARP, *given, address(places), shared_bytes=shared_bytes
    )  # fmt: skip
    ROUTING.launch("places_kernel", indices, 1, 1024, address(places), tiles, num_experts, address(counts))
    # How many are kept decides a shape: the host has to wait.
    order = indices.new_empty(pairs if kept is None else int(counts.sum().item()))
    ROUTING.launch(
        "place_kernel", indices, tiles, _WARP, *given, address(places), address(order), shared_bytes=shared_bytes
    )  # fmt: skip
    return order, counts


def permute(x: Tensor, order: Tensor, weights: Tensor | None, k: int) -> Tensor:
    """Copy, or scale, the token's row of every kept pair."""
    x, order, weights = _contiguous(x, order, weights)
    rows = _rows(x, order, weights, x.shape[0], k)
    out = x.new_empty(order.numel(), x.shape[1])
    if out.numel() == 0:
        return out
    rows.by_token, rows.out = address(x), address(out)
    blocks = _warps(order.numel())
    if weights is not None:
        ROUTING.launch(f"scale_rows_kernel<{_wide(x, out)}>", x, blocks, _THREADS, rows)
        return out
    row_bytes = x.shape[1] * x.element_size()
    at_a_time = next(n for n in _COPIES if not any(v % n for v in (row_bytes, rows.by_token, rows.out)))
    ROUTING.launch(f"copy_rows_kernel<{_COPIES[at_a_time]}>", x, blocks, _THREADS, rows, row_bytes // at_a_time)
    return out


def combine(y: Tensor, order: Tensor, weights: Tensor | None, tokens: int, k: int) -> Tensor:
    """Add up the rows of every token's pairs."""
    y, order, weights = _contiguous(y, order, weights)
    rows = _rows(y, order, weights, tokens, k)
    check(y, "y", like=y, numel=order.numel() * y.shape[1], dtypes=_FLOATS)
    out = y.new_empty(tokens, y.shape[1])
    if out.numel() == 0:
        return out
    position = order.new_empty(tokens * k)
    rows.position, rows.by_pair, rows.out = address(position), address(y), address(out)
    ROUTING.launch("forget_kernel", y, -(-tokens * k // _THREADS), _THREADS, rows, address(position))
    if order.numel():
        ROUTING.launch("invert_kernel", y, -(-order.numel() // _THREADS), _THREADS, rows, address(position))
    ROUTING.launch(f"combine_kernel<{_wide(y, out)}>", y, _warps(tokens), _THREADS, rows)
    return out


def pair_dots(x: Tensor, y: Tensor, order: Tensor, k: int) -> Tensor:
    """Multiply the two rows of every kept pair."""
    x, order, _ = _contiguous(x, order, None)
    y = y.contiguous()
    rows = _rows(x, order, None, x.shape[0], k)
    check(y, "y", like=x, numel=order.numel() * x.shape[1], dtypes=(x.dtype,))
    out = x.new_zeros(x.shape[0], k, dtype=torch.float32)
    if order.numel():
        rows.by_token, rows.by_pair, rows.out = address(x), address(y), address(out)
        ROUTING.launch(f"dot_kernel<{_wide(x, y)}>", x, _warps(order.numel()), _THREADS, rows)
    return out


def topk_indices(scores: Tensor, k: int) -> Tensor:
    """Find the best of every row."""
    scores = scores.contiguous()
    count, experts = scores.shape
    check(scores, "scores", like=scores, numel=count * experts, dtypes=(torch.float32,))
    if not 0 < k <= experts < 0x7FFFFFFF:
        raise RuntimeError(f"Got k={k} of {experts} scores.")
    out = scores.new_empty(count, k, dtype=torch.int64)
    if out.numel():
        given = ScoresStruct(rows=count, experts=experts, k=k, scores=address(scores), indices=address(out))
        ROUTING.launch("topk_kernel", scores, _warps(count), _THREADS, given)
    return out


def _contiguous(rows: Tensor, order: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    return rows.contiguous(), order.contiguous(), None if weights is None else weights.contiguous()


def _rows(like: Tensor, order: Tensor, weights: Tensor | None, tokens: int, k: int) -> RowsStruct:
    """Return rows without operands."""
    check(like, "rows", like=like, numel=like.numel(), dtypes=_FLOATS)
    check(order, "order", like=like, numel=order.numel(), dtypes=(torch.int64,))
    if k < 1 or like.dim() != 2 or order.numel() > tokens * k:
        raise RuntimeError(f"Got {order.numel()} pairs of {tokens} tokens with {k} choices each.")
    if weights is not None:
        check(weights, "weights", like=like, numel=tokens * k, dtypes=(torch.float32,))
    return RowsStruct(
        tokens=tokens,
        choices=k,
        pairs=order.numel(),
        width=like.shape[1],
        order=address(order),
        weights=address(weights),
        format=FORMATS[like.dtype],
    )


def _wide(*rows: Tensor) -> str:
    """Return ``true`` if every group of four elements can be read and written at once."""
    return str(all(r.shape[1] % _VECTOR == 0 and is_aligned(r, _VECTOR) for r in rows)).lower()


def _warps(count: int) -> int:
    return -(-count * _WARP // _THREADS)


OPERATIONS = Operations(
    (ROUTING,),
    {
        "sort_by_expert": sort_by_expert,
        "permute": permute,
        "combine": combine,
        "pair_dots": pair_dots,
        "topk_indices": topk_indices,
    },
)
