"""Tiles of quantized weights on a GPU: the host's side of ``quantized.cu``; see `ls_strategy.ops.quantized`."""

from __future__ import annotations

import torch
from torch import Tensor

from ls_strategy.ops.cuda.program import Operations, Program
from ls_strategy.ops.cuda.structs import FORMATS, TilesStruct, address, check, is_aligned
from ls_strategy.ops.levels import BLOCK, NF4, TILE

_THREADS = 256
_CODES = 4  # bytes of a thread
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_BITS = (4, 4, 8)  # by number of the format: nf4, int4, int8
_LEVELS = (NF4, tuple((i - 8) / 7 for i in range(16)), (0.0,) * 16)

QUANTIZED = Program(
    "quantized",
    {f"dequantize{bits}_kernel<{wide}>": (TilesStruct,) for bits in (4, 8) for wide in ("false", "true")},
)


def dequantize_(packed: Tensor, out: Tensor, form: int) -> None:
    """Compute `ls_strategy.ops.quantized.dequantize_`; ``form`` is the number of the format."""
    if not 0 <= form < len(_BITS) or out.numel() % TILE:
        raise RuntimeError(f"Got {out.numel()} elements in format {form}, but tiles have {TILE}.")
    count, code_bytes = out.numel() // TILE, TILE * _BITS[form] // 8
    check(out, "out", like=out, numel=count * TILE, dtypes=_FLOATS)
    check(packed, "packed", like=out, numel=count * (TILE // BLOCK * 2 + code_bytes), dtypes=(torch.uint8,))
    if count == 0:
        return
    wide = is_aligned(packed, _CODES) and is_aligned(out, _CODES)
    tiles = TilesStruct(
        count=count, packed=address(packed), out=address(out), format=FORMATS[out.dtype], form=form,
        levels=_LEVELS[form],
    )  # fmt: skip
    blocks = -(-count * (code_bytes // _CODES) // _THREADS)
    QUANTIZED.launch(f"dequantize{_BITS[form]}_kernel<{str(wide).lower()}>", out, blocks, _THREADS, tiles)


OPERATIONS = Operations((QUANTIZED,), {"dequantize_": dequantize_})
