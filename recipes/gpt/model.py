"""`GPTModule`: loss, optimizer and samples. A plain LightningModule, without collectives or ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.nn import ModuleList, functional
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ls_strategy.errors import PlanError
from ls_strategy.extras.inference.cache import KVCache
from ls_strategy.extras.inference.generate import generate, refuse_absent
from ls_strategy.extras.inference.sampling import SamplingConfig, row_seed
from ls_strategy.optimizers.muon import Muon
from recipes.gpt.network import GPT, GPTConfig

if TYPE_CHECKING:
    from recipes.gpt.data import PromptBatch, TextData


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW, or Muon for the matrices of the blocks, with linear warmup and cosine decay."""

    name: Literal["adamw", "muon"] = "adamw"
    """``muon`` updates the blocks' matrices by ``ls_strategy.Muon``, and all other parameters by AdamW."""

    lr: float = 1e-3
    """Peak learning rate."""

    muon_lr: float | None = None
    """Peak learning rate of the matrices that Muon updates. None: ``lr``."""

    final_lr_ratio: float = 0.1
    """Final learning rate, as a fraction of ``lr``."""

    warmup_steps: int = 50
    """Optimizer steps from 0 to ``lr``."""

    total_steps: int | None = None
    """Optimizer steps until the end of the decay. None: all steps of the Trainer."""

    weight_decay: float = 0.1
    """For matrices and tables; vectors (norms) do not decay."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's moments."""

    eps: float = 1e-8
    """Added to the square root in AdamW's denominator."""


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The text that is generated after every validation, and by ``predict``."""

    prompt: str = "def "
    """Start of the text; ``predict`` uses data.prompts instead."""

    max_new_tokens: int = 200
    """Length of the continuation, tokens. 0 generates nothing after validations."""

    temperature: float = 0.8
    """Divides the logits: below 1 prefers likely tokens, 0 takes the most likely one."""

    top_k: int | None = 50
    """Sample from this many most likely tokens. None: from all."""

    top_p: float | None = None
    """Sample from the most likely tokens that together have this probability. None: from all."""

    stop: list[str] = field(default_factory=list)
    """A text ends before the first of these."""

    seed: int = 1
    """Seed of the sampling, the same at every validation, so that samples differ only by the weights."""

    @property
    def sampling(self) -> SamplingConfig:
        """How tokens are chosen.

        Raises:
            ConfigError: a number is out of range.
        """
        return SamplingConfig(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)

    def __post_init__(self) -> None:
        self.sampling  # noqa: B018 - checks

    def until_stop(self, text: str) -> str:
        """Return ``text`` up to the first of ``stop``.

        >>> SampleConfig(stop=["ee", "!"]).until_stop("see!")
        's'
        """
        return text[: min((found for s in self.stop if (found := text.find(s)) >= 0), default=len(text))]


def warmup_cosine(step: int, *, warmup_steps: int, total_steps: int, final_ratio: float) -> float:
    """Return the learning rate at ``step`` as a fraction of the peak: linear warmup, half a cosine, then constant.

    >>> [round(warmup_cosine(s, warmup_steps=2, total_steps=6, final_ratio=0.1), 3) for s in range(8)]
    [0.5, 1.0, 1.0, 0.868, 0.55, 0.232, 0.1, 0.1]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    return final_ratio + (1 - final_ratio) * 0.5 * (1 + math.cos(math.pi * done))


def adamw_with_cosine(module: pl.LightningModule, config: OptimConfig) -> OptimizerLRSchedulerConfig:
    """Return AdamW for what a module trains, in groups with and without weight decay, and one schedule per step.

    Raises:
        ValueError: the Trainer has no end, so the decay has none.
    """
    params = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizer: Optimizer = AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    if config.name == "muon":
        optimizer = _muon(module, groups, config)
    steps = module.trainer.estimated_stepping_batches if config.total_steps is None else config.total_steps
    if not math.isfinite(steps) or steps < 1:
        raise ValueError(
            f"the Trainer will make {steps} steps, but the cosine decay needs a known end. Set trainer.max_steps, "
            "trainer.max_epochs or model.optim.total_steps."
        )

    def factor(step: int) -> float:
        return warmup_cosine(
            step, warmup_steps=config.warmup_steps, total_steps=int(steps), final_ratio=config.final_lr_ratio
        )

    scheduler = LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "name": "train/lr"}}


