"""One Trainer of `benchmarks.gpu`, in the process that is given to it."""

from __future__ import annotations

import ctypes
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (  # torch's own way for its peers
    apply_activation_checkpointing,
)
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.bars import peak_flops
from ls_strategy import device as dev
from ls_strategy.autoload import ALIASES
from ls_strategy.lightning.strategy import ZeROStrategy
from recipes.gpt.model import GPTModule, OptimConfig, SampleConfig
from recipes.gpt.network import Block, GPTConfig
from tests.trainers import quiet

if TYPE_CHECKING:
    from benchmarks.gpu_trainers import Case

UNCOUNTED = 4  # steps that allocate, build kernels and measure where to step


class OffloadingParallel(ModelParallelStrategy):
    """Lightning moves the model to the device, but with ``CPUOffloadPolicy`` it must stay on the host."""

    def model_to_device(self) -> None:
        """Do nothing."""


class PeerGPT(GPTModule):
    """The recipe's module as the user of another strategy has to change it."""

    def __init__(self, case: Case, *parts: Any) -> None:
        """``parts``: the configuration of the recipe's module."""
        super().__init__(*parts)
        self.case = case

    def configure_model(self) -> None:
        """Build, wrap blocks that are recomputed, and shard if the user has to."""
        if self.model is not None:
            return
        super().configure_model()
        if self.case.shape.recompute:
            apply_activation_checkpointing(self.network, check_fn=lambda module: isinstance(module, Block))
        if self.case.contender.startswith("fsdp2"):
            self._shard(self.network)

    def _shard(self, network: nn.Module) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        options: dict[str, Any] = {"mesh": self.device_mesh["data_parallel"]}  # type: ignore[index]
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if self.case.contender.endswith("_offload"):
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.case.device == "cuda")
        for block in network.blocks:  # type: ignore[union-attr]
            fully_shard(block, **options)
        fully_shard(network, **options)

    def configure_optimizers(self) -> Any:
        """DeepSpeed updates states on the host with an optimizer of its own."""
        found = super().configure_optimizers()
        if self.case.contender == "deepspeed2_offload":
            from deepspeed.ops.adam import DeepSpeedCPUAdam  # pyright: ignore[reportMissingImports]

            found["optimizer"] = DeepSpeedCPUAdam(found["optimizer"].param_groups)
            return found["optimizer"]
        return found


def strategy_of(case: Case) -> tuple[Any, str]:
    """Return what the Trainer gets as strategy, and its precision: all compute in bf16 and keep masters in fp32."""
    name = case.contender
    if name.startswith("fsdp2"):
        kind = OffloadingParallel if name.endswith("_offload") else ModelParallelStrategy
        backend = "gloo" if case.device == "cpu" else "cpu:gloo,cuda:nccl"
        return kind(data_parallel_size=1, tensor_parallel_size=1, process_group_backend=backend), "32-true"
    if name.startswith("deepspeed2"):
        from lightning.pytorch.strategies import DeepSpeedStrategy

        return DeepSpeedStrategy(stage=2, offload_optimizer=name.endswith("_offload")), "bf16-true"
    options: dict[str, Any] = dict(ALIASES.get(name, {"stage": 2}))
    if "nvme" in name:
        options["offload"] = {
            "optimizer": "nvme",
            "parameters": "nvme",
            "gradients": "nvme",
            "nvme_path": case.nvme_path,
        }
    if case.shape.recompute:
        options["activations"] = "full"
    if case.shape.split_masters:
        options["precision"] = {"master_weights": "split"}
    return ZeROStrategy(**options), "bf16-true"


def config_of(case: Case) -> GPTConfig:
    """The network of a case. On a CPU, which only sees that it runs, the vocabulary is small."""
    shape = case.shape
    return GPTConfig(
        vocab_size=shape.vocabulary if case.device == "cuda" else 256, block_size=shape.block,
        num_layers=shape.layers, num_heads=shape.heads, num_kv_heads=shape.kv_heads, width=shape.width,
        mlp=shape.mlp, positions=shape.positions, tied_embeddings=shape.tied,  # type: ignore[arg-type]
    )  # fmt: skip


def module_of(case: Case) -> GPTModule:
    """The recipe's module, or a peer's."""
    parts = (config_of(case), OptimConfig(lr=1e-4, warmup_steps=2), SampleConfig(max_new_tokens=0))
    if case.contender.startswith("zero"):
        return GPTModule(*parts)
    return PeerGPT(case, *parts)


