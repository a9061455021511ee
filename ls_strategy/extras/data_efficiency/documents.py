"""Attention within documents that share a sequence, without a mask: memory is proportional to the tokens.

::

    documents     a a a a b b c c | d d d - - - - -       all sequences of a batch in one line, padding as a document
    runs          |-------|---|---|-----|---------|       causal attention inside each: one call of torch's
                                                          variable-length flash attention, or one call for each length

Krell et al., "Efficient Sequence Packing without Cross-contamination", arXiv:2107.02027.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional

from ls_strategy._torch import WeakIdKeyDictionary, is_fake, varlen_attention, version_of, without_dispatch_modes
from ls_strategy.device import is_capturing
from ls_strategy.errors import ConfigError
from ls_strategy.extras.data_efficiency.packing import PADDING
from ls_strategy.parallel.context.attention import all_documents, attend_to_documents
from ls_strategy.parallel.context.ring import can_flash
from ls_strategy.parallel.regions import untraced


@dataclass(frozen=True)
class _Runs:
    """Runs of tokens of one document, of all sequences of a batch one after another."""

    lengths: list[int]
    # ``(runs + 1,)``, int32, from 0, on the device of the queries; None for tensors without values.
    ends: Tensor | None = None
    device: torch.device | None = None  # where ``ends`` are
    version: int | None = None  # of the tensor with the numbers


_KNOWN: WeakIdKeyDictionary = WeakIdKeyDictionary()  # the `_Runs` of tensors with numbers of documents


@untraced
def document_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention in which a token sees itself and its predecessors in the same document.

    The result is that of `torch.nn.functional.scaled_dot_product_attention` with `document_mask`, up to rounding, but
    no mask is needed: memory grows with the tokens, not with their square. Neighbouring padding counts as a document.

    In 16 bit on NVIDIA GPUs from sm_80 on, all documents are one call of torch's variable-length flash attention.
    Elsewhere there is one call of torch's attention for neighbouring documents of equal length. In blocks whose tokens
    are sharded (``parallel.context``), ranks exchange tokens for heads, or, in rings, compare numbers of documents
    while keys and values pass; there it is collective, and ``documents`` must be an argument of the block.

    The host reads the numbers of a tensor once, and so waits for the device; in sharded blocks, and for tensors of
    `torch.inference_mode`, once per call. `torch.compile` breaks its graph here. There is no dropout.

    Args:
        query: ``(B, H, T, N)``.
        key: ``(B, K, T, N)``; the same number of heads, or with ``enable_gqa`` one that divides it.
        value: ``(B, K, T, M)``.
        documents: numbers of the documents ``(B, T)``, integers, as of `PackedDocuments`: equal for consecutive
            tokens of a document, -1 for padding. In a sharded block also those of all tokens.
        scale: of the scores. None: ``N ** -0.5``.
        enable_gqa: whether heads of keys and values are shared by several heads of queries.

    Returns:
        ``(B, H, T, M)``.

    Raises:
        ConfigError: Shapes do not fit, the tokens of a document are not consecutive, or a CUDA graph records.
        PlanError: In a sharded block: the heads cannot be sharded, or the numbers are not for its tokens.
    """
    _check(query, key, value, documents, enable_gqa)
    everything = all_documents(documents, query)
    attend = partial(_attend, _runs_of(everything, query.device), scale, enable_gqa)
    return attend_to_documents(attend, (query, key, value), everything, scale)


