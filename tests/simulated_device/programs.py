"""What runs on the simulated device and, for comparison, on the CPU: whole fits, and parts driven directly."""

from __future__ import annotations

import gc
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy import device as dev
from ls_strategy.activations.offload import ActivationOffload
from ls_strategy.checkpoint.background import BackgroundSaver, Hold
from ls_strategy.checkpoint.manifest import Manifest
from ls_strategy.checkpoint.reshard import Contents, separate
from ls_strategy.checkpoint.save import Save
from ls_strategy.checkpoint.source import read_checkpoint
from ls_strategy.config import ActivationOffloadConfig
from ls_strategy.distributed import buffer_pool
from ls_strategy.distributed.buffer_pool import BufferPool
from ls_strategy.extras.inference.stream import stream_blocks
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.moe.dispatch import by_expert
from ls_strategy.tiers.arrival import Arrival
from ls_strategy.tiers.buffers import AlignedBuffer
from ls_strategy.tiers.link import Link, host_empty
from ls_strategy.zero.step import update
from ls_strategy.zero.step.device_step import DeviceStep
from ls_strategy.zero.step.fused_optimizers import Kernel
from tests.dist.ranks import quiet
from tests.simulated_device.device import BACKEND, NAME, SimulatedAccelerator
from tests.simulated_device.timeline import Timeline
from tests.unit.fake_flats import fake_flats, source_of

WIDTH = 16


class Block(nn.Module):
    """A residual block; its activations are larger than its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(pl.LightningModule):
    """Blocks between two layers. Records the losses, without waiting for them."""

    def __init__(self, blocks: int = 4, width: int = WIDTH, *, habit: str = "", fused: bool | None = True) -> None:
        """Build the model.

        Args:
            blocks: how many.
            width: of their inputs.
            habit: what the user's code does besides, see the methods.
            fused: of the optimizer. True selects torch's kernel where states are on the device.
        """
        super().__init__()
        self.habit = habit
        self.fused = fused
        torch.manual_seed(3)
        self.first = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.last = nn.Linear(width, 1)
        for block in self.blocks if habit == "frozen matrices" else ():
            block.down.weight.requires_grad_(False)  # type: ignore[union-attr, operator]
        self.losses: list[Tensor] = []
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            if self.habit == "a branch without backward" and number == 2:
                self.kept = self.blocks[0](x), self.blocks[1](x)
            if self.habit == "stops early" and number == 2 and len(self.losses) % 2:
                break
            if self.habit != "skips a block" or number != len(self.losses) % 4:
                x = block(x)
        return self.last(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self(x).float(), y.float())
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01, fused=self.fused)


class Looking(Stack):
    """Computes between backward and the step. With such a hook, no update begins before backward is over."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with torch.no_grad():
            self.kept = self(torch.ones(1, 4, device=self.device, dtype=self.first.weight.dtype))


def batches(dtype: torch.dtype = torch.float32, count: int = 5) -> DataLoader[Any]:
    random = torch.Generator().manual_seed(5)
    x = torch.randn(4 * count, 4, generator=random)
    return DataLoader(TensorDataset(x.to(dtype), x.sum(1, keepdim=True).to(dtype)), batch_size=4)


def fit(
    device: torch.device,
    options: dict[str, Any] | None,
    trainer: dict[str, Any] | None = None,
    habit: str = "",
    *,
    resume: str | None = None,
    width: int = WIDTH,
    blocks: int = 4,
    fused: bool | None = True,
    module: Stack | None = None,
) -> dict[str, Any]:
    """Train five steps, or ``max_steps``. Return the losses, the weights at the end as host tensors, and the plan.

    Without ``options`` it is a plain Trainer.
    """
    quiet()
    with tempfile.TemporaryDirectory(prefix="ls_strategy_") as folder:
        defaults = {
            "max_steps": 5,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": folder,
        }
        run = pl.Trainer(
            accelerator=SimulatedAccelerator() if device.type == NAME else device.type,
            devices=dist.get_world_size() if dist.is_initialized() else 1,
            strategy=strategy_of(device, options, folder),
            **{**defaults, **(trainer or {})},
        )
        kind = Looking if habit == "a forward before the step" else Stack
        model = kind(blocks, width, habit=habit, fused=fused) if module is None else module
        precision = (trainer or {}).get("precision", "32-true")
        dtype = {"bf16-true": torch.bfloat16, "16-true": torch.float16}.get(precision, torch.float32)
        run.fit(model, batches(dtype, 10), ckpt_path=resume)
        weights = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
        plan = run.strategy.engine.plan if isinstance(run.strategy, ZeROStrategy) else None
        return {"losses": torch.stack(model.losses).tolist(), "weights": weights, "plan": plan}


