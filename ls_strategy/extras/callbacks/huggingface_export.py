"""`HuggingFaceExport`: folders that ``from_pretrained`` opens, written while training."""

from __future__ import annotations

import os
import time
from collections.abc import Container
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from ls_strategy.checked import above, at_least, checked
from ls_strategy.checkpoint.output import check_target
from ls_strategy.checkpoint.save import SaveTarget
from ls_strategy.errors import ConfigError
from ls_strategy.extras.callbacks.during_fit import zero_strategy
from ls_strategy.extras.huggingface.contents import DTYPES, FolderContents, Kind, contents_of, find_model
from ls_strategy.extras.huggingface.hub import HubUploads
from ls_strategy.extras.huggingface.target import FolderTarget
from ls_strategy.host.pytorch import Callback, pl
from ls_strategy.lightning.strategy import ZeROStrategy

_STEP = "{step}"

_PAUSE_S = 0.1  # seconds between two questions whether an upload has ended


class HuggingFaceExport(Callback):
    """Write a folder that ``from_pretrained`` of transformers opens, or of peft where adapters train.

    Names, conversions and small files are those of ``save_pretrained``, at every stage and with every kind of
    parallelism. Every rank writes its part of the weights, as for a checkpoint folder, and rank 0 makes the folder of
    them, portion by portion: no rank holds the full model. The folder appears complete, and an older one of the same
    name stays until then. With ``checkpoint.background`` training continues meanwhile. Until the folder is complete,
    the disk holds the master weights too.
    """

    @checked(every=at_least(1), max_shard_gb=above(0, 1e6))
    def __init__(
        self,
        path: str | os.PathLike[str],
        every: int | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        tokenizer: Any = None,
        module: str | None = None,
        max_shard_gb: float = 5.0,
        push_to_hub: str | None = None,
    ) -> None:
        """Set the options.

        Args:
            path: the folder, on a disk that all nodes share. ``{step}`` in it stands for the optimizer steps so far, so
                that every export has its own; without, the next one replaces it.
            every: optimizer steps from one export to the next. The fit ends with one, too. None: only then.
            dtype: dtype of floating-point weights, but for those that the model's authors keep in fp32. None: that of
                the master weights.
            tokenizer: a tokenizer or processor, whose files are added.
            module: attribute of the LightningModule that holds the model. None: the only model in it.
            max_shard_gb: largest file of a model's weights, in 10^9 bytes. Adapters are one file.
            push_to_hub: ``owner/name`` of a repository on the Hugging Face Hub, to which every export is uploaded in
                the background. If it does not exist, it is created, as a private one.

        Raises:
            ConfigError: a value is wrong.
        """
        self.path, self.every, self.dtype, self.tokenizer = os.fspath(path), every, dtype, tokenizer
        self.module, self.max_shard_gb, self.push_to_hub = module, max_shard_gb, push_to_hub
        if ":/" in self.path or Path(self.path).name in ("", ".."):
            raise ConfigError(
                f"Got path={self.path!r}, but an export is a folder on a local or shared disk. Give such a path, and "
                "push_to_hub or a copy for other places."
            )
        self._last_step = 0
        self._uploads: HubUploads | None = None

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check what can be checked before the first step. Collective."""
        strategy = zero_strategy(trainer, self)
        find_model(pl_module, self.module)
        strategy.on_all_ranks(self._prepare if trainer.is_global_zero else lambda: None)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count from here, also in a fit that continues another."""
        self._last_step = trainer.global_step

    def _prepare(self) -> None:
        target = Path(self.path).absolute()
        if _STEP not in self.path:
            target.parent.mkdir(parents=True, exist_ok=True)
            check_target(target, force=True)
        if self.push_to_hub is not None:
            self._uploads = HubUploads(self.push_to_hub)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Export after every ``every`` optimizer steps. Collective then."""
        if self.every is not None and trainer.global_step // self.every > self._last_step // self.every:
            self._export(trainer, pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Export what the fit has ended with, and wait until it is complete. Collective."""
        if trainer.global_step != self._last_step:
            self._export(trainer, pl_module)
        saves = zero_strategy(trainer, self).saves
        with saves.tolerating():
            saves.wait()
        if self.push_to_hub is not None:
            self._wait_for_upload(zero_strategy(trainer, self))

    def _wait_for_upload(self, strategy: ZeROStrategy) -> None:
        """Return when the upload has ended. Collective, in calls that are short however long it takes."""
        world = strategy.require_engine().mesh.world
        while world.agree(torch.tensor([self._is_uploading()], dtype=torch.uint8)).item():
            time.sleep(_PAUSE_S)
        if self._uploads is not None:
            self._uploads.wait()

    def _is_uploading(self) -> bool:
        return self._uploads is not None and self._uploads.in_flight

    def _export(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last_step = trainer.global_step
        path = str(Path(self.path.replace(_STEP, str(trainer.global_step))).absolute())
        strategy = zero_strategy(trainer, self)
        strategy.saves.save_weights(path, partial(self._plan, strategy, pl_module, path))

    def _plan(
        self, strategy: ZeROStrategy, pl_module: pl.LightningModule, path: str, weights: dict[str, Any]
    ) -> tuple[SaveTarget, Container[str]]:
        """Return where the weights go, and which of them are needed. Collective."""
        mesh = strategy.require_engine().mesh
        own: dict[str, Kind] = {n: (tuple(t.shape), t.dtype) for n, t in weights.items() if isinstance(t, Tensor)}
        kinds = {name: kind for part in mesh.pipeline.exchange_objects(own) for name, kind in part.items()}
        name, model = find_model(pl_module, self.module)
        is_writer = mesh.world.rank == 0
        made = strategy.on_all_ranks(
            partial(self._contents, name, model, kinds) if is_writer else lambda: None  # type: ignore[arg-type]
        )
        needed = mesh.world.exchange_objects(None if made is None else made.needed)[0]
        return FolderTarget(made, self._before_replacing, partial(self._written, path, self._last_step)), needed

    def _contents(self, name: str, model: nn.Module, kinds: dict[str, Kind]) -> FolderContents:
        dtype: torch.dtype | None = None if self.dtype is None else DTYPES[self.dtype]
        return contents_of(
            model,
            f"{name}." if name else "",
            kinds,
            dtype=dtype,
            max_shard_bytes=max(int(self.max_shard_gb * 1e9), 1),
            tokenizer=self.tokenizer,
        )

    def _before_replacing(self) -> None:
        if self._uploads is not None:
            self._uploads.wait()  # it reads the folder that is about to be replaced

    def _written(self, path: str, step: int) -> None:
        if self._uploads is not None:
            self._uploads.start(path, f"Step {step}")
