"""Several documents in one sequence, none of which sees another: no token is padding that a document could fill.

::

    documents    a a a a a | b b | c c c c | d
    sequences    a a a a a c c c c      positions  0 1 2 3 4 0 1 2 3      documents  0 0 0 0 0 1 1 1 1
                 b b d - - - - - -                 0 1 0 - - - - - -                 0 0 1 - - - - - -

Documents are placed by best fit, the longest first (Ding et al., "Fewer Truncations Improve Language Modeling",
arXiv:2404.10830, section 3). The result depends on the documents alone, so all ranks build the same sequences, and a
sampler shards these as the samples of any data set.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ls_strategy.checked import checked
from ls_strategy.errors import ConfigError
from ls_strategy.ranges import at_least

IGNORED = -100  # target of tokens without a loss, as in `torch.nn.functional.cross_entropy`
PADDING = -1  # number of the document of padding tokens


class PackedDocuments(Dataset[dict[str, Tensor]]):
    """Sequences of equal length that consist of entire documents, for next-token prediction.

    A sample is a dictionary of tensors ``(length,)``, int64:

    - ``tokens``; padding is 0.
    - ``targets``: the next token of the same document, -100 for padding.
    - ``positions``: within the document, from 0.
    - ``documents``: the number of the document within the sequence, -1 for padding; see `document_attention`.

    A document of more than ``length + 1`` tokens is cut into parts of that size, which overlap by one token, so that
    every token but the first is a target once. Documents of one token have nothing to predict and are left out.
    """

    @checked(("documents",), length=at_least(1))
    def __init__(self, documents: Sequence[Sequence[int] | Tensor], length: int) -> None:
        """Place the documents. Not collective.

        Args:
            documents: tokens of each document; a list of lists, or of integer tensors ``(n,)``.
            length: tokens of a sequence.

        Raises:
            ConfigError: There is no document of two tokens or more, or one does not consist of integers.
        """
        self.length = length
        rows = _rows_of(documents)
        self._text = torch.cat(rows) if rows else torch.empty(0, dtype=torch.long)
        starts = torch.tensor([0] + [len(row) for row in rows]).cumsum(0).tolist()
        parts = [
            (start + at, min(length, len(row) - 1 - at))
            for start, row in zip(starts, rows, strict=False)
            for at in range(0, len(row) - 1, length)
        ]
        if not parts:
            raise ConfigError(
                "PackedDocuments got no document of two tokens or more, so there is no next token to predict. Pass "
                "documents, each a list of token numbers."
            )
        self._sequences = _best_fit(parts, length)
        self._filled = sum(n for _, n in parts)

    @property
    def fill(self) -> float:
        """Share of the tokens that are not padding."""
        return self._filled / (len(self) * self.length)

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        parts = self._sequences[index]
        tokens, positions = (torch.zeros(self.length, dtype=torch.long) for _ in range(2))
        targets, documents = torch.full_like(tokens, IGNORED), torch.full_like(tokens, PADDING)
        at = 0
        for number, (start, n) in enumerate(parts):
            tokens[at : at + n] = self._text[start : start + n]
            targets[at : at + n] = self._text[start + 1 : start + n + 1]
            positions[at : at + n] = torch.arange(n)
            documents[at : at + n] = number
            at += n
        return {"tokens": tokens, "targets": targets, "positions": positions, "documents": documents}


def document_mask(documents: Tensor) -> Tensor:
    """Return the attention mask in which a token sees itself and its predecessors in the same document.

    Args:
        documents: numbers of the documents ``(B, T)``, as of `PackedDocuments`.

    Returns:
        ``(B, 1, T, T)``, bool, for ``attn_mask`` of `torch.nn.functional.scaled_dot_product_attention`.

    Raises:
        ConfigError: ``documents`` is no integer tensor with two dimensions.
    """
    if not isinstance(documents, Tensor) or documents.dim() != 2 or documents.is_floating_point():
        got = f"{tuple(documents.shape)} of {documents.dtype}" if isinstance(documents, Tensor) else repr(documents)
        raise ConfigError(f"Got documents={got}, but document_mask requires numbers (batch, tokens). Pass int64.")
    tokens = documents.shape[1]
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same & torch.ones((tokens, tokens), dtype=torch.bool, device=documents.device).tril_()


def _rows_of(documents: Any) -> list[Tensor]:
    if not isinstance(documents, Sequence) or isinstance(documents, str | bytes):
        raise ConfigError(
            f"Got documents={type(documents).__name__}, but PackedDocuments requires a list of documents, each a "
            "list of token numbers."
        )
    rows: list[Tensor] = []
    for number, document in enumerate(documents):
        try:
            row = torch.as_tensor(document)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            row = torch.empty(0, 0)
        if row.dim() != 1 or (len(row) and (row.is_floating_point() or row.is_complex() or row.dtype == torch.bool)):
            raise ConfigError(
                f"Got a document {number} of type {type(document).__name__}, which is no list of token numbers. Pass a "
                "list of integers, or an integer tensor with one dimension."
            )
        rows.append(row.long().cpu())
    return rows


def _best_fit(parts: list[tuple[int, int]], length: int) -> list[list[tuple[int, int]]]:
    """Place parts ``(start, tokens)`` in sequences: the longest first, each where least room is left after it."""
    sequences: list[list[tuple[int, int]]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for part in sorted(parts, key=lambda p: (-p[1], p[0])):
        at = bisect_left(rooms, part[1])
        if at == len(rooms):
            chosen, room = len(sequences), length
            sequences.append([])
        else:
            room = rooms[at]
            chosen = by_room[room].pop()
            if not by_room[room]:
                del by_room[room]
                del rooms[at]
        sequences[chosen].append(part)
        left = room - part[1]
        if left:
            if left not in by_room:
                by_room[left] = []
                insort(rooms, left)
            by_room[left].append(chosen)
    return sequences