def strategy_of(device: torch.device, options: dict[str, Any] | None, folder: str) -> str | ZeROStrategy:
    """Return the strategy with these options, or Lightning's own without; the drive is a folder."""
    if options is None:
        return "auto"
    options = {
        "process_group_backend": BACKEND if device.type == NAME else None,
        **options,
        "sharding": {"min_unit_numel": 1, **options.get("sharding", {})},
    }
    if "nvme" in str(options):
        options["offload"] = {"nvme_path": folder, "nvme_allow_ram": True, **options.get("offload", {})}
    return ZeROStrategy(**options)


def trained(device: torch.device, options: dict[str, Any], trainer: dict[str, Any], blocks: int) -> None:
    """Train a model of some depth."""
    fit(device, options, trainer, blocks=blocks)


def places_of_updates(device: torch.device, step_on: str) -> set[str]:
    """Train with updates that begin while backward runs. Return the kinds of device that the updates ran on."""
    places: set[str] = set()
    run = Kernel.update

    def noting(kernel: Kernel, param: Tensor, *args: Any, **options: Any) -> None:
        places.add(param.device.type)
        run(kernel, param, *args, **options)

    with mock.patch.object(Kernel, "update", noting):
        fit(device, {"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu", "step_on": step_on}})
    return places


def streams_of_copies(device: torch.device, options: dict[str, Any], precision: str) -> set[tuple[int, str]]:
    """Train with parameters that are read from a drive. Return the streams of copies from it, and what starts them."""
    found: set[tuple[int, str]] = set()
    begin = Timeline.begin

    def noting(timeline: Timeline, stream: int, name: str) -> Any:
        moment = begin(timeline, stream, name)
        if threading.current_thread().name.startswith("ls_strategy-background") and name == "copy_":
            found.add((stream, moment.name))
        return moment

    with mock.patch.object(Timeline, "begin", noting):
        fit(device, options, {"precision": precision})
    return found


def in_chunks(device: torch.device) -> dict[str, Any]:
    """Train with states that are updated on the device in many chunks, most of them while backward runs."""

    def small(start: int, stop: int) -> Iterator[tuple[int, int]]:
        for low in range(start, stop, 256):
            yield low, min(low + 256, stop)

    offload = {"optimizer": "cpu", "parameters": "cpu", "gradients": "cpu", "step_on": "device"}
    with mock.patch.object(update, "chunks", small):
        return fit(device, {"stage": 3, "offload": offload}, {"precision": "bf16-true"})


def order_of_chunks(device: torch.device, count: int) -> tuple[list[str], Tensor]:
    """Add 1 to ``count`` chunks of host memory on the device. Return what the host did, and the memory."""
    dev.select(device)
    states = host_empty(count << 12, torch.float32, device).copy_(torch.arange(count << 12))
    step, order = DeviceStep(Link(device)), list[str]()
    wait = Arrival.wait_on_host
    with mock.patch.object(Arrival, "wait_on_host", lambda arrival: (order.append("wait"), wait(arrival))[1]):
        for chunk in states.split(1 << 12):
            with step.operation():
                order.append("send")
                step.bring(chunk, step.send(chunk) + 1)
        step.finish()
    return order, states.clone()


def wide(device: torch.device, options: dict[str, Any]) -> tuple[int, int]:
    """Train a model whose states are larger than pages. Return the planned bytes on the host, and of a unit."""
    plan = fit(device, options, width=150)["plan"]
    largest = max(flat.layout.numel for unit in plan.units for flat in unit.flats)
    return sum(plan.bytes_by_tier()["cpu"].values()), 4 * largest


