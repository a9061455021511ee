"""`FinetuneModule`: a plain LightningModule around a causal model of transformers, with its loss and optimizer.

::

    configure_model    from_pretrained(model)     at stage 3 on the meta device: every rank reads its shards
                       get_peft_model(...)        with an adapter: all else is frozen
                       from_pretrained(teacher)   with a teacher: frozen, and without gradients
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.nn import functional

from recipes.finetune.packing import IGNORED
from recipes.gpt.model import OptimConfig, adamw_with_cosine

Dtype = Literal["float32", "bfloat16", "auto"]


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """LoRA by PEFT: Hu et al., arXiv:2106.09685. All other weights are frozen."""

    rank: int = 16
    """Rank of the two matrices that are added to each layer."""

    alpha: float = 32.0
    """The sum of both is multiplied by ``alpha / rank``."""

    dropout: float = 0.0
    """Dropout before the first matrix."""

    targets: str | list[str] = "all-linear"
    """Names of layers, or ``all-linear``: all but the output layer."""

    dora: bool = False
    """Train the lengths of the columns too: Liu et al., arXiv:2402.09353."""

    modules_to_save: list[str] = field(default_factory=list)
    """Names of layers that are trained in full, and saved with the adapter."""


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """Distillation: Hinton et al., arXiv:1503.02531."""

    model: str
    """Folder or name of the teacher, with the student's vocabulary."""

    weight: float = 0.5
    """Fraction of the loss that compares with the teacher's probabilities; the rest compares with the responses."""

    temperature: float = 1.0
    """Divides both models' logits in the comparison."""

    def __post_init__(self) -> None:
        if not 0.0 < self.weight <= 1.0 or self.temperature <= 0.0:
            raise ValueError(
                f"Got weight={self.weight}, temperature={self.temperature}, but the weight must be in (0, 1] and the "
                "temperature positive."
            )


class FinetuneModule(pl.LightningModule):
    """Trains a causal model on the responses of packed rows."""

    def __init__(
        self,
        model: str,
        adapter: AdapterConfig | None = None,
        teacher: TeacherConfig | None = None,
        optim: OptimConfig = OptimConfig(lr=2e-4, weight_decay=0.0),  # noqa: B008 - frozen
        dtype: Dtype = "float32",
    ) -> None:
        """Store the configuration; `configure_model` loads the weights.

        Args:
            model: folder or name of a causal model of transformers.
            adapter: train an adapter instead of the weights.
            teacher: learn from a larger model's probabilities.
            optim: optimizer and schedule.
            dtype: dtype of the stored weights, before the Trainer's precision applies. ``auto``: that of the files.
        """
        super().__init__()
        # Checkpoints store plain values: torch.load(weights_only=True) rejects other classes.
        self.adapter = AdapterConfig(**adapter) if isinstance(adapter, dict) else adapter
        self.teaching = TeacherConfig(**teacher) if isinstance(teacher, dict) else teacher
        self.optim = OptimConfig(**optim) if isinstance(optim, dict) else optim
        self.folder, self.dtype_of_weights = model, dtype
        self.model: Any = None
        self.teacher: Any = None
        self._validated: list[Tensor] = []
        parts = {"adapter": self.adapter, "teacher": self.teaching, "optim": self.optim}
        plain = {name: None if part is None else asdict(part) for name, part in parts.items()}
        self.save_hyperparameters({"model": model, "dtype": dtype, **plain})

    def configure_model(self) -> None:
        """Load the model, and the teacher, once."""
        if self.model is not None:
            return
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=self.dtype_of_weights)
        self.model.train()
        if self.adapter is not None:
            self.model = with_adapter(self.model, self.adapter)
        if self.teaching is not None:
            self.teacher = AutoModelForCausalLM.from_pretrained(self.teaching.model, dtype=self.dtype_of_weights)
            self.teacher.eval().requires_grad_(False)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Return logits (B, T, V) of the token after each of ``input_ids`` (B, T)."""
        return _logits(self.model, batch)

    def _losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the summed loss, the summed cross-entropy, and the number of tokens that were predicted."""
        wanted_BT = batch["labels"][:, 1:] != IGNORED
        targets_N = batch["labels"][:, 1:][wanted_BT]
        # In fp32: a softmax over the vocabulary sums too many terms for 16 bit.
        logits_NV = self(batch)[:, :-1][wanted_BT].float()
        entropy = functional.cross_entropy(logits_NV, targets_N, reduction="sum")
        if self.teaching is None:
            return entropy, entropy, wanted_BT.sum()
        with torch.no_grad():
            taught_NV = _logits(self.teacher, batch)[:, :-1][wanted_BT].float()
        heat, weight = self.teaching.temperature, self.teaching.weight
        compared = functional.kl_div(
            functional.log_softmax(logits_NV / heat, -1),
            functional.log_softmax(taught_NV / heat, -1),
            reduction="sum",
            log_target=True,
        )
        # Gradients of the comparison shrink with the square of the temperature (section 2 of the paper).
        return (1 - weight) * entropy + weight * heat**2 * compared, entropy, wanted_BT.sum()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the loss per predicted token of all ranks.

        Ranks have different numbers of responses. Divided by their mean number, the average of the ranks' losses is
        that of one process with all rows. Micro-batches of an accumulation count equally.
        """
        loss, entropy, count = self._losses(batch)
        mean_count = cast("Tensor", self.all_gather(count.float())).mean().clamp(min=1)
        self.log("train/loss", entropy / count.clamp(min=1), prog_bar=True)  # of this rank
        return loss / mean_count

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Add up the cross-entropy of the responses."""
        _, entropy, count = self._losses(batch)
        self._validated.append(torch.stack([entropy.double(), count.double()]))

    def on_validation_epoch_end(self) -> None:
        """Log the cross-entropy in nats per predicted token of all ranks. Collective."""
        found = torch.stack(self._validated).sum(0)
        self._validated = []
        total, count = cast("Tensor", self.all_gather(found)).view(-1, 2).sum(0)
        self.log("val/loss", (total / count.clamp(min=1)).float(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Return AdamW for what is trained, and one schedule per optimizer step."""
        return adamw_with_cosine(self, self.optim)


def with_adapter(model: Any, config: AdapterConfig) -> Any:
    """Return PEFT's model around ``model``, whose weights are frozen."""
    from peft import LoraConfig, get_peft_model

    targets = config.targets if isinstance(config.targets, str) else list(config.targets)
    return get_peft_model(
        model,
        LoraConfig(
            task_type="CAUSAL_LM",
            r=config.rank,
            lora_alpha=config.alpha,  # type: ignore[arg-type]  # any number works
            lora_dropout=config.dropout,
            target_modules=targets,
            use_dora=config.dora,
            modules_to_save=list(config.modules_to_save) or None,
        ),
    )


def _logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return logits (B, T, V). Without a mask and a cache, transformers separates documents by their positions."""
    return model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
