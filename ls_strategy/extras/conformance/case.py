"""What a habit works with: Trainers with the strategy under test, a small network, data, and notes of what came out.

The one invariant: notes are the only result. The verdict is computed from them by the process that started the ranks.

One process that stands for all ranks gets, in each batch, the rows of all of them; so a mean over its batch is the mean
over the ranks of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ls_strategy.extras.conformance.lightning import pl
from ls_strategy.extras.conformance.specification import Specification

Over = Literal["each", "mean", "first"]
M = TypeVar("M", bound=pl.LightningModule)

WIDTH = 8


@dataclass
class Note:
    """A value that a rank has noted."""

    value: Any
    over: Over  # which values of the ranks are compared: that of each, their mean, or that of rank 0


@dataclass
class Notes:
    """All that a rank has noted in a phase."""

    notes: dict[str, Note] = field(default_factory=dict)
    claims: list[tuple[str, bool]] = field(default_factory=list)  # what has to hold, and whether it does


@dataclass
class Case:
    """One phase of a habit on one rank."""

    rank: int
    processes: int  # how many there are in this phase
    ranks: int  # how many ranks the batches are for: ``--devices``, also where one process stands for all
    folder: Path  # shared by all processes of all phases
    specification: Specification | None  # the strategy. None: a plain Trainer.
    accelerator: str
    before: Notes | None = None  # what this rank has noted in the phase before
    made: Notes = field(default_factory=Notes)

    # --- what is run ---

    def trainer(self, **options: Any) -> pl.Trainer:
        """Return a Trainer with the strategy, without what a habit does not ask for."""
        quiet: dict[str, Any] = {
            "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "num_sanity_val_steps": 0,
            "enable_model_summary": False, "use_distributed_sampler": False, "max_epochs": 1,
            "default_root_dir": self.folder,
        }  # fmt: skip
        strategy = "auto" if self.specification is None else self.specification.make(self.processes)
        given = {"accelerator": self.accelerator, "devices": self.processes, "strategy": strategy}
        return pl.Trainer(**{**quiet, **given, **options})

    def module(self, kind: type[M], *args: Any) -> M:
        """Return a module of a class, prepared as the strategy's documentation asks of its author."""
        return self.prepared(kind)(*args)

    def prepared(self, kind: type[M]) -> type[M]:
        """Return the class, with what the strategy asks for in ``configure_model``."""
        prepare = None if self.specification is None else self.specification.prepare
        if prepare is None:
            return kind

        class Prepared(kind):  # type: ignore[misc,valid-type]
            def configure_model(self) -> None:
                super().configure_model()
                prepare(self)

            def __reduce_ex__(self, protocol: Any) -> Any:  # pickles and copies are of the class that modules name
                return kind.__new__, (kind,), self.__getstate__()

        Prepared.__name__, Prepared.__qualname__ = kind.__name__, kind.__qualname__
        return cast("type[M]", Prepared)

    def rows(self, batches: int = 6, seed: int = 0) -> TensorDataset:
        """Return ``batches`` global batches of rows ``(index, x, y)``."""
        numel = batches * self.ranks * ROWS
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(numel, WIDTH, generator=generator)
        y = torch.tanh(x @ torch.randn(WIDTH, WIDTH, generator=generator)).roll(1, dims=1)
        return TensorDataset(torch.arange(numel), x, y)

    def loader(self, batches: int = 6, seed: int = 0) -> DataLoader[Any]:
        """Return a plain loader of this process's share of every global batch: of rank 0, every ``ranks``-th row."""
        rows = self.rows(batches, seed)
        return DataLoader(rows, batch_size=self.batch_size, sampler=self.sampler(rows))

    def sampler(self, rows: TensorDataset) -> DistributedSampler[Any]:
        """Return the sampler of `loader`."""
        return DistributedSampler(rows, self.processes, self.rank, shuffle=False)

    @property
    def batch_size(self) -> int:
        """Of this process."""
        return ROWS * self.ranks // self.processes

    def fit(self, model: pl.LightningModule, loader: Any = None, ckpt_path: Any = None, **options: Any) -> pl.Trainer:
        """Fit on ``loader``, validate on another one if the options ask for it, and return the Trainer."""
        trainer = self.trainer(**options)
        loader = self.loader() if loader is None else loader
        validated = self.loader(2, seed=1) if "limit_val_batches" in options else None
        trainer.fit(model, loader, validated, ckpt_path=ckpt_path)
        return trainer

    # --- what came out ---

    def note(self, name: str, value: Any, over: Over = "each") -> None:
        """Keep a number, text or tensor under a name. A sharded tensor (``full_tensor``) is gathered by all ranks."""
        if isinstance(value, Tensor):
            value = value.detach()
            value = getattr(value, "full_tensor", lambda: value)()
            value = value.to("cpu", copy=True)
        self.made.notes[name] = Note(value, over)

    def claim(self, what: str, holds: bool) -> None:
        """Keep whether something holds; if not, the verdict is "silently other"."""
        self.made.claims.append((what, bool(holds)))

    def train(self, kind: type[Net], *args: Any, **options: Any) -> Any:
        """Fit a new network of a class, note its losses, and return the Trainer; see `fit` for the arguments."""
        model = self.module(kind)
        trainer = self.fit(model, *args, **options)
        self.note_losses(model)
        return trainer

    def note_losses(self, model: Net, prefix: str = "") -> None:
        """Note the losses that a network has kept, each the mean over the ranks, and forget them."""
        for name, loss in model.losses.items():
            self.note(f"{prefix}loss of {name}", loss, "mean")
        model.losses.clear()

    def note_outputs(self, model: Any) -> None:
        """Note what a trained module gives for `probe`, called without a Trainer."""
        model.eval()
        with torch.no_grad():
            self.note("outputs", model(self.probe().to(next(iter(model.parameters())).device)))

    def probe(self) -> Tensor:
        """Return rows to try a trained module on, the same on every rank."""
        return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(99))

    # --- saves ---

    @property
    def saves(self) -> Path:
        """Where a habit saves; made by whoever asks first."""
        path = self.folder / "saves"
        path.mkdir(exist_ok=True)
        return path

    def arm(self) -> None:
        """Let the next change under `saves` kill the rank that the phase names."""
        (self.folder / "armed").touch()