class Timer(pl.Callback):
    """Seconds of the counted steps. The device has done its work when the clock starts and when it ends."""

    def __init__(self, steps: int, uncounted: int) -> None:
        """Of ``steps`` optimizer steps, leave out the first ``uncounted``."""
        self.steps, self.uncounted = steps, uncounted
        self.loss = 0.0
        self.seconds = 0.0
        self._began: float | None = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Take the time after the first and after the last counted step."""
        step = trainer.global_step
        if step == self.uncounted and self._began is None:
            dev.synchronize(trainer.strategy.root_device)
            self._began = time.perf_counter()
        elif step == self.steps and self._began is not None and not self.seconds:
            dev.synchronize(trainer.strategy.root_device)
            self.seconds = time.perf_counter() - self._began
            self.loss = float(outputs["loss"])


def run(case: Case) -> dict[str, Any]:
    """Fit, and return tokens per second, utilization, peak memory and the last loss; or why it cannot."""
    _be_killed_first()
    quiet()
    torch.set_float32_matmul_precision("high")
    pl.seed_everything(0, verbose=False)
    try:
        strategy, precision = strategy_of(case)
    except ImportError as error:
        return {"failed": str(error)}
    module = module_of(case)
    shape, uncounted = case.shape, min(UNCOUNTED, case.steps - 1)
    batches = case.steps * case.accumulate * shape.micro_batch
    tokens = torch.randint(module.config.vocab_size, (batches, shape.block + 1))
    data = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    timer = Timer(case.steps, uncounted)
    trainer = pl.Trainer(
        accelerator=case.device, devices=1, strategy=strategy, precision=precision, max_steps=case.steps,  # type: ignore[arg-type]
        accumulate_grad_batches=case.accumulate, gradient_clip_val=1.0, callbacks=[timer], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    device = trainer.strategy.root_device
    try:
        trainer.fit(module, DataLoader(data, batch_size=shape.micro_batch))
    except torch.OutOfMemoryError:
        return {"failed": "out of the device's memory"}
    per_s = (case.steps - uncounted) * case.tokens / timer.seconds
    peak = peak_flops(dev.name(device))
    return {
        "parameters": sum(p.numel() for p in module.parameters()),
        "tokens_per_s": per_s,
        "mfu": None if peak is None else per_s * module.flops_per_token() / peak,
        "peak_device_gib": dev.peak_bytes(device) / 2**30 if case.device == "cuda" else 0.0,
        "peak_host_gib": _resident_bytes() / 2**30,
        "threads": torch.get_num_threads(),
        "loss": timer.loss,
    }


def _be_killed_first() -> None:
    """Let the system end this process, and not its parent, if memory is short; and end it with its parent."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    Path("/proc/self/oom_score_adj").write_text("1000")


def _resident_bytes() -> int:
    """Return the most memory of the host that this process has had: what a limit on it counts, pinned or not."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


class UntilAccurate(pl.Callback):
    """Ends a fit at an accuracy, and knows the seconds of training until then, without validation."""

    def __init__(self, accuracy: float) -> None:
        """Of the test images, as a fraction."""
        self.accuracy = accuracy
        self.seconds = 0.0
        self.found: list[float] = []
        self._began = 0.0

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Stop the clock."""
        if not trainer.sanity_checking:
            dev.synchronize(trainer.strategy.root_device)
            self.seconds += time.perf_counter() - self._began

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """End the fit if the network is good enough."""
        if not trainer.sanity_checking:
            self.found.append(float(trainer.callback_metrics["val/accuracy"]))
            trainer.should_stop = self.found[-1] >= self.accuracy


def until_accurate(folder: str, device: str, accuracy: float) -> dict[str, Any]:
    """Run the CIFAR-10 recipe until its network has an accuracy; return seconds of training and what it reached."""
    from recipes.cifar.main import main

    configs = Path(__file__).parents[1] / "recipes" / "cifar" / "configs"
    names = ["base.yaml", *(["gpu.yaml"] if device == "cuda" else [])]
    args = [*(f"--config={configs / name}" for name in names), "--trainer.devices=1"]
    args += [f"--data.data_dir={folder}", "--trainer.logger=false", "--trainer.callbacks=null"]
    args += ["--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false"]
    until = UntilAccurate(accuracy)
    with tempfile.TemporaryDirectory() as runs:
        cli = main([*args, f"--trainer.default_root_dir={runs}"], run=False)
        trainer: Any = cli.trainer
        trainer.callbacks.append(until)
        trainer.fit(cli.model, datamodule=cli.datamodule)
    reached = bool(until.found) and until.found[-1] >= accuracy
    return {
        "accuracy": until.found[-1] if until.found else 0.0,
        "epochs": len(until.found),
        "seconds": until.seconds,
        "goal": accuracy,
        "reached": reached,
    }
