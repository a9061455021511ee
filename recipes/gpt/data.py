"""`TextData`: an endless stream of crops of a `Corpus`, with a single number as its position.

::

    pass 0    ..|--3--|--0--|--4--|--1--|--2--|      crops of block_size tokens from a random offset, shuffled
    pass 1    .....|--1--|--4--|--0--|--2--|--3--|   another offset and order: a function of (seed, pass)

    stream    0 1 2 3 4 | 0 1 2 3 4 | ...            distributed to the ranks one by one

A batch over all ranks is the next ``batch_size * ranks`` crops of the stream, so that a run can be resumed after any
batch, on any number of ranks, and independently of epochs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from recipes.gpt.corpus import Corpus, CorpusConfig, Tokenizer, Tokens


class Crops(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of ``block_size`` tokens that start at multiples of ``stride``, with their targets."""

    def __init__(self, tokens: Tokens, block_size: int, stride: int) -> None:
        """``tokens`` must be longer than ``block_size``."""
        self.tokens = tokens
        self.block_size = block_size
        self.stride = stride

    def __len__(self) -> int:
        return (len(self.tokens) - self.block_size - 1) // self.stride + 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.stride
        piece = torch.from_numpy(self.tokens.values[start : start + self.block_size + 1].astype("int64"))
        return piece[:-1], piece[1:]