class Saves(pl.Callback):
    """Saves in every step; the next step runs while the save is written."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.save_checkpoint(f"{self.folder}/{trainer.global_step}")


def saved(device: torch.device, stage: int, format: str = "sharded", **offload: str) -> list[Any]:
    """Train and save in the background, then resume from each save; return what the runs ended with."""
    with tempfile.TemporaryDirectory(prefix="ls_strategy_") as folder:
        options = {"stage": stage, "checkpoint": {"background": True, "format": format}}
        options |= {"offload": offload} if offload else {}
        ends = [fit(device, options, {"callbacks": [Saves(folder)]})]
        ends += [fit(device, options, resume=f"{folder}/{step}") for step in (1, 3)]
        return [end["weights"] for end in ends]


class Generates(Stack):
    """Generates something before every step, with the weights gathered."""

    @torch.no_grad()
    def generate(self, x: Tensor) -> Tensor:
        """Run the model on its own outputs."""
        for _ in range(3):
            x = self(x).expand(-1, 4)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.kept = self.generate(batch[0])
        return super().training_step(batch, batch_idx)


def crossed(device: torch.device, name: str) -> tuple[int, dict[str, int]]:
    """Train as `CROSSED` says, where all threads run that there are.

    Returns:
        The bytes used on the other device, and which device each thread had at its end, by name.
    """
    options, trainer = CROSSED[name]
    options = {**options, "checkpoint": {"background": True, "format": "sharded"}}
    devices: dict[str, int] = {}
    run = threading.Thread.run

    def noting(thread: threading.Thread) -> None:
        run(thread)
        devices[thread.name] = torch.accelerator.current_device_index()

    running = mock.patch.object(threading.Thread, "run", noting)
    with tempfile.TemporaryDirectory(prefix="ls_strategy_") as folder, running:
        for resume in (None, f"{folder}/3"):
            fit(device, options, {**trainer, "callbacks": [Saves(folder)]}, resume=resume, module=Generates())
            gc.collect()  # ends the threads of what refers to each other
    return torch.accelerator.max_memory_allocated(0), devices


def streamed(device: torch.device, tier: str) -> Tensor:
    """Run a model whose blocks are streamed, three times."""
    dev.select(device)
    with tempfile.TemporaryDirectory(prefix="ls_strategy_") as folder, torch.no_grad():
        model = Stack(6).eval()
        where = {"path": Path(folder), "allow_ram": True} if tier == "nvme" else {}
        with_blocks = stream_blocks(model, tier, device=device, **where)  # type: ignore[arg-type]
        x = torch.linspace(-1, 1, 12).view(3, 4)
        outputs = [model((x * scale).to(device)).cpu() for scale in (1.0, 2.0, 3.0)]
        with_blocks.close()
        return torch.cat(outputs)


def saved_through_device(device: torch.device) -> list[Any]:
    """The same with states that are updated on the device, and read by the host right after the step."""
    return saved(device, 2, optimizer="cpu", step_on="device")


def dropped(device: torch.device) -> Tensor:
    """Free the target of a copy in flight; what takes its place must not be overwritten."""
    link = Link(device)
    ones, found = (host_empty(1 << 16, torch.float32, device).fill_(1.0) for _ in range(2))
    target = torch.empty(ones.shape, device=device)
    link.to_device(target, ones)
    del target
    other = torch.zeros(ones.shape, device=device)
    link.to_host(found, other).wait_on_host()
    return found.clone()


def pinned_anywhere(device: torch.device) -> None:
    """Pin memory, and free it, in a thread that has selected no device."""
    thread = threading.Thread(target=lambda: AlignedBuffer(1 << 12, pin=device))
    thread.start()
    thread.join()


def crowded(device: torch.device) -> tuple[int, list[float]]:
    """Send three results to the host from memory for one. Return how much memory it was, and what has arrived."""
    link, pool, numel = Link(device), BufferPool(), 1 << 14
    found = [host_empty(numel, torch.float32, device) for _ in range(3)]
    with mock.patch.object(buffer_pool, "LATE_BYTES", 0):
        for number, host in enumerate(found):
            buffer = pool.take(numel, torch.float32, device).fill_(number)
            arrival = link.to_host(host, buffer)
            pool.give_late(buffer, arrival)
    arrival.wait_on_host()
    return pool.bytes // (4 * numel), [float(host.mean()) for host in found]


def given_up(device: torch.device, sent_again: bool) -> Tensor:
    """Drop a region that was fetched ahead but never used, and store another one in its host memory."""
    numel = 1 << 14
    config = ActivationOffloadConfig(tier="cpu", min_bytes=1, in_flight_bytes=2 * 4 * numel)
    offload = ActivationOffload(config, device)
    first, second, third = (offload.keep(torch.full((numel,), value, device=device)) for value in (1.0, 2.0, 3.0))
    offload.add_use(first)
    offload.load(third)
    offload.drop(third)
    offload.load(second)
    assert first.on_device is not None  # fetched ahead
    others = [offload.keep(torch.full((numel,), 4.0, device=device)) for _ in range(2 * sent_again)]
    assert (first.on_device is None) == sent_again
    offload.drop(first)
    others += [offload.keep(torch.full((numel,), 4.0, device=device)) for _ in range(2)]  # in the memory of two
    return torch.stack([offload.load(each).cpu() for each in reversed(others)])


def reordered(device: torch.device) -> list[Tensor]:
    """Bring rows for three experts from two ranks into the order of the experts, and back."""
    rows = torch.arange(14.0, device=device).view(7, 2)
    sorted_rows, back = by_expert(rows, [[2, 0, 1], [1, 3, 0]])
    return [sorted_rows.cpu(), back(sorted_rows).cpu()]


def _write_meta(_first: object, meta: dict[str, Any], path: str) -> None:
    torch.save(meta, path)


def overtaken(device: torch.device) -> Tensor:
    """Let an update change what a save in the background has only begun to hold; return what was saved."""
    flat, opened, ahead, contents = fake_flats()[0], threading.Event(), Hold.copy_ahead, Contents()
    flat.optimizer_tier, flat.master = "device", flat.master.to(device)
    weights = {"a": contents.stand_in(source_of(flat, 0, guarded=True), torch.float32)}
    entries, _ = separate({"state_dict": weights}, contents)
    saver = BackgroundSaver(0, 1, device)
    with tempfile.TemporaryDirectory(prefix="ls_strategy_") as folder:
        job = Save(f"{folder}/x", entries, {}, Manifest(1, 0, {}, {}), partial(_write_meta, None, {}))
        with mock.patch.object(Hold, "copy_ahead", lambda *args: (opened.wait(30), ahead(*args))):
            saver.submit(job, lambda *_: None)
            flat.hold.release()
            flat.master.zero_()
            opened.set()
            saver.wait()
        saver.close()
        return read_checkpoint(f"{folder}/x")["state_dict"]["a"].range(0, flat.owned[1]).clone()


PARTS: dict[str, tuple[Any, ...]] = {
    "dropped": (dropped,),
    "overtaken": (overtaken,),
    "crowded": (crowded,),
    "given up": (given_up, False),
    "given up, sent again": (given_up, True),
    "reordered": (reordered,),
    "pinned anywhere": (pinned_anywhere,),
}
"""What drives a part directly, and its arguments."""


def all_parts(device: torch.device) -> dict[str, Any]:
    """Return what all `PARTS` return, one after the other in one process."""
    dev.select(device)
    found: dict[str, Any] = {}
    for name, (function, *arguments) in PARTS.items():
        found[name] = function(device, *arguments)
        gc.collect()
        dev.synchronize(device)
    return found


def activations(tier: str) -> dict[str, Any]:
    """Return options that store every activation, with little room in flight."""
    return {
        "stage": 2,
        "activations": {
            "offload": {"tier": tier, "min_bytes": 1, "in_flight_bytes": 3000, "staging_bytes": 1 << 16},
        },
    }


FITS: dict[str, tuple[Any, ...]] = {
    "stage 1": ({"stage": 1}, {}),
    "stage 3": ({"stage": 3}, {}),
    "stage 2, cpu, step on cpu": ({"stage": 2, "offload": {"optimizer": "cpu", "step_on": "cpu"}}, {}),
    "stage 2, cpu, step on device": ({"stage": 2, "offload": {"optimizer": "cpu", "step_on": "device"}}, {}),
    "stage 2, cpu, no overlap": (
        {"stage": 2, "offload": {"optimizer": "cpu", "step_on": "cpu"}, "sharding": {"overlap_step": False}},
        {},
    ),
    "stage 1, cpu, clipping": (
        {"stage": 1, "offload": {"optimizer": "cpu", "step_on": "device"}},
        {"gradient_clip_val": 0.1},
    ),
    "stage 2, gradients on cpu, accumulation": (
        {"stage": 2, "offload": {"optimizer": "cpu", "gradients": "cpu", "step_on": "cpu"}},
        {"accumulate_grad_batches": 2},
    ),
    "stage 3, all on cpu": (
        {"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu", "gradients": "cpu", "step_on": "cpu"}},
        {"gradient_clip_val": 0.1},
    ),
    "stage 3, all on cpu, bf16": (
        {"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu", "gradients": "cpu", "step_on": "device"}},
        {"precision": "bf16-true"},
    ),
    "stage 3, bf16-mixed": ({"stage": 3}, {"precision": "bf16-mixed"}),
    "stage 3, all on cpu, bf16-mixed": (
        {"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu", "gradients": "cpu", "step_on": "cpu"}},
        {"precision": "bf16-mixed", "gradient_clip_val": 0.1},
    ),
    "stage 3, all on nvme, bf16-mixed": (
        {"stage": 3, "offload": {"optimizer": "nvme", "parameters": "nvme"}},
        {"precision": "bf16-mixed"},
    ),
    "stage 2, cpu, 16-bit copies": (
        {"stage": 2, "offload": {"optimizer": "cpu", "step_on": "cpu"}},
        {"precision": "bf16-true"},
    ),
    "stage 2, delayed": (
        {"stage": 2, "offload": {"optimizer": "cpu", "step_on": "cpu", "delay_after": 1}},
        {},
    ),
    "stage 2, nvme": ({"stage": 2, "offload": {"optimizer": "nvme", "step_on": "cpu"}}, {}),
    "stage 3, all on nvme": (
        {"stage": 3, "offload": {"optimizer": "nvme", "parameters": "nvme", "gradients": "nvme", "step_on": "cpu"}},
        {"accumulate_grad_batches": 2},
    ),
    "stage 3, all on nvme, clipping": (
        {"stage": 3, "offload": {"optimizer": "nvme", "parameters": "nvme", "gradients": "nvme", "step_on": "cpu"}},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    ),
    "stage 3, all on nvme, step on device": (
        {"stage": 3, "offload": {"optimizer": "nvme", "parameters": "nvme", "gradients": "nvme", "step_on": "device"}},
        {"precision": "bf16-true"},
    ),
    "stage 2, 8-bit moments": (
        {"stage": 2, "offload": {"optimizer": "cpu", "step_on": "device"}, "precision": {"moments": "int8"}},
        {},
    ),
    "stage 2, step on device, a forward before the step": (
        {"stage": 2, "offload": {"optimizer": "cpu", "step_on": "device"}, "sharding": {"overlap_step": False}},
        {},
        "a forward before the step",
    ),
    "stage 2, step on cpu, a forward before the step": (
        {"stage": 2, "offload": {"optimizer": "cpu", "step_on": "cpu"}, "sharding": {"overlap_step": False}},
        {},
        "a forward before the step",
    ),
    "stage 3, all on cpu, skips a block": (
        {"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu", "gradients": "cpu", "step_on": "cpu"}},
        {},
        "skips a block",
    ),
    "stage 3, all on cpu, stops early": (
        {"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu", "gradients": "cpu", "step_on": "cpu"}},
        {},
        "stops early",
    ),
    "stage 1, split masters": ({"stage": 1, "precision": {"master_weights": "split"}}, {"precision": "bf16-true"}),
    "stage 2, split masters on cpu": (
        {"stage": 2, "offload": {"optimizer": "cpu"}, "precision": {"master_weights": "split"}},
        {"precision": "bf16-true", "gradient_clip_val": 0.1},
    ),
    "stage 2, split masters on nvme": (
        {"stage": 2, "offload": {"optimizer": "nvme"}, "precision": {"master_weights": "split", "moments": "int8"}},
        {"precision": "bf16-true"},
    ),
    "stage 2, masters of 24 bits, updated in backward": (
        {
            "stage": 2,
            "precision": {"master_weights": "24", "moments": "int8"},
            "sharding": {"overlap_step": "backward"},
        },
        {"precision": "bf16-true"},
    ),
    "stage 2, masters of 24 bits on cpu": (
        {"stage": 2, "offload": {"optimizer": "cpu"}, "precision": {"master_weights": "24"}},
        {"precision": "bf16-true"},
    ),
    "stage 3, masters of 24 bits, updated in backward": (
        {"stage": 3, "precision": {"master_weights": "24"}, "sharding": {"overlap_step": "backward"}},
        {"precision": "bf16-true"},
    ),
    "stage 3, split masters on cpu": (
        {"stage": 3, "offload": {"optimizer": "cpu"}, "precision": {"master_weights": "split"}},
        {"precision": "bf16-true"},
    ),
    "stage 3, masters of 24 bits, all on cpu, step on device": (
        {
            "stage": 3,
            "offload": {"optimizer": "cpu", "parameters": "cpu", "step_on": "device"},
            "precision": {"master_weights": "24", "moments": "int8"},
        },
        {"precision": "bf16-true"},
    ),
    "stage 3, masters of 24 bits, all on nvme": (
        {
            "stage": 3,
            "offload": {"optimizer": "nvme", "parameters": "nvme", "step_on": "device"},
            "precision": {"master_weights": "24"},
        },
        {"precision": "bf16-true"},
    ),
    "stage 3, split masters, parameters on cpu": (
        {"stage": 3, "offload": {"parameters": "cpu"}, "precision": {"master_weights": "split"}},
        {"precision": "bf16-true", "gradient_clip_val": 0.1},
    ),
    "stage 1, frozen in nf4": ({"stage": 1, "precision": {"frozen": "nf4"}}, {}, "frozen matrices"),
    "stage 3, frozen in nf4 on cpu, bf16": (
        {
            "stage": 3,
            "offload": {"optimizer": "cpu", "parameters": "cpu", "step_on": "cpu"},
            "precision": {"frozen": "nf4"},
        },
        {"precision": "bf16-true"},
        "frozen matrices",
    ),
    "stage 3, frozen in int8 on nvme": (
        {
            "stage": 3,
            "offload": {"optimizer": "nvme", "parameters": "nvme", "step_on": "cpu"},
            "precision": {"frozen": "int8"},
        },
        {},
        "frozen matrices",
    ),
    "activations on cpu, a branch without backward": (activations("cpu"), {}, "a branch without backward"),
    "activations on cpu": (activations("cpu"), {}),
    "activations on nvme": (activations("nvme"), {}),
}
"""Options of the strategy and of the Trainer, and a habit of the user's code."""


