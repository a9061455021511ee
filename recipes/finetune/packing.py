"""Several documents in one row, without padding between them and without attention across them.

::

    input_ids      a a a a b b c c c c c .        documents a, b and c, and padding
    position_ids   0 1 2 3 0 1 0 1 2 3 4 0        each document starts at 0: transformers derives the attention mask
    labels         - - 3 4 - 1 - - 2 3 4 -        only responses; the model predicts a token from those before it

Packing changes no loss: Krell et al., "Efficient Sequence Packing without Cross-contamination", arXiv:2107.02027.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

IGNORED = -100
"""The label of a token that is not predicted, as in torch's cross entropy."""


class Document(NamedTuple):
    """Tokens of a conversation."""

    tokens: list[int]
    predicted: list[bool]
    """Whether a token belongs to a response."""


def pack(lengths: Sequence[int], block_size: int) -> list[list[int]]:
    """Return which documents each row has: every document goes to the first row with room for it.

    Rows with little room are closed, so that this takes linear time; a row's documents are in the given order.

    >>> pack([5, 3, 4, 2, 1], 8)
    [[0, 1], [2, 3, 4]]
    """
    rows: list[list[int]] = []
    open_rows: list[tuple[int, list[int]]] = []
    for document, length in enumerate(lengths):
        for at, (room, row) in enumerate(open_rows):
            if length <= room:
                row.append(document)
                open_rows[at] = room - length, row
                break
        else:
            rows.append([document])
            open_rows.append((block_size - length, rows[-1]))
        open_rows = [(room, row) for room, row in open_rows if room > 0][-_OPEN_ROWS:]
    return rows


_OPEN_ROWS = 64
"""Maximum rows that are looked at for a document."""


class PackedRows(Dataset[dict[str, Tensor]]):
    """Rows of ``block_size`` tokens."""

    def __init__(self, documents: Sequence[Document], block_size: int, *, packed: bool, padding: int) -> None:
        """Pack ``documents`` of at most ``block_size`` tokens.

        Args:
            documents: tokenized records.
            block_size: tokens per row.
            packed: whether a row may have several documents.
            padding: token at the end of a row that is not full.
        """
        self.documents, self.block_size, self.padding = documents, block_size, padding
        lengths = [len(document.tokens) for document in documents]
        self.rows = pack(lengths, block_size) if packed else [[i] for i in range(len(documents))]
        self.num_tokens = sum(lengths)
        self.num_predicted = sum(sum(document.predicted[1:]) for document in documents)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``input_ids``, ``position_ids`` and ``labels``, each (block_size,) integers."""
        tokens = torch.full((self.block_size,), self.padding)
        labels = torch.full((self.block_size,), IGNORED)
        positions = torch.zeros(self.block_size, dtype=torch.long)
        at = 0
        for document in (self.documents[i] for i in self.rows[index]):
            end = at + len(document.tokens)
            tokens[at:end] = torch.tensor(document.tokens)
            predicted = torch.tensor(document.predicted)
            predicted[0] = False  # there is nothing before it in its document
            labels[at:end] = torch.where(predicted, tokens[at:end], IGNORED)
            positions[at:end] = torch.arange(end - at)
            at = end
        positions[at:] = torch.arange(self.block_size - at)
        return {"input_ids": tokens, "position_ids": positions, "labels": labels}
