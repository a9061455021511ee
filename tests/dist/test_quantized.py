"""Frozen weights in 4 and 8 bits on several ranks: the numbers of rounded weights, a quarter of the bytes.

Trusted runs: the same strategy without quantization, and plain torch on one process, of a model whose frozen matrices
were rounded before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn

from ls_strategy import MoE, load_from_checkpoint
from ls_strategy.config import ZeROConfig, nested
from ls_strategy.extras.planner.candidates import Candidate
from ls_strategy.extras.planner.forecast import Forecaster, Run
from ls_strategy.extras.planner.hardware import Hardware
from ls_strategy.extras.planner.simulated import simulated
from ls_strategy.extras.planner.step import first_batch, training_step
from ls_strategy.extras.planner.traffic import traffic
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.ops.quantized import rounded
from ls_strategy.precision import resolve_precision
from ls_strategy.testing import spawn
from ls_strategy.zero.flat.quantized import QuantizedFlat
from tests.dist.ranks import (
    WIDTH,
    Net,
    assert_close,
    assert_equal,
    fit,
    global_batches,
    mean_over_ranks,
    on_ranks,
    quiet,
    saved,
    weights,
)
from tests.dist.ranks import trainer_of as plain_trainer
from tests.dist.test_planner import Begin
from tests.dist.test_pretrained import Pretrained, save, tokens
from tests.dist.trusted import once
from tests.live_bytes import LiveBytes
from tests.marks import few_or_all, slow, wide

safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")

HIDDEN, STEPS = 64, 4
OPTIONS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, recomputed": {"stage": 3, "activations.checkpointing": "full"},
    "stage 1, recomputed": {"stage": 1, "activations.checkpointing": "full"},
    "stage 3, host": {"stage": 3, "offload.parameters": "cpu", "offload.optimizer": "cpu"},
}


class Adapted(nn.Module):
    """A residual block of two frozen layers, each with an adapter as LoRA adds it."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.a, self.b = nn.Linear(width, 4, bias=False), nn.Linear(4, hidden, bias=False)
        self.up.requires_grad_(False)
        self.down.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x) + self.b(self.a(x))))


class Lora(Net):
    """Frozen blocks between trained layers."""

    blocks_number = 3
    form: str | None = None
    """Round the frozen matrices of the blocks to this format at the start."""

    def build(self) -> None:
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.blocks = nn.ModuleList([Adapted(HIDDEN, 2 * HIDDEN) for _ in range(self.blocks_number)])
        self.last = nn.Linear(HIDDEN, WIDTH)
        if self.form is not None:
            round_frozen(self.blocks, self.form)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr, eps=1e-4, fused=True)


class Rounded(Lora):
    """Starts with weights that were rounded to nf4."""

    form = "nf4"


def round_frozen(module: nn.Module, form: Any) -> None:
    with torch.no_grad():
        for p in module.parameters():
            if not p.requires_grad and p.dim() == 2:
                p.copy_(rounded(p.reshape(-1), form).view(p.shape))


def strategy_of(options: dict[str, Any], form: str | None) -> ZeROStrategy:
    return ZeROStrategy(**nested({"sharding.min_unit_numel": 0, **options, "precision.frozen": form}))


