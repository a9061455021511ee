"""`InstructionData`: instructions as packed rows of tokens, with labels on the responses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader

from recipes.finetune.instructions import Record, embedded_records, read_records, split
from recipes.finetune.packing import Document, PackedRows

END = 0
"""Byte that ends a response if the model's folder has no tokenizer: it does not occur in text."""


@dataclass(frozen=True, kw_only=True)
class Files:
    """Where the instructions are."""

    train: str | None = None
    """JSON lines. None: functions of the Python standard library and their docstrings."""

    val: str | None = None
    """JSON lines. None: the last ``val_fraction`` of the training lines."""

    val_fraction: float = 0.05
    """Fraction of the lines that validates if there is no file for it."""

    max_records: int | None = None
    """Take this many training lines. None: all."""

    def __post_init__(self) -> None:
        if not 0.0 < self.val_fraction < 1.0:
            raise ValueError(f"Got val_fraction={self.val_fraction}, but it must be between 0 and 1.")
        if self.max_records is not None and self.max_records < 2:
            raise ValueError(f"Got max_records={self.max_records}, but it must be at least 2, or None for all.")


class Encoder(Protocol):
    """Text of records to tokens."""

    padding: int
    """Token after the end of a row."""

    def document(self, record: Record) -> Document:
        """Return the tokens of a record, and which belong to responses."""
        ...


class ByteEncoder:
    """Every UTF-8 byte is a token, and `END` ends a response."""

    padding = END

    def document(self, record: Record) -> Document:
        """Return the tokens of a record.

        Raises:
            ValueError: the record needs a chat template.
        """
        if record.messages:
            raise ValueError("Got messages, but the model's folder has no tokenizer with a chat template. Save one.")
        pieces = [(list(p.encode()), [*r.encode(), END]) for p, r in record.turns]
        return _joined(pieces)


class TokenizerEncoder:
    """A tokenizer of transformers."""

    def __init__(self, folder: str) -> None:
        """Load it from a model's folder."""
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        end = self._tokenizer.eos_token_id
        if end is None:
            raise ValueError(f"Got {folder}, whose tokenizer has no token for the end of a text. Set eos_token in it.")
        self._end: int = end
        self.padding: int = end if self._tokenizer.pad_token_id is None else self._tokenizer.pad_token_id

    def document(self, record: Record) -> Document:
        """Return the tokens of a record, by the chat template if it has messages."""
        if record.messages:
            return self._chat(record.messages)
        start = [] if self._tokenizer.bos_token_id is None else [self._tokenizer.bos_token_id]
        pieces = [(self._plain(p), [*self._plain(r), self._end]) for p, r in record.turns]
        return _joined([(start, []), *pieces])

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the tokenizer's files into a folder."""
        self._tokenizer.save_pretrained(folder)

    def _plain(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _chat(self, messages: Sequence[dict[str, str]]) -> Document:
        """Return the tokens of a conversation: what each answer adds to the messages before it is its response.

        Raises:
            ValueError: the tokenizer has no chat template, or one that changes earlier messages.
        """
        if not self._tokenizer.chat_template:
            raise ValueError("Got messages, but the tokenizer has no chat template. Give prompt and completion.")
        pieces: list[tuple[list[int], list[int]]] = []
        done: list[int] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            asked = self._templated(messages[:i], answer=True)
            answered = self._templated(messages[: i + 1], answer=False)
            if asked[: len(done)] != done or answered[: len(asked)] != asked:
                raise ValueError(
                    "the tokenizer's chat template changes earlier messages when one is added, so responses cannot be "
                    "found. Give prompt and completion, in the template's text."
                )
            pieces.append((asked[len(done) :], answered[len(asked) :]))
            done = answered
        return _joined(pieces)

    def _templated(self, messages: Sequence[dict[str, str]], *, answer: bool) -> list[int]:
        found = self._tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=answer, return_dict=True, tokenize=True
        )
        return list(found["input_ids"])