def _check(query: Tensor, key: Tensor, value: Tensor, documents: Tensor, enable_gqa: bool) -> None:
    numbers = isinstance(documents, Tensor) and documents.dim() == 2 and documents.dtype != torch.bool
    if not numbers or documents.is_floating_point() or documents.is_complex():
        got = f"{tuple(documents.shape)} of {documents.dtype}" if isinstance(documents, Tensor) else repr(documents)
        raise ConfigError(f"Got documents={got}, but document_attention requires numbers (batch, tokens). Pass int64.")
    got = f"Got query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    four = query.dim() == key.dim() == value.dim() == 4
    if not four or not query.shape[2] == key.shape[2] == value.shape[2] or len(documents) != len(query):
        raise ConfigError(
            f"{got}, documents {tuple(documents.shape)}, but document_attention requires (batch, heads, tokens, width) "
            "three times, for the same tokens, and documents (batch, tokens). A cache of earlier keys needs a mask."
        )
    if query.shape[1] != key.shape[1] and (not enable_gqa or query.shape[1] % key.shape[1]):
        raise ConfigError(
            f"{got} with enable_gqa={enable_gqa}. The numbers of heads must be equal, or with enable_gqa=True that of "
            "keys must divide that of queries."
        )


def _runs_of(documents: Tensor, device: torch.device) -> _Runs:
    """Return the runs of equal numbers, remembered as long as the tensor lives. The host waits for the device."""
    if is_fake(documents):  # without values, one document in each sequence needs most memory
        return _Runs([documents.shape[1]] * len(documents))
    if device.type == "cuda" and is_capturing(device):
        raise ConfigError(
            "document_attention was called while a CUDA graph records, which would repeat it with the documents of "
            "this batch. Call it outside of the graph, or use document_mask."
        )
    version = None if documents.is_inference() else version_of(documents)
    known: _Runs | None = _KNOWN.get(documents)
    if version is not None and known is not None and (known.version, known.device) == (version, device):
        return known
    with without_dispatch_modes():  # selective recompute would look for these operations when it finds the runs known
        lengths = _lengths(documents.detach().cpu().long())
        ends = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    _KNOWN[documents] = runs = _Runs(lengths, ends, device, version)
    return runs


def _lengths(documents: Tensor) -> list[int]:
    """Return the lengths of the runs of equal numbers, on the host."""
    tokens = documents.shape[1]
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = first.flatten().nonzero().flatten()
    numbers = documents.flatten()[starts]
    named = torch.stack((starts // max(tokens, 1), numbers), 1)[numbers != PADDING]
    found, times = named.unique(dim=0, return_counts=True) if len(named) else (named, starts)
    if len(found) < len(named):
        row, number = found[times.argmax()].tolist()
        raise ConfigError(
            f"Got documents in whose sequence {row} the tokens of document {number} are not consecutive, which "
            "document_attention requires. Give every document a number of its own, or use document_mask."
        )
    return starts.diff(append=starts.new_tensor([documents.numel()])).tolist() or [0]


def _attend(
    runs: _Runs, scale: float | None, enable_gqa: bool, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:  # fmt: skip
    """Attend on this device to all tokens of the heads given."""
    lines = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    if query.numel() and can_flash(query, key, value):
        ends = query.new_zeros(len(runs.lengths) + 1, dtype=torch.int32) if runs.ends is None else runs.ends
        line = varlen_attention(lines[0], lines[1], lines[2], ends, max(runs.lengths), scale)
    else:
        line = _by_length(lines, runs.lengths, scale, enable_gqa)
    return line.unflatten(0, (len(query), query.shape[2])).transpose(1, 2)


def _by_length(lines: Sequence[Tensor], lengths: list[int], scale: float | None, enable_gqa: bool) -> Tensor:
    """Attend with one call for neighbours of equal length. ``(tokens, heads, width)`` each."""
    equal = [(length, len(list(them))) for length, them in groupby(lengths)]
    # One split instead of slices, each of which would fill a gradient for all tokens.
    parts = zip(*(line.split([length * n for length, n in equal]) for line in lines), strict=True)
    results: list[Tensor] = []
    for (length, n), part in zip(equal, parts, strict=True):
        q, k, v = (x.unflatten(0, (n, length)).transpose(1, 2) for x in part)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
        results.append(y.transpose(1, 2).flatten(0, 1))
    return torch.cat(results)