def _muon(module: pl.LightningModule, groups: list[dict[str, Any]], config: OptimConfig) -> Optimizer:
    """Return Muon for the matrices of the blocks, and AdamW for tables and vectors."""
    blocks = (child for child in module.modules() if isinstance(child, ModuleList))
    hidden = {id(p) for block in blocks for p in block.parameters() if p.dim() >= 2}
    chosen = [p for group in groups for p in group["params"] if id(p) in hidden]
    others = [
        {**group, "params": [p for p in group["params"] if id(p) not in hidden], "use_muon": False} for group in groups
    ]
    rate = config.lr if config.muon_lr is None else config.muon_lr
    matrices = {"params": chosen, "weight_decay": config.weight_decay, "lr": rate}
    groups = [matrices, *(g for g in others if g["params"])]
    return Muon(groups, lr=config.lr, betas=config.betas, eps=config.eps)


class GPTModule(pl.LightningModule):
    """Trains a `GPT` to predict the next token."""

    def __init__(
        self,
        config: GPTConfig = GPTConfig(),  # noqa: B008 - frozen
        optim: OptimConfig = OptimConfig(),
        sample: SampleConfig = SampleConfig(),
    ) -> None:
        """Store the configuration; `configure_model` builds the network.

        Args:
            config: shape of the network.
            optim: optimizer and schedule.
            sample: the text that is generated after every validation.
        """
        super().__init__()
        # Checkpoints store plain values: torch.load(weights_only=True) rejects other classes.
        self.config = config if isinstance(config, GPTConfig) else GPTConfig(**config)
        self.optim = optim if isinstance(optim, OptimConfig) else OptimConfig(**optim)
        self.sample = sample if isinstance(sample, SampleConfig) else SampleConfig(**sample)
        self.model: GPT | None = None
        self._cache: KVCache | None = None
        self._written: list[tuple[Tensor, Tensor]] = []
        parts = {"config": self.config, "optim": self.optim, "sample": self.sample}
        self.save_hyperparameters({name: asdict(part) for name, part in parts.items()})

    def configure_model(self) -> None:
        """Build the network, once. At stage 3 it gets memory later, one parameter after another."""
        if self.model is None:
            self.model = GPT(self.config)

    @property
    def network(self) -> GPT:
        """The network.

        Raises:
            RuntimeError: it is not built yet.
        """
        if self.model is None:
            raise RuntimeError("the network is not built yet. Call configure_model(), as the Trainer does.")
        return self.model

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return logits (B, T, V) of the token after each of ``tokens`` (B, T)."""
        return self.network(tokens_BT)

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens_BT, targets_BT = batch
        # In fp32: a softmax over the vocabulary sums too many terms for 16 bit.
        return functional.cross_entropy(self(tokens_BT).float().flatten(0, 1), targets_BT.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross-entropy in nats per token."""
        loss = self._loss(batch)
        self.log("train/loss", loss, prog_bar=True)  # of this rank; averaging would need a collective in every step
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the loss in nats per token, and in bits per byte, which is comparable between tokenizers."""
        loss = self._loss(batch)
        size = batch[0].shape[0]
        self.log("val/loss", loss, prog_bar=True, sync_dist=True, batch_size=size)
        data = self._data()
        if data is not None:
            bits = loss / math.log(2) * data.val_tokens_per_byte
            self.log("val/bits_per_byte", bits, sync_dist=True, batch_size=size)

    def _data(self) -> TextData | None:
        """Return the Trainer's data module if it has a tokenizer."""
        data = getattr(self.trainer, "datamodule", None)
        return cast("TextData", data) if hasattr(data, "tokenizer") else None

    # text ------------------------------------------------------------------------------------------------------------

    def on_validation_epoch_end(self) -> None:
        """Write a sample to the terminal and to TensorBoard.

        Every rank generates the same text with the same seed, because at stage 3 all ranks must take part in every
        forward. Only rank 0's text is shown.
        """
        data, sample = self._data(), self.sample
        if self.trainer.sanity_checking or data is None or not sample.max_new_tokens:
            return
        try:
            refuse_absent(self.network)
        except PlanError as reason:  # on every rank, since each lacks some blocks
            rank_zero_warn(f"no sample is written (set model.sample.max_new_tokens: 0 to disable samples): {reason}")
            return
        prompt = data.tokenizer.encode(sample.prompt)
        (new,) = self.continuations([prompt], [sample.seed])
        text = sample.prompt + sample.until_stop(data.tokenizer.decode(new))
        rule = "-" * 20
        self.print(f"\n{rule} step {self.global_step} {rule}\n{text}\n{'-' * 50}")
        for logger in self.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("sample", f"```\n{text}\n```", self.global_step)

    def on_predict_start(self) -> None:
        """Check the network and the data module before anything is computed.

        Raises:
            PlanError: no rank has the full network.
            RuntimeError: the Trainer has no data module of this recipe.
        """
        refuse_absent(self.network)
        if self._data() is None:
            raise RuntimeError(
                "predict needs prompts. Call trainer.predict(module, datamodule=TextData(prompts=[...]))."
            )
        self._cache, self._written = self.network.make_cache(), []

    def predict_step(self, batch: PromptBatch, batch_idx: int) -> list[str]:
        """Return the continuations of this rank's prompts. Collective where forwards are, equally often on all ranks.

        A prompt's text depends on ``sample.seed`` and the prompt's number, not on the ranks or the batch.
        """
        numbers_B, padded_BT, lengths_B = batch
        data = self._data()
        assert data is not None
        rows = zip(padded_BT.tolist(), lengths_B.tolist(), strict=True)
        prompts = [row[len(row) - length :] for row, length in rows]
        found = self.continuations(prompts, [row_seed(self.sample.seed, n) for n in numbers_B.tolist()])
        self._written.append((numbers_B, torch.tensor(found, dtype=torch.long, device=self.device)))
        return [self.sample.until_stop(data.tokenizer.decode(tokens)) for tokens in found]

    def on_predict_epoch_end(self) -> None:
        """Write the continuations of all ranks. Collective."""
        data = self._data()
        if not self._written:  # limit_predict_batches=0
            return
        numbers, tokens = (torch.cat(parts) for parts in zip(*self._written, strict=True))
        self._cache, self._written = None, []
        # Several ranks may return a prompt: those of one replica, and those with padded last batches.
        gathered = [cast("Tensor", self.all_gather(t)) for t in (numbers, tokens)]
        found = dict(zip(gathered[0].flatten().tolist(), gathered[1].flatten(0, -2).tolist(), strict=True))
        assert data is not None
        for number, new in sorted(found.items()):
            text = data.prompts[number] + self.sample.until_stop(data.tokenizer.decode(new))
            self.print(f"{'-' * 20} prompt {number + 1} of {len(data.prompts)} {'-' * 20}\n{text}")

    def continuations(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[list[int]]:
        """Generate ``sample.max_new_tokens`` tokens for each prompt, by its own seed. Collective where forwards are."""
        return generate(
            self.network,
            prompts,
            self.sample.max_new_tokens,
            sampling=self.sample.sampling,
            seed=seeds,
            cache=self._cache,
            device=self.device,
            full_sequences=self._ranks_of_sequences(),
        )

    def _ranks_of_sequences(self) -> int:
        """Return the ranks of tensor-parallel sequence sharding, which cannot read a single token; 0 without it."""
        parallel = getattr(getattr(self._trainer, "strategy", None), "parallel", None)
        config: Any = getattr(parallel, "config", None)
        return config.tp.size if config is not None and config.tp.sequence_parallel else 0

    def generate(
        self,
        tokens_BT: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """See `GPT.generate`. Collective at stage 3, with the same number of tokens on every rank."""
        return self.network.generate(
            tokens_BT, max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator
        )

    def flops_per_token(self) -> int:
        """See `GPT.flops_per_token`; a monitor computes the utilization from it."""
        return self.network.flops_per_token()

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Return the optimizer with its parameter groups, and one schedule per optimizer step for all."""
        return adamw_with_cosine(self, self.optim)