def _joined(pieces: Sequence[tuple[list[int], list[int]]]) -> Document:
    tokens = [t for prompt, response in pieces for t in (*prompt, *response)]
    predicted = [p for prompt, response in pieces for p in ([False] * len(prompt) + [True] * len(response))]
    return Document(tokens, predicted)


def make_encoder(folder: str) -> Encoder:
    """Return the tokenizer of a model's folder; bytes if the folder has none."""
    names = ("tokenizer_config.json", "tokenizer.json", "vocab.json", "spiece.model", "tokenizer.model")
    if Path(folder).is_dir() and not any((Path(folder) / name).is_file() for name in names):
        return ByteEncoder()
    return TokenizerEncoder(folder)


class InstructionData(pl.LightningDataModule):
    """Packed rows of instructions and responses."""

    def __init__(
        self,
        model: str,
        files: Files = Files(),
        block_size: int = 512,
        batch_size: int = 8,
        packed: bool = True,
        num_workers: int = 0,
    ) -> None:
        """Configure text and batches.

        Args:
            model: folder or name of the model, for its tokenizer.
            files: the instructions.
            block_size: tokens per row. Longer records are cut at their end, and counted in the log.
            batch_size: rows per rank and step.
            packed: whether a row may have several records.
            num_workers: loader processes per rank; 0 loads in the training process.
        """
        super().__init__()
        if min(block_size, batch_size) < 1:
            raise ValueError(f"Got block_size={block_size}, batch_size={batch_size}, but each must be at least 1.")
        self.model, self.files, self.block_size, self.batch_size = model, files, block_size, batch_size
        self.packed, self.num_workers = packed, num_workers
        self._rows: tuple[PackedRows, PackedRows] | None = None

    def setup(self, stage: str) -> None:
        """Read, tokenize and pack the instructions, on every rank.

        Raises:
            ValueError: a line cannot be read, or there are too few.
        """
        if self._rows is not None:
            return
        files = self.files
        records = embedded_records() if files.train is None else read_records(Path(files.train).expanduser())
        records = records[: files.max_records]
        if files.val is not None:
            held = read_records(Path(files.val).expanduser())
        else:
            records, held = split(records, files.val_fraction)
        if not records or not held:
            raise ValueError(f"Got {len(records)} records to train on and {len(held)} to validate. Give more lines.")
        encoder = make_encoder(self.model)
        self._rows = self._packed(records, encoder, "training"), self._packed(held, encoder, "validation")

    def _packed(self, records: Sequence[Record], encoder: Encoder, name: str) -> PackedRows:
        documents = [encoder.document(record) for record in records]
        size = self.block_size
        cut = sum(len(document.tokens) > size for document in documents)
        documents = [Document(d.tokens[:size], d.predicted[:size]) for d in documents]
        documents = [d for d in documents if any(d.predicted[1:])]  # nothing of the others is predicted
        if not documents:
            raise ValueError(
                f"no {name} record has a response within block_size={size} tokens. Increase data.block_size."
            )
        rows = PackedRows(documents, size, packed=self.packed, padding=encoder.padding)
        rank_zero_info(
            f"{name}: {len(records):,} records, {len(records) - len(documents):,} without a response within "
            f"{size} tokens, {cut:,} cut; {len(rows):,} rows, {rows.num_tokens / (len(rows) * size):.0%} full; "
            f"{rows.num_predicted:,} tokens are predicted"
        )
        return rows

    def _loader(self, rows: PackedRows, *, shuffle: bool) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(rows, self.batch_size, shuffle=shuffle, num_workers=self.num_workers, drop_last=shuffle)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return rows in a new order in every epoch; Lightning distributes them over the ranks."""
        assert self._rows is not None
        return self._loader(self._rows[0], shuffle=True)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return the validation rows; Lightning distributes them over the ranks."""
        assert self._rows is not None
        return self._loader(self._rows[1], shuffle=False)