def run(
    rank: int, world_size: int, options: dict[str, Any], form: str | None, module: Net | None = None, **of_trainer: Any
) -> tuple[list[float], dict[str, Tensor], Any]:
    """Losses averaged over ranks, final weights, and the Trainer."""
    module = Lora() if module is None else module
    replica, replicas = rank, world_size
    if "parallel.tensor.size" in options:
        replica, replicas = rank // 2, world_size // 2
    elif "parallel.pipeline.size" in options:
        replica, replicas = rank % (world_size // 2), world_size // 2
    data = global_batches(replica, replicas, STEPS)
    trainer = fit(strategy_of(options, form), module, data, use_distributed_sampler=False, max_epochs=1, **of_trainer)
    final = {name: value.detach().clone() for name, value in module.state_dict().items()}
    by_rank = "parallel.pipeline.size" in options  # only the last stage has losses
    return module.losses if by_rank else mean_over_ranks(module.losses), final, trainer


def plain(rank: int, world_size: int) -> tuple[list[float], dict[str, Tensor]]:
    """The trusted run: plain torch, one process, rounded weights."""
    quiet()
    module = Rounded()
    fit("auto", module, global_batches(rank, world_size, STEPS), use_distributed_sampler=False, max_epochs=1)
    return module.losses, dict(module.state_dict())


def frozen(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in weights.items() if ".up." in name or ".down." in name}


FEW = ("stage 1", "stage 3, recomputed", "stage 3, host")


@pytest.mark.parametrize(
    ("world_size", "names"),
    [(2, FEW), wide(1, tuple(OPTIONS)), wide(2, tuple(OPTIONS)), slow(4, tuple(OPTIONS))],
    ids=["2-few", "1-all", "2-all", "4-all"],
)
def test_training_is_that_of_rounded_weights(world_size: int, names: tuple[str, ...]) -> None:
    """On every stage bit for bit, against plain torch on one process to within rounding, the frozen weights exactly."""
    expected = once(plain, 1, timeout_s=60)[0]
    spawn(several_options, world_size, expected, names, init_process_group=False, timeout_s=120)


def several_options(rank: int, world_size: int, expected: Any, names: tuple[str, ...]) -> None:
    quiet()
    first: Any = None
    unequal = {"stage 3, shards 2 : 1": {"stage": 3, "sharding.rank_weights": [2, 1]}} if world_size == 2 else {}
    for name, options in ({each: OPTIONS[each] for each in names} | unequal).items():
        losses, weights, _ = run(rank, world_size, options, "nf4")
        assert_close(losses, expected[0], f"{name}, losses")
        assert_close(weights, expected[1], f"{name}, weights", 1e-5)  # sums of four ranks are in another order
        assert_equal(frozen(weights), frozen(expected[1]), f"{name}, frozen weights")
        first = first or (losses, weights)
        if name != "stage 3, host":  # where a kernel of its own updates the adapters; `tests.unit` has it bit for bit
            assert_equal(losses, first[0], f"{name} against {names[0]}, losses")
            assert_equal(weights, first[1], f"{name} against {names[0]}, weights")
    losses, weights, _ = run(rank, world_size, OPTIONS["stage 3"], None, Rounded())
    assert_equal(losses, first[0], "without quantization, losses")
    assert_equal(weights, first[1], "without quantization, weights")


class Sent(pl.Callback):
    """Bytes sent so far, after each step."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        meter = trainer.strategy.traffic.bytes  # type: ignore[attr-defined]
        self.bytes.append(meter["all_gather"] + meter["reduce_scatter"])


@pytest.mark.wide
@on_ranks(2)
def test_bytes_on_the_wire_and_in_memory(rank: int, world_size: int) -> None:
    for form, ratio in (("nf4", 0.3), ("int4", 0.3), ("int8", 0.52)):
        sent = Sent()
        _, _, trainer = run(rank, world_size, OPTIONS["stage 3"], form, precision="bf16-true", callbacks=[sent])
        engine = trainer.strategy.require_engine()
        quantized = [f for f in engine.flats if isinstance(f, QuantizedFlat)]
        assert len(quantized) == Lora.blocks_number
        numel = sum(f.layout.param_numel for f in quantized)
        assert numel == Lora.blocks_number * 4 * HIDDEN * HIDDEN
        assert sum(f.wire.values.numel() for f in quantized) <= ratio * 2 * numel
        assert sum(f.master.nbytes for f in quantized) <= ratio * numel  # half of it on each rank
        assert sum(f.full.untyped_storage().nbytes() + f.wire.values.untyped_storage().nbytes() for f in quantized) == 0
        assert sum(f.plan.gathered_numel for f in quantized) == sum(f.wire.values.numel() for f in quantized) // 2
        assert engine.memory_bytes()["masters"] == engine.plan.state_bytes()["masters"]
        planned = traffic(engine.plan, (8.0,), native_fp32=engine.comm.native)
        assert sent.bytes[3] - sent.bytes[2] == planned.sent


# --- other kinds of parallelism, and other ways to start --------------------------------------------------------------


class SparseBlock(nn.Module):
    """Frozen experts behind a trained router."""

    def __init__(self) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN))
        self.moe = MoE(HIDDEN, expert, num_experts=4, k=1, drop_tokens=False)
        self.moe.experts.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(x)


class Sparse(Lora):
    """Blocks with experts."""

    def build(self) -> None:
        super().build()
        self.blocks = nn.ModuleList([SparseBlock() for _ in range(2)])
        if self.form is not None:
            with torch.no_grad():
                for name, p in self.blocks.named_parameters():
                    if "experts" in name and name.endswith("weight"):
                        p.copy_(rounded(p.reshape(-1), self.form).view(p.shape))  # type: ignore[arg-type]


class RoundedSparse(Sparse):
    """Starts with experts that were rounded to nf4."""

    form = "nf4"


TENSOR = {"blocks.*.up": "column", "blocks.*.b": "column", "blocks.*.down": "row"}
PARALLEL: dict[str, tuple[type[Net], type[Net], dict[str, Any]]] = {
    "tensor, stage 1": (Lora, Rounded, {"stage": 1, "parallel.tensor.size": 2, "parallel.tensor.plan": TENSOR}),
    "tensor, stage 3": (Lora, Rounded, {"stage": 3, "parallel.tensor.size": 2, "parallel.tensor.plan": TENSOR}),
    "pipeline, stage 1": (
        Lora, Rounded, {"stage": 1, "parallel.pipeline.size": 2, "parallel.pipeline.micro_batches": 2}
    ),
    "pipeline, stage 3": (
        Lora, Rounded, {"stage": 3, "parallel.pipeline.size": 2, "parallel.pipeline.micro_batches": 2}
    ),
    "experts, stage 1": (Sparse, RoundedSparse, {"stage": 1, "parallel.expert": 2}),
    "experts, stage 3": (Sparse, RoundedSparse, {"stage": 3, "parallel.expert": 2}),
}  # fmt: skip


@pytest.mark.wide
@pytest.mark.parametrize(
    "names", few_or_all(("tensor, stage 3", "pipeline, stage 1", "experts, stage 1"), tuple(PARALLEL))
)
@on_ranks(2, timeout_s=120)
def test_parts_of_weights_are_quantized(rank: int, world_size: int, names: tuple[str, ...]) -> None:
    """Bit for bit the run of rounded weights. The widths of the parts are multiples of a block."""
    check_parts(rank, world_size, names)


def check_parts(rank: int, world_size: int, names: tuple[str, ...]) -> None:
    for name in names:
        module, trusted_module, options = PARALLEL[name]
        losses, weights, trainer = run(rank, world_size, options, "nf4", module())
        expected = run(rank, world_size, options, None, trusted_module())
        assert_equal(losses, expected[0], f"{name}, losses")
        assert_equal(here(weights), here(expected[1]), f"{name}, weights")
        quantized = [f for f in trainer.strategy.require_engine().flats if isinstance(f, QuantizedFlat)]
        numel = sum(f.layout.param_numel for f in quantized)
        whole = 3 * 4 * HIDDEN**2 if module is Lora else 2 * 8 * HIDDEN**2
        assert numel in ((whole // 2,) if "pipeline" not in name else (whole // 3, 2 * whole // 3)), name


@pytest.mark.slow
@on_ranks(4, timeout_s=170)
def test_parts_of_weights_on_four_ranks(rank: int, world_size: int) -> None:
    check_parts(rank, world_size, tuple(PARALLEL))


def here(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without what other pipeline ranks have."""
    return {name: value for name, value in state.items() if not value.is_meta}


@pytest.mark.wide
@pytest.mark.parametrize("forms", few_or_all(("sharded",), ("sharded", "file")))
@on_ranks(2)
def test_checkpoints_have_the_same_bits_everywhere(
    rank: int, world_size: int, forms: tuple[str, ...], tmp_path: Path
) -> None:
    """Saved at stage 3 in nf4; resumed at another stage, in nf4 and without quantization; opened by plain torch."""
    for form in forms:
        path = f"{tmp_path}/{form}"
        options = {**OPTIONS["stage 3"], "checkpoint.format": form}
        _, expected, trainer = run(rank, world_size, options, "nf4")
        trainer.save_checkpoint(path)
        for other, kind in (("stage 1", "nf4"), ("stage 3, host", "nf4"), ("stage 3", None)):
            module = Lora()
            resumed = plain_trainer(strategy_of(OPTIONS[other], kind), max_epochs=1, use_distributed_sampler=False)
            resumed.fit(module, global_batches(rank, world_size, STEPS), ckpt_path=path)  # no step is left to do
            assert_equal(dict(module.state_dict()), expected, f"{form} at {other} as {kind}")
        assert_equal(dict(load_from_checkpoint(Lora, path).state_dict()), expected, f"{form}, plain")


@on_ranks(2)
def test_a_checkpoint_without_frozen_weights(rank: int, world_size: int, tmp_path: Path) -> None:
    path = f"{tmp_path}/adapters"
    _, expected, trainer = run(rank, world_size, {**OPTIONS["stage 3"], "checkpoint.frozen": False}, "nf4")
    trainer.save_checkpoint(path)
    names = saved(path)["state_dict"]
    assert not any(".up." in name or ".down." in name for name in names)
    assert any(".a." in name for name in names)
    module = Lora()
    module.strict_loading = False
    resumed = plain_trainer(strategy_of(OPTIONS["stage 1"], "nf4"), max_epochs=1, use_distributed_sampler=False)
    resumed.fit(module, global_batches(rank, world_size, STEPS), ckpt_path=path)
    assert_equal(dict(module.state_dict()), expected, "resumed")


class Unfreeze(BaseFinetuning):
    """Trains the second block's layers from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        """They are frozen."""

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.before = {name: value.clone() for name, value in pl_module.state_dict().items()}
            self.unfreeze_and_add_param_group(pl_module.blocks[1], optimizer)


@pytest.mark.wide
@pytest.mark.parametrize("names", few_or_all(("stage 3",), ("stage 1", "stage 3")))
@on_ranks(2)
def test_layers_that_are_unfrozen_start_from_rounded_weights(
    rank: int, world_size: int, names: tuple[str, ...]
) -> None:
    for name in names:
        unfrozen = Unfreeze()
        module = Lora()
        trainer = fit(strategy_of(OPTIONS[name], "nf4"), module, callbacks=[unfrozen], max_epochs=2)
        trusted_module = Rounded()
        fit(strategy_of(OPTIONS[name], None), trusted_module, callbacks=[Unfreeze()], max_epochs=2)
        assert_equal(module.losses, trusted_module.losses, f"{name}, losses")
        assert_equal(dict(module.state_dict()), dict(trusted_module.state_dict()), f"{name}, weights")
        quantized = [f for f in trainer.strategy.require_engine().flats if isinstance(f, QuantizedFlat)]
        assert len(quantized) == 2
        changed = [n for n, value in module.state_dict().items() if not torch.equal(value, unfrozen.before[n])]
        assert "blocks.1.up.weight" in changed
        assert "blocks.0.up.weight" not in changed


class Peft(Pretrained):
    """Adapters of PEFT on a model whose frozen weights are in files."""

    def load(self) -> Any:
        import peft

        return peft.get_peft_model(super().load(), peft.LoraConfig(target_modules=["q_proj", "v_proj"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class From(Peft):
    """The same on every rank, with given weights."""

    state: dict[str, Tensor]

    def load(self) -> Any:
        with torch.device("cpu"):
            model = super().load()
        model.load_state_dict({name.removeprefix("model."): value for name, value in self.state.items()})
        return model


@on_ranks(2)
def _peft(rank: int, world_size: int, folder: str) -> None:
    place = Path(folder) / "llama"
    held = dict(safetensors.load_file(next(place.glob("*.safetensors"))))
    for stage in (1, 3):
        fit(strategy_of({"stage": stage}, "nf4"), ours := Peft(place), tokens(), max_steps=4)
        kept = set()
        for name, value in ours.at_start.items():
            plain_name = name.removeprefix("model.base_model.model.").replace(".base_layer", "")
            if plain_name in held and "layers" in name and "proj" in name:
                expected = rounded(held[plain_name].reshape(-1), "nf4").view(value.shape)
                assert_equal(value, expected, name)
            elif plain_name in held:
                kept.add(plain_name.rpartition(".")[0].rpartition(".")[2])
                assert_equal(value, held[plain_name], name)
        assert kept == {"embed_tokens", "norm", "lm_head", "input_layernorm", "post_attention_layernorm"}
        trusted_module = From(place)
        trusted_module.state = ours.at_start
        fit("ddp", trusted_module, tokens(), max_steps=4)
        assert_close(ours.losses, trusted_module.losses, "losses")
        assert_close(weights(ours), weights(trusted_module), "weights", 1e-5)


@pytest.mark.wide
def test_adapters_of_peft_on_weights_of_files(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    save(tmp_path, "llama")
    _peft(folder=str(tmp_path))


# --- the planner ------------------------------------------------------------------------------------------------------

PLANNED = tuple((stage, precision) for stage in (1, 3) for precision in ("32-true", "bf16-true"))


class Large(Lora):
    """More in frozen blocks than around them."""

    def build(self) -> None:
        super().build()
        self.blocks = nn.ModuleList([Adapted(HIDDEN, 8 * HIDDEN) for _ in range(4)])


def measure(rank: int, world_size: int, indices: tuple[int, ...]) -> list[tuple[int, int]]:
    """Peak bytes of tensors, and bytes sent in the last step."""
    quiet()
    result = []
    for stage, precision in (PLANNED[index] for index in indices):
        data = global_batches(rank, world_size, STEPS)
        with LiveBytes(ignore=list(data.dataset.tensors)) as live:  # type: ignore[attr-defined]
            sent, begin = Sent(), Begin(live)
            options: dict[str, Any] = {"precision": precision, "callbacks": [sent, begin], "max_epochs": 1}
            fit(strategy_of({"stage": stage}, "nf4"), Large(), data, use_distributed_sampler=False, **options)
        result.append((live.peak, sent.bytes[-1] - sent.bytes[-2]))
    return result


@pytest.mark.wide
@pytest.mark.parametrize("indices", few_or_all((3,), tuple(range(len(PLANNED)))))
def test_the_planner_knows_the_bytes(indices: tuple[int, ...]) -> None:
    ranks = spawn(measure, 2, indices, init_process_group=False, timeout_s=120)
    for number, index in enumerate(indices):
        check_forecast(index, [rank[number] for rank in ranks])


def check_forecast(index: int, measured: list[tuple[int, int]]) -> None:
    stage, name = PLANNED[index]
    module, precision = Large(), resolve_precision(name)
    optimizer = module.configure_optimizers()
    config = ZeROConfig.of(stage, sharding={"min_unit_numel": 0}, precision={"frozen": "nf4"})  # type: ignore[arg-type]
    with simulated(module, precision, (), torch.device("cpu")) as fakes:
        optimizers = [fakes.optimizer(optimizer)]
        forecast = Forecaster(
            module, optimizers, fakes=fakes, precision=precision, step=training_step(module, optimizers),
            batch=first_batch(global_batches(0, 2, STEPS)), run=Run(config=config, clips=True),
        ).forecast(Candidate(stage), Hardware(ranks=2, device="cpu"))  # type: ignore[arg-type]  # fmt: skip
    for peak, sent in measured:
        assert forecast.peak.device == pytest.approx(peak, rel=0.01)
        assert forecast.traffic.sent == sent
