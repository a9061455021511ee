"""Tokenize text files to disk, once: ``<cache>/<key>/{train,val}.bin``, raw integers, memory-mapped by all ranks.

The key is a hash of the options and of every file's name, size and modification time, so an entry is never stale. An
entry is built in a temporary folder and renamed, so it is never incomplete.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

TokenizerName = Literal["bytes", "gpt2", "cl100k_base", "o200k_base"]

TOKENS: dict[str, int] = {"bytes": 256, "gpt2": 50257, "cl100k_base": 100277, "o200k_base": 200019}
"""Number of tokens per tokenizer. A constant, because tiktoken would have to load or download its tables."""


class Tokenizer(Protocol):
    """Text to integers and back."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text``."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``, without padding tokens."""
        ...

    def to_bytes(self, tokens: Sequence[int]) -> bytes:
        """Return the UTF-8 bytes of ``tokens``, which may begin or end inside a character."""
        ...


class ByteTokenizer:
    """Every UTF-8 byte is a token."""

    def encode(self, text: str) -> list[int]:
        """Return the bytes of ``text``."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text, with a replacement character for invalid UTF-8."""
        return self.to_bytes(tokens).decode(errors="replace")

    def to_bytes(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes."""
        return bytes(t for t in tokens if t < 256)


class TiktokenTokenizer:
    """One of tiktoken's byte-pair encodings."""

    def __init__(self, name: str) -> None:
        """Load the encoding, which is downloaded at the first use.

        Raises:
            ModuleNotFoundError: tiktoken is not installed.
        """
        try:
            import tiktoken  # type: ignore[import-not-found]  # optional
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(
                f"Got data.corpus.tokenizer: {name}, which needs the package tiktoken. "
                "Run `pip install tiktoken`, or set data.corpus.tokenizer: bytes."
            ) from missing
        self._encoding = tiktoken.get_encoding(name)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text``; special tokens in it are treated as text."""
        return self._encoding.encode_ordinary(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``."""
        return self._encoding.decode([t for t in tokens if t < self._encoding.n_vocab])

    def to_bytes(self, tokens: Sequence[int]) -> bytes:
        """Return the UTF-8 bytes of ``tokens``, which may begin or end inside a character."""
        return self._encoding.decode_bytes([t for t in tokens if t < self._encoding.n_vocab])


def make_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of that name."""
    return ByteTokenizer() if name == "bytes" else TiktokenTokenizer(name)


def vocab_size(tokenizer: str) -> int:
    """Return the embedding rows for ``tokenizer``: its tokens, rounded up to a multiple of 64.

    Matrix units are faster on multiples; the additional rows are never a target.

    >>> [vocab_size(name) for name in ("bytes", "gpt2")]
    [256, 50304]
    """
    return -(-TOKENS[tokenizer] // 64) * 64


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """The text and its tokenizer."""

    path: str | None = None
    """A text file, or a folder of text files. None: the source of the installed Python standard library."""

    pattern: str = "**/*.py"
    """Files of the folder, as a glob."""

    exclude: list[str] = field(default_factory=lambda: ["site-packages", "dist-packages", "test", "tests", "idle_test"])
    """Names of folders below ``path`` that are excluded."""

    max_bytes: int | None = 16_000_000
    """Take full files up to this many bytes. None: take all."""

    val_fraction: float = 0.05
    """Fraction of the bytes used for validation: the last files, or the end of a single file."""

    tokenizer: TokenizerName = "bytes"
    """``bytes``: every byte is a token. The others are encodings of the package tiktoken."""

    cache_dir: str | None = None
    """Folder of the tokens. None: ``ls_strategy/corpus`` below ``$XDG_CACHE_HOME`` or ``~/.cache``."""

    def __post_init__(self) -> None:
        if not 0.0 < self.val_fraction < 1.0:
            raise ValueError(f"Got val_fraction={self.val_fraction}, but it must be between 0 and 1.")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ValueError(f"Got max_bytes={self.max_bytes}, but it must be at least 1, or None for all.")


class Corpus:
    """The tokens of a `CorpusConfig`: call `build` on one process per node, then `open` on all."""

    def __init__(self, config: CorpusConfig) -> None:
        """Check the options without reading the text.

        Raises:
            FileNotFoundError: the path does not exist.
            ModuleNotFoundError: the tokenizer's package is not installed.
        """
        self.config = config
        default = sysconfig.get_paths()["stdlib"]
        self.root = Path(default if config.path is None else config.path).expanduser()
        if not self.root.exists():
            raise FileNotFoundError(
                f"Got data.corpus.path: {self.root}, which does not exist. Give a text file or a folder of text "
                "files, or omit it for the source of the Python standard library."
            )
        self.tokenizer = make_tokenizer(config.tokenizer)
        self._files: list[Path] | None = None

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned integer type for all tokens."""
        return np.min_scalar_type(TOKENS[self.config.tokenizer] - 1)

    @property
    def cache(self) -> Path:
        """Folder of all entries."""
        if self.config.cache_dir is not None:
            return Path(self.config.cache_dir).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ls_strategy" / "corpus"

    @property
    def entry(self) -> Path:
        """Folder of this corpus."""
        digest = hashlib.blake2b(digest_size=8)
        options = {k: v for k, v in asdict(self.config).items() if k != "cache_dir"}
        digest.update(json.dumps(["1", str(self.root.resolve()), options]).encode())
        for file in self.files():
            stat = file.stat()
            digest.update(f"{file.relative_to(self.root)}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
        return self.cache / f"{self.config.tokenizer}-{digest.hexdigest()}"

    def files(self) -> list[Path]:
        """Return the files, ordered by a hash of their names, up to ``max_bytes``.

        Neighboring files of a folder are similar; in hash order, any first or last files are a fair sample.
        """
        if self._files is not None:
            return self._files
        if self.root.is_file():
            self._files = [self.root]
            return self._files
        excluded = set(self.config.exclude)
        found = [
            file
            for file in self.root.glob(self.config.pattern)
            if file.is_file() and file.stat().st_size and not excluded & set(file.relative_to(self.root).parts[:-1])
        ]
        found.sort(key=lambda file: hashlib.blake2b(file.relative_to(self.root).as_posix().encode()).digest())
        chosen, total = [], 0
        for file in found:
            if self.config.max_bytes is not None and chosen and total + file.stat().st_size > self.config.max_bytes:
                break
            chosen.append(file)
            total += file.stat().st_size
        self._files = chosen
        return chosen

    def build(self) -> None:
        """Tokenize into the cache, unless it is there already. Safe for concurrent processes."""
        if not self.files() or self.entry.is_dir():
            return  # without files, `open` raises on every rank, not only on the one that builds
        self.cache.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".building-", dir=self.cache))
        try:
            train, val = self._split()
            counts = {"train": self._write(work / "train.bin", train), "val": self._write(work / "val.bin", val)}
            (work / "counts.json").write_text(json.dumps(counts))
            try:
                work.rename(self.entry)
            except OSError:
                if not self.entry.is_dir():
                    raise  # otherwise another process was faster, with the same content
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _split(self) -> tuple[list[str], list[str]]:
        """Return training and validation texts: full files, or parts of a single file."""
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in self.files()]
        if len(texts) == 1:
            text = texts[0][: self.config.max_bytes]
            cut = int(len(text) * (1 - self.config.val_fraction))
            return [text[:cut]], [text[cut:]]
        wanted = self.config.val_fraction * sum(map(len, texts))
        first, held = len(texts), 0
        while first > 1 and held < wanted:
            first -= 1
            held += len(texts[first])
        return texts[:first], texts[first:]

    def _write(self, path: Path, texts: Iterable[str]) -> dict[str, int]:
        count = size = 0
        with path.open("wb") as out:
            for text in texts:
                tokens = np.asarray(self.tokenizer.encode(text), dtype=self.dtype)
                tokens.tofile(out)
                count += tokens.size
                size += len(text.encode())
        return {"tokens": count, "bytes": size}

    def open(self) -> tuple[Tokens, Tokens]:
        """Return training and validation tokens.

        Raises:
            FileNotFoundError: no file matches, or `build` did not run on this node.
        """
        if not self.files():
            raise FileNotFoundError(
                f"no file below {self.root} matches data.corpus.pattern={self.config.pattern!r} (excluded folders: "
                f"{', '.join(self.config.exclude) or 'none'}). Change the pattern, or the path."
            )
        counts_file = self.entry / "counts.json"
        if not counts_file.is_file():
            raise FileNotFoundError(
                f"{self.entry} does not exist: the text was not tokenized on this node, or its files changed since. "
                "Run again, and give every node a writable cache_dir."
            )
        counts = json.loads(counts_file.read_text())
        return Tokens(self.entry / "train.bin", self.dtype, counts["train"]), Tokens(
            self.entry / "val.bin", self.dtype, counts["val"]
        )


class Tokens:
    """A memory-mapped file of tokens."""

    def __init__(self, path: Path, dtype: np.dtype, counts: dict[str, int]) -> None:
        """Map ``path`` with ``counts["tokens"]`` tokens from ``counts["bytes"]`` bytes of text."""
        self.num_bytes = counts["bytes"]
        # A file of length 0 cannot be mapped.
        empty: npt.NDArray[np.unsignedinteger] = np.zeros(0, dtype=dtype)
        self.values = np.memmap(path, dtype=dtype, mode="r") if counts["tokens"] else empty

    def __len__(self) -> int:
        return len(self.values)

    @property
    def unigram_entropy(self) -> float:
        """Loss of guessing by token frequency, nats per token: a model must do better to have learned anything."""
        counts = np.bincount(self.values)
        shares = counts[counts > 0] / len(self.values)
        return -math.fsum(shares * np.log(shares))