class CropSampler(DistributedSampler[int]):
    """The start positions of this rank's crops: one pass from position ``first`` of the stream.

    It is a `DistributedSampler` so that Lightning does not replace it. It ignores the epoch that Lightning sets, which
    also counts epochs shortened by ``max_steps``, after which the stream must continue.
    """

    def __init__(self, num_tokens: int, block_size: int, *, seed: int, num_replicas: int, rank: int) -> None:
        """Cut ``num_tokens`` into crops, each with the token after its last."""
        # As many as fit after the largest offset of a pass, block_size - 1.
        self.num_crops = max((num_tokens - block_size) // block_size, 0)
        self.block_size = block_size
        self.first = 0  # position in the stream of all ranks, in crops
        crops: Sequence[int] = range(self.num_crops)
        super().__init__(crops, num_replicas, rank, seed=seed, drop_last=True)  # type: ignore[arg-type]
        self.num_samples = self.num_crops // num_replicas
        self.total_size = self.num_samples * num_replicas

    def order(self, text_pass: int) -> Tensor:
        """Return the start positions of a pass's crops, in order, ``(num_crops,)``."""
        g = torch.Generator().manual_seed(self.seed * 1_000_003 + text_pass)
        offset = int(torch.randint(self.block_size, (1,), generator=g))
        return torch.randperm(self.num_crops, generator=g) * self.block_size + offset

    def __iter__(self) -> Iterator[int]:
        current, starts = -1, torch.empty(0)
        for position in range(self.first + self.rank, self.first + self.total_size, self.num_replicas):
            text_pass, index = divmod(position, self.num_crops)
            if text_pass != current:
                current, starts = text_pass, self.order(text_pass)
            yield int(starts[index])


class ResumableLoader(DataLoader[tuple[Tensor, Tensor]]):
    """A loader that tracks the batches it has returned, independent of its workers' prefetching.

    Its state is the same on every rank, so rank 0's state in a checkpoint serves all ranks.
    """

    def __init__(self, crops: Crops, sampler: CropSampler, *, batch_size: int, num_workers: int) -> None:
        """Load batches of ``batch_size`` crops per rank. The length is one pass in full batches."""
        super().__init__(
            crops,
            batch_size=batch_size,
            sampler=sampler,
            num_workers=num_workers,
            drop_last=True,
            pin_memory=torch.cuda.is_available(),
        )
        self.crop_sampler = sampler
        self._crops_per_batch = batch_size * sampler.num_replicas
        self._handed_out = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield one pass of batches, from the one after the last that was returned."""
        # A generator reads the position at the first batch, after any checkpoint was loaded.
        self.crop_sampler.first = self._handed_out
        for batch in super().__iter__():
            self._handed_out += self._crops_per_batch
            yield batch

    def _identity(self) -> dict[str, int]:
        s = self.crop_sampler
        return {"seed": s.seed, "num_crops": s.num_crops, "block_size": s.block_size}

    def state_dict(self) -> dict[str, int]:
        """Return the crops that all ranks have consumed, and the identity of the stream."""
        return {"crops": self._handed_out, **self._identity()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the last batch before ``state`` was taken.

        Raises:
            ValueError: ``state`` belongs to another stream.
        """
        differences = {k: (state[k], v) for k, v in self._identity().items() if state[k] != v}
        if differences:
            changes = ", ".join(f"{k} was {then} and is {now}" for k, (then, now) in differences.items())
            raise ValueError(
                f"the checkpoint's position is in another order of the training text: {changes}. Resume with the data "
                "options and the text of the first run, or start a new run from its weights."
            )
        self._handed_out = state["crops"]


PromptBatch: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Numbers of the prompts (B,), their tokens (B, T) padded with zeros on the left, and their lengths (B,)."""


def pad_prompts(prompts: Sequence[tuple[int, list[int]]]) -> PromptBatch:
    """Return a batch of numbered prompts."""
    longest = max(len(tokens) for _, tokens in prompts)
    padded = [[0] * (longest - len(tokens)) + tokens for _, tokens in prompts]
    numbers, lengths = [n for n, _ in prompts], [len(tokens) for _, tokens in prompts]
    return torch.tensor(numbers), torch.tensor(padded), torch.tensor(lengths)


class TextData(pl.LightningDataModule):
    """Text as batches of ``(tokens, targets)``, each (batch_size, block_size) integers."""

    def __init__(
        self,
        corpus: CorpusConfig = CorpusConfig(),  # noqa: B008 - frozen
        block_size: int = 256,
        batch_size: int = 16,
        val_crops: int | None = 256,
        num_workers: int = 0,
        seed: int = 1,
        prompts: list[str] | None = None,
    ) -> None:
        """Configure text and batches.

        Args:
            corpus: the text and its tokenizer.
            block_size: tokens per sequence.
            batch_size: sequences per rank and step.
            val_crops: number of validation sequences, spread evenly over the validation text. None: all.
            num_workers: loader processes per rank; 0 loads in the training process.
            seed: seed of the order of the training text.
            prompts: texts that ``predict`` continues.
        """
        super().__init__()
        if min(block_size, batch_size) < 1 or (val_crops is not None and val_crops < 1):
            raise ValueError(
                f"Got block_size={block_size}, batch_size={batch_size}, val_crops={val_crops}, but each must be at "
                "least 1."
            )
        self.corpus = Corpus(corpus)
        self.block_size = block_size
        self.batch_size = batch_size
        self.val_crops = val_crops
        self.num_workers = num_workers
        self.seed = seed
        self.prompts = list(prompts or [])
        self._tokens: tuple[Tokens, Tokens] | None = None
        self._loader: ResumableLoader | None = None
        self._loaded_state: dict[str, int] | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to tokens and back."""
        return self.corpus.tokenizer

    @property
    def val_tokens_per_byte(self) -> float:
        """Tokens per byte of the validation text."""
        _, val = self._opened()
        return len(val) / val.num_bytes

    def prepare_data(self) -> None:
        """Tokenize the text, on one process per node."""
        self.corpus.build()

    def setup(self, stage: str) -> None:
        """Map the tokens, and log their numbers.

        Raises:
            ValueError: the text is too short.
        """
        if self._tokens is not None or stage == "predict":
            return
        train, val = self.corpus.open()
        # A crop may start anywhere in the first block, and includes the token after its last.
        for name, tokens, needed in (
            ("training", train, 2 * self.block_size),
            ("validation", val, self.block_size + 1),
        ):
            if len(tokens) < needed:
                raise ValueError(
                    f"the {name} text has {len(tokens)} tokens, but block_size={self.block_size} needs at least "
                    f"{needed}. Give more text, change data.corpus.val_fraction, or lower data.block_size."
                )
        self._tokens = train, val
        rank_zero_info(
            f"text: {self.corpus.root}, {len(self.corpus.files())} files\n"
            f"  training   {train.num_bytes:>13,} bytes  {len(train):>13,} tokens\n"
            f"  validation {val.num_bytes:>13,} bytes  {len(val):>13,} tokens, "
            f"unigram entropy {val.unigram_entropy:.3f} nats per token"
        )

    def _opened(self) -> tuple[Tokens, Tokens]:
        if self._tokens is None:
            raise RuntimeError("the text is not open yet. Call prepare_data() and setup(), as the Trainer does.")
        return self._tokens

    def train_dataloader(self) -> ResumableLoader:
        """Return this rank's crops of the training text."""
        train, _ = self._opened()
        assert self.trainer is not None
        # The strategy defines the data-parallel replicas; a Trainer with one device has no sampler arguments.
        shard = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        sampler = CropSampler(len(train), self.block_size, seed=self.seed, **shard)
        if sampler.num_samples < self.batch_size:
            raise ValueError(
                f"the training text has {sampler.num_samples} sequences for each of {sampler.num_replicas} ranks, but "
                f"a batch needs {self.batch_size}. Give more text, or lower data.batch_size or data.block_size."
            )
        crops = Crops(train, self.block_size, stride=1)
        self._loader = ResumableLoader(crops, sampler, batch_size=self.batch_size, num_workers=self.num_workers)
        if self._loaded_state is not None:
            self._loader.load_state_dict(self._loaded_state)
            self._loaded_state = None
        return self._loader

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return crops of the validation text; Lightning distributes them over the ranks."""
        _, val = self._opened()
        stride = self.block_size
        if self.val_crops is not None:
            stride = max(stride, (len(val) - self.block_size - 1) // max(self.val_crops - 1, 1))
        return DataLoader(Crops(val, self.block_size, stride), batch_size=self.batch_size, num_workers=self.num_workers)

    def predict_dataloader(self) -> DataLoader[PromptBatch]:
        """Return this rank's prompts. All ranks get the same number; the first prompts may be repeated at the end.

        Raises:
            ValueError: there are no prompts, or one is empty or longer than a sequence.
        """
        prompts = list(enumerate(map(self.tokenizer.encode, self.prompts)))
        if not prompts:
            raise ValueError("Got no prompts, so there is nothing to continue. Give data.prompts, a list of texts.")
        wrong = next((n for n, tokens in prompts if not 1 <= len(tokens) <= self.block_size), None)
        if wrong is not None:
            raise ValueError(
                f"data.prompts: number {wrong + 1} has {len(prompts[wrong][1])} tokens, but must have between 1 and "
                f"block_size={self.block_size}. Shorten it."
            )
        assert self.trainer is not None
        shard = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        sampler = DistributedSampler(prompts, shuffle=False, **shard)  # type: ignore[arg-type]
        return DataLoader(
            prompts,  # type: ignore[arg-type]
            batch_size=self.batch_size,
            sampler=sampler,
            collate_fn=pad_prompts,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the tokenizer and the position in the training text."""
        position = {} if self._loader is None else self._loader.state_dict()
        return {"tokenizer": self.corpus.config.tokenizer, **position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the position of the loader, or of the loader to be created."""
        position = {key: value for key, value in state_dict.items() if key != "tokenizer"}
        if not position:
            return
        if self._loader is None:
            self._loaded_state = position
        else:
            self._loader.load_state_dict(position)
