"""Updates and norms on a GPU: the host's side of ``update.cu`` and ``norm.cu``."""

from __future__ import annotations

from ctypes import Structure
from typing import Any

import torch
from torch import Tensor

from ls_strategy.ops.cuda.program import Int64, Operations, Pointer, Program
from ls_strategy.ops.cuda.structs import (
    FORMATS,
    AdagradNumbers,
    AdamWNumbers,
    BuffersStruct,
    LionNumbers,
    SGDNumbers,
    address,
    check,
    is_aligned,
)
from ls_strategy.ops.moments import BLOCK

_THREADS = 256
_WARP = 32
_VECTOR = 4  # elements of a thread
_PER_THREAD = {False: _VECTOR, True: BLOCK // _WARP}  # elements, by whether moments are in 8 bits: a warp takes a block
_SUM_BLOCK, _SUM_GROUP = 4096, 256  # see norm.py

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MOMENTS = (torch.float32, torch.bfloat16, torch.uint8)

_RULES: dict[str, type[Structure]] = {
    "AdamW": AdamWNumbers,
    "Lion": LionNumbers,
    "MomentumSGD": SGDNumbers,
    "PlainSGD": SGDNumbers,
    "Adagrad": AdagradNumbers,
}


def _kernel(rule: str, *, in_8_bits: bool, wide: bool) -> str:
    return f"update_{'8bit_' * in_8_bits}kernel<{rule}<float>, {str(wide).lower()}>"


UPDATE = Program(
    "update",
    {
        _kernel(rule, in_8_bits=in_8_bits, wide=wide): (numbers, BuffersStruct)
        for rule, numbers in _RULES.items()
        for in_8_bits in ((False, True) if rule != "PlainSGD" else (False,))
        for wide in (False, True)
    },
)

NORM = Program(
    "norm",
    {"square_sums_kernel": (BuffersStruct, Pointer, Pointer), "group_sums_kernel": (Pointer, Int64, Pointer)},
)

Stored = tuple[Tensor | None, Tensor | None]
"""Codes and scales of a moment."""

_NONE: Stored = (None, None)


def _update(  # noqa: PLR0913, PLR0917
    rule: str,
    param: Tensor,
    first: Stored,
    second: Stored,
    grad: Tensor,
    out: Tensor | None,
    clip: Tensor | None,
    unscale: float,
    *rest: Any,
) -> None:
    *numbers, seed, offset = (each for each in rest if each is not None)  # `low` and `ties`, unless masters are split
    if len(numbers) != len(_RULES[rule]._fields_):  # ctypes would fill what is missing with zeros
        raise RuntimeError(f"ls_strategy: {rule} got {len(numbers)} numbers; split masters have no kernel on GPUs")
    n = param.numel()
    codes = next((c for c, _ in (first, second) if c is not None), None)
    check(param, "param", like=param, numel=n, dtypes=(torch.float32,))
    check(grad, "grad", like=param, numel=n, dtypes=_FLOATS)
    if out is not None:
        check(out, "out", like=param, numel=n, dtypes=_FLOATS)
    if clip is not None:
        check(clip, "clip", like=param, numel=1, dtypes=(torch.float32,))
    for moment, scales in (first, second):
        if moment is not None and codes is not None:
            check(
                moment, "a moment", like=param, numel=n, dtypes=(codes.dtype,) if codes.dtype in _MOMENTS else _MOMENTS
            )
            if (scales is not None) != (moment.dtype == torch.uint8):
                raise RuntimeError("ls_strategy: scales go with uint8 codes")
            if scales is not None:
                check(scales, "scales", like=param, numel=-(-n // BLOCK), dtypes=(torch.float32,))
    if n == 0:
        return
    buffers = BuffersStruct(
        n=n,
        param=address(param),
        first=address(first[0]),
        first_scales=address(first[1]),
        second=address(second[0]),
        second_scales=address(second[1]),
        grad=address(grad),
        out=address(out),
        clip=address(clip),
        unscale=unscale,
        seed=seed,
        offset=offset,
        moment_format=FORMATS[torch.float32 if codes is None else codes.dtype],
        grad_format=FORMATS[grad.dtype],
        out_format=FORMATS[torch.float32 if out is None else out.dtype],
    )
    in_8_bits = codes is not None and codes.dtype == torch.uint8
    wide = all(is_aligned(t, _VECTOR) for t in (param, grad, first[0], second[0], out))
    blocks = -(-n // (_THREADS * _PER_THREAD[in_8_bits]))
    kernel = _kernel(rule, in_8_bits=in_8_bits, wide=wide)
    UPDATE.launch(kernel, param, blocks, _THREADS, _RULES[rule](*numbers), buffers)


def sum_of_squares(grad: Tensor, unscale: float) -> Tensor:
    """Compute `ls_strategy.ops.norm.sum_of_squares`."""
    n = grad.numel()
    check(grad, "grad", like=grad, numel=n, dtypes=_FLOATS)
    result = torch.zeros(2, dtype=torch.float64, device=grad.device)
    if n == 0:
        return result
    buffers = BuffersStruct(n=n, grad=address(grad), unscale=unscale, grad_format=FORMATS[grad.dtype])
    count = -(-n // _SUM_BLOCK)
    # Memory of torch's allocator may be given back before the kernels ran: it is reused on the same stream only.
    sums = result if count == 1 else result.new_empty(count)
    NORM.launch("square_sums_kernel", grad, _blocks(count), _THREADS, buffers, address(sums), address(result) + 8)
    while count > 1:
        n, count = count, -(-count // _SUM_GROUP)
        source, sums = sums, result if count == 1 else result.new_empty(count)
        NORM.launch("group_sums_kernel", grad, _blocks(count), _THREADS, address(source), n, address(sums))
    return result


def _blocks(warps: int) -> int:
    return -(-warps * _WARP // _THREADS)


UPDATES = Operations(
    (UPDATE, NORM),
    {  # arguments as in `ls_strategy.ops.schemas`
        "adamw_": lambda param, m, m_scales, v, v_scales, *rest: _update(
            "AdamW", param, (m, m_scales), (v, v_scales), *rest
        ),
        "lion_": lambda param, m, scales, *rest: _update("Lion", param, (m, scales), _NONE, *rest),
        "sgd_": lambda param, m, scales, *rest: _update(
            "PlainSGD" if m is None else "MomentumSGD", param, (m, scales), _NONE, *rest
        ),
        "adagrad_": lambda param, v, scales, *rest: _update("Adagrad", param, _NONE, (v, scales), *rest),
        "sum_of_squares": sum_of_squares,
    },
)
