"""What kernels are given, field by field as in ``csrc/buffers.h``, ``routing.h`` and ``quantized.h``."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

_POINTER, _INT64, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.uint8: 3}


def _fields(names: str, kind: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class AdamWNumbers(ctypes.Structure):
    """Numbers of the update, fp32."""

    _fields_ = _fields("decay l2 weight1 rest1 beta2 weight2 root2 eps rate", _FLOAT)


class LionNumbers(ctypes.Structure):
    """Numbers of the update, fp32."""

    _fields_ = _fields("decay beta1 weight1 beta2 weight2 rate", _FLOAT)


class SGDNumbers(ctypes.Structure):
    """Numbers of the update, fp32, and its flags."""

    _fields_ = [*_fields("l2 momentum weight rate", _FLOAT), *_fields("nesterov first", ctypes.c_bool)]


class AdagradNumbers(ctypes.Structure):
    """Numbers of the update, fp32."""

    _fields_ = _fields("l2 eps rate", _FLOAT)


class BuffersStruct(ctypes.Structure):
    """Memory of an update, or the gradient of a norm."""

    _fields_ = [
        ("n", _INT64),
        *_fields("param first first_scales second second_scales grad out clip", _POINTER),
        ("unscale", _FLOAT),
        *_fields("seed offset", ctypes.c_uint32),
        *_fields("moment_format grad_format out_format", ctypes.c_int),
        *_fields("high low ties", _POINTER),
    ]


class RowsStruct(ctypes.Structure):
    """Rows of tokens and of pairs."""

    _fields_ = [
        *_fields("tokens choices pairs width", _INT64),
        *_fields("order position weights by_token by_pair out", _POINTER),
        ("format", ctypes.c_int),
    ]


class ScoresStruct(ctypes.Structure):
    """Scores of every token's experts."""

    _fields_ = [*_fields("rows experts k", _INT64), *_fields("scores indices", _POINTER)]


class TilesStruct(ctypes.Structure):
    """Tiles of quantized weights."""

    _fields_ = [
        ("count", _INT64),
        *_fields("packed out", _POINTER),
        *_fields("format form", ctypes.c_int),
        ("levels", _FLOAT * 16),
    ]


STRUCTURES = (
    AdamWNumbers,
    LionNumbers,
    SGDNumbers,
    AdagradNumbers,
    BuffersStruct,
    RowsStruct,
    ScoresStruct,
    TilesStruct,
)


def address(tensor: Tensor | None) -> int:
    """Return where a tensor begins; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def is_aligned(tensor: Tensor | None, count: int) -> bool:
    """Return whether ``count`` elements at a time can be read from the beginning of a tensor on."""
    return tensor is None or tensor.data_ptr() % (count * tensor.element_size()) == 0


def check(tensor: Tensor, name: str, *, like: Tensor, numel: int, dtypes: tuple[torch.dtype, ...]) -> None:
    """Refuse what a kernel, which reads raw memory, would read wrongly.

    Raises:
        RuntimeError: wrong device, number of elements, dtype or layout.
    """
    fits = tensor.numel() == numel and tensor.dtype in dtypes and tensor.is_contiguous()
    if not fits or tensor.device != like.device:
        raise RuntimeError(
            f"Got {name} of {tensor.dtype}, {tuple(tensor.shape)}, on {tensor.device}, but it must have {numel} "
            f"contiguous elements of {' or '.join(map(str, dtypes))} on {like.device}."
        )