ROWS = 4  # of each rank, in each batch


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` and what the block adds to it."""
        return x + self.outer(torch.tanh(self.inner(x)))


class Net(pl.LightningModule):
    """Two blocks and a linear layer, trained by SGD on the mean squared error. It keeps the loss of every batch."""

    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
    optimizer_options: dict[str, Any] = {"lr": 0.2}  # noqa: RUF012  (never changed)

    def __init__(self) -> None:
        super().__init__()
        self.losses: dict[str, float] = {}
        torch.manual_seed(1)
        self.build()

    def build(self) -> None:
        """Make the layers, from the same seed on every rank."""
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return one row of outputs for each row."""
        return self.head(self.blocks(x))

    def loss(self, batch: Any) -> Tensor:
        """Return the mean over the rows of a batch."""
        _, x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        """Return the loss, and keep it."""
        loss = self.loss(batch)
        self.keep(loss, batch_idx)
        return loss

    def keep(self, loss: Tensor, batch_idx: int, name: str = "batch") -> None:
        """Keep a loss under the epoch and batch."""
        self.losses[f"epoch {self.current_epoch} {name} {batch_idx}"] = loss.item()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the mean over the ranks."""
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log the mean over the ranks."""
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the outputs of a batch."""
        return self(batch[1])

    def configure_optimizers(self) -> Any:
        """Return the optimizer of the class."""
        return self.optimizer(self.parameters(), **self.optimizer_options)


class AdamNet(Net):
    """The same with AdamW, whose epsilon is large enough that a wrong scale of gradients shows."""

    optimizer = torch.optim.AdamW
    optimizer_options: dict[str, Any] = {"lr": 0.02, "eps": 1e-2}  # noqa: RUF012