ALL_THREADS = "stage 3, all on nvme"
_TIERS: dict[str, dict[str, Any]] = {
    "on the device": {},
    "on cpu": {"optimizer": "cpu", "gradients": "cpu", "step_on": "cpu"},
    "on cpu, step on device": {"optimizer": "cpu", "step_on": "device"},
    "on nvme": {"optimizer": "nvme", "step_on": "cpu"},
    "all on cpu": {"optimizer": "cpu", "parameters": "cpu", "gradients": "cpu", "step_on": "device"},
    "all on nvme": {"optimizer": "nvme", "parameters": "nvme", "gradients": "nvme", "step_on": "cpu"},
}
CROSSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    f"stage {stage}, {tier}": (
        {**activations("nvme" if "nvme" in tier else "cpu"), "stage": stage, "offload": offload},
        {"precision": "bf16-true" if stage == 3 else "32-true", "gradient_clip_val": 0.1 * (stage == 2)},
    )
    for stage in (1, 2, 3)
    for tier, offload in _TIERS.items()
    if stage == 3 or "parameters" not in offload
}
"""Options of the strategy and of the Trainer. All store activations, generate, save in the background, and resume."""


def fit_all(device: torch.device, names: list[str]) -> dict[str, dict[str, Any]]:
    """Return the results of these `FITS`, by name."""
    return {name: fit(device, *FITS[name]) for name in names}
