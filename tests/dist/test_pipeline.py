"""Blocks partitioned over ranks, under real Trainers: the numbers, the logs and the files are those of one process."""

from __future__ import annotations

import json
import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from ls_strategy.config import nested
from ls_strategy.errors import ConfigError, LSError, PlanError
from ls_strategy.extras.callbacks import PipelineTimeline
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist.parallel_runs import (
    BATCH,
    Outcome,
    Run,
    assert_as_plain,
    assert_resumed,
    assert_same_bits,
    plain,
    start,
    unequal,
)
from tests.dist.ranks import on_ranks, trainer_of
from tests.dist.trusted import once
from tests.limits import wall
from tests.marks import few_or_all

pytestmark = pytest.mark.dist

STEPS = 10
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipe_v")
FOUR = {"num_layers": 4}


def trainer_options(accumulate: int, clip: float) -> dict[str, Any]:
    return {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip or None}


def compare(
    world: int,
    choices: list[dict[str, Any]],
    accumulate: int = 1,
    clip: float = 0.0,
    batch: int = BATCH,
    steps: int = STEPS,
    **shape: Any,
) -> list[Outcome]:
    options = trainer_options(accumulate, clip)
    runs = [Run({"parallel.pipeline.size": 2, **c}, shape, steps=steps, batch=batch, trainer=options) for c in choices]
    return assert_as_plain(world, runs, timeout_s=170, losses=1e-6, norms=1e-6)


@pytest.mark.parametrize("schedules", few_or_all(("1f1b", "dualpipe_v"), SCHEDULES))
def test_every_schedule(schedules):
    """With clipping, tied embeddings, and gradients added up over two batches. `test_pipeline_runner` has them too."""
    choices = [
        {"stage": 2, "parallel.pipeline.micro_batches": 4, "parallel.pipeline.schedule": schedule}
        for schedule in schedules
    ]
    compare(2, choices, 2, 0.5, steps=STEPS if schedules is SCHEDULES else 4, **FOUR)


@pytest.mark.wide
def test_every_stage_with_two_replicas():
    found = compare(4, [{"stage": stage, "parallel.pipeline.micro_batches": 2} for stage in (0, 1, 2, 3)])
    assert_same_bits(found)  # of the stages


@pytest.mark.slow
def test_four_stages_and_two_chunks_with_replicas():
    compare(4, [{"stage": 1, "parallel.pipeline.size": 4, "parallel.pipeline.micro_batches": 4}], **FOUR)
    several = {"parallel.pipeline.schedule": "interleaved_1f1b", "parallel.pipeline.micro_batches": 2}
    compare(4, [{"stage": stage, **several} for stage in (2, 3)], 2, **FOUR)


@pytest.mark.wide
def test_with_tensor_parallel_layers_recompute_and_offload():
    tensor = {"parallel.tensor.size": 2}
    choices: list[dict[str, Any]] = [
        {"stage": 1, **tensor},
        {"stage": 3, **tensor},
        {"stage": 3, "activations.checkpointing": "full", "parallel.pipeline.schedule": "zero_bubble"},
        {"stage": 2, "parallel.pipeline.micro_batch_size": 1},
        {"stage": 3, "offload.optimizer": "cpu", "offload.parameters": "cpu", "activations.offload": "cpu"},
    ]
    compare(4, choices, tied_embeddings=False)


@pytest.mark.wide
def test_losses_of_experts_on_earlier_stages():
    """Trusted run: as many small batches, whose gradients add up, since a loss of balance is one of a micro-batch."""
    parts, steps = 4, 4
    experts = {
        "num_experts": 4,
        "k": 2,
        "balance_loss": 0.5,
        "z_loss": 0.1,
        "drop_tokens": False,
        "second_expert_sampling": False,
    }
    one = Run(shape=FOUR, experts=experts, steps=parts * steps, batch=1, trainer=trainer_options(parts, 0.5))
    expected = plain(one)
    expected.losses = torch.tensor(expected.losses).view(-1, parts).sum(1).tolist()  # of each the part
    shared = {"stage": 2, "parallel.pipeline.size": 2, "parallel.pipeline.micro_batches": parts}
    choices = (
        {"parallel.pipeline.schedule": "1f1b", "activations.checkpointing": "full"},
        {"parallel.pipeline.schedule": "interleaved_1f1b"},
        {"parallel.pipeline.schedule": "zbv"},
    )
    runs = [Run({**shared, **choice}, FOUR, experts, steps, trainer=trainer_options(1, 0.5)) for choice in choices]
    assert not unequal(expected, runs, start(2, runs))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("world", "size"), [(2, 2), (4, 2), (4, 4), (8, 4)])
def test_all_combinations_with_a_pipeline(world, size, schedule, accumulate):
    """Pipelines of 2 and 4, 1 and 2 replicas, stages 1 to 3, every schedule, accumulation 1 and 2."""
    shared = {
        "parallel.pipeline.size": size,
        "parallel.pipeline.schedule": schedule,
        "parallel.pipeline.micro_batches": 8,
    }
    layers = {"num_layers": 2 * size}
    compare(world, [{"stage": stage, **shared} for stage in (1, 2, 3)], accumulate, 0.5, 16, **layers)


@pytest.mark.wide
def test_a_checkpoint_goes_on_with_any_pipeline(tmp_path):
    steps, half = 8, 4
    uninterrupted = plain(Run(steps=steps))
    two = {"stage": 2, "parallel.pipeline.size": 2}
    sources = {"pp2": (2, two), "dp2": (2, {"stage": 3})}
    path = {name: str(tmp_path / f"{name}.ckpt") for name in sources}
    for name, (world, options) in sources.items():
        start(world, [Run(options, steps=steps, save=(half, path[name]))])
    layouts: dict[int, list[dict[str, Any]]] = {
        2: [two, {"stage": 1}, {"stage": 1, "parallel.tensor.size": 2}],
        4: [{**two, "stage": 3}, {**two, "parallel.tensor.size": 2}],
    }
    for world, choices in layouts.items():
        runs = [Run(options, steps=steps, resume=path["pp2"]) for options in choices]
        runs += [Run({**two, "stage": 1}, steps=steps, resume=path["dp2"])]
        assert_resumed(world, runs, uninterrupted, half)


# --- what Lightning sees ---------------------------------------------------------------------------------------------


class AlexNetLike(pl.LightningModule):
    """A plain Sequential, a metric, and everything that is logged."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 8, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(8 * 4 * 4, 16),
            nn.ReLU(),
            nn.Linear(16, 3),
        )
        self.accuracy = MeanMetric()
        self.fail_at = fail_at

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.net(x)
        loss = functional.cross_entropy(logits, y)
        if self.fail_at == batch_idx:
            raise ValueError("this stage cannot go on")
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("samples", float(len(x)), reduce_fx="sum", on_step=False, on_epoch=True)
        value = loss.detach().clone()
        self.log("before", value)
        value.zero_()  # what was logged stays
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.net(x)
        self.accuracy.update((logits.argmax(1) == y).float())
        self.log_dict(
            {"val_loss": functional.cross_entropy(logits, y), "val_accuracy": self.accuracy}, batch_size=len(x)
        )

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=5e-3, eps=1e-4, fused=True)


def images(numel: int = 40, batch_size: int = 8) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(numel, 1, 8, 8, generator=generator)
    return DataLoader(TensorDataset(x, (x.mean((1, 2, 3)) * 9).long().clamp(-1, 1) + 1), batch_size=batch_size)


class Seen(Callback):
    """What callbacks get to see."""

    def __init__(self) -> None:
        self.outputs: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.outputs.append(outputs["loss"].item())


def observe(rank: int, world_size: int, folder: str, pipelined: bool) -> dict[str, Any]:
    checkpoint = ModelCheckpoint(folder, monitor="val_loss", filename="best")
    stopping = EarlyStopping("val_loss", patience=1, min_delta=10.0)
    seen = Seen()
    options = {"parallel.pipeline.size": 2, "parallel.pipeline.micro_batches": 4} if pipelined else {}
    trainer = trainer_of(
        ZeROStrategy(1, **nested({"sharding.min_unit_numel": 0, **options})) if pipelined else "auto",  # type: ignore[arg-type]
        max_epochs=5,
        callbacks=[checkpoint, stopping, seen],
        enable_checkpointing=True,
        use_distributed_sampler=False,
        num_sanity_val_steps=2,
    )
    module = AlexNetLike()
    trainer.fit(module, images(44), images(20))
    metrics = {k: v.item() for k, v in trainer.callback_metrics.items()}
    predicted = trainer.predict(module, images(12))
    return {
        "metrics": metrics,
        "outputs": seen.outputs,
        "best": checkpoint.best_model_score.item(),  # type: ignore[union-attr]
        "stopped": (stopping.stopped_epoch, trainer.current_epoch, trainer.global_step),
        "predicted": [p.tolist() for p in predicted],
    }


@pytest.mark.wide
def test_callbacks_and_logs_are_the_same_on_every_stage_as_on_one_process(tmp_path):
    """Batches of 8, 8, 8, 8, 8 and 4 samples in 4 micro-batches; a pipeline of a plain Sequential."""
    expected = spawn(observe, 1, str(tmp_path / "one"), False, init_process_group=False)[0]
    found = spawn(observe, 2, str(tmp_path / "two"), True, init_process_group=False)
    for key, value in found[0].items():
        assert found[1][key] == value, key
    assert found[0]["stopped"] == expected["stopped"]
    assert found[0]["metrics"].keys() == expected["metrics"].keys()
    for key, value in expected["metrics"].items():
        factor = 4 if key == "samples" else 1
        assert found[0]["metrics"][key] == pytest.approx(value, rel=2e-6 * factor), key
    assert found[0]["outputs"] == pytest.approx(expected["outputs"], rel=2e-6)
    assert found[0]["best"] == pytest.approx(expected["best"], rel=2e-6)
    for ours, theirs in zip(found[0]["predicted"], expected["predicted"], strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=1e-5)


class ReadsBeforeTheBlocks(AlexNetLike):
    """Reads a value that only the first stage has."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__(fail_at)
        blocks = self._modules.pop("net")
        self.first = nn.Conv2d(1, 1, 1)
        self.net = blocks  # what is registered before the blocks is on the first stage

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.first(batch[0])
        self.brightness = x.sum().item()
        return super().training_step((x, batch[1]), batch_idx)


def fail(rank: int, world_size: int, module: type[AlexNetLike]) -> tuple[str, float]:
    trainer = trainer_of(ZeROStrategy(1, parallel={"pipeline": {"size": 2, "micro_batches": 2}}), max_epochs=1)
    started = time.monotonic()
    try:
        trainer.fit(module(fail_at=2), images())
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    return "", 0.0


@pytest.mark.wide
def test_a_stage_that_raises_ends_the_run_on_all():
    (first, seconds), (last, _) = spawn(fail, 2, AlexNetLike, init_process_group=False, timeout_s=60)
    assert last == "ValueError: this stage cannot go on"
    assert first.startswith("RankFailedError")
    assert "this stage cannot go on" in first
    assert seconds < wall(30)


@pytest.mark.wide
def test_a_stage_that_refuses_the_step_ends_the_run_on_all():
    (first, seconds), (last, _) = spawn(fail, 2, ReadsBeforeTheBlocks, init_process_group=False, timeout_s=60)
    assert last.startswith("PlanError: ")
    assert first == f"RankFailedError: this rank stops because another one failed: rank 1: {last}"
    assert seconds < wall(15)


class Tied(pl.LightningModule):
    """Tied over the stages, without a hook that would keep updates from beginning early, and without ``batch_idx``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 8)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight
        self.losses: list[float] = []

    def training_step(self, batch: Any) -> Tensor:
        x = self.table(batch[0])
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4, fused=True)


def words() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, 11, (48,), generator=generator)
    return DataLoader(TensorDataset(text, text.roll(1)), batch_size=8)


def train_tied(rank: int, world_size: int, options: dict[str, Any] | None, precision: str) -> dict[str, Tensor]:
    strategy: Any = "auto" if options is None else ZeROStrategy(**nested({"sharding.min_unit_numel": 0, **options}))  # type: ignore[arg-type]
    trainer = trainer_of(
        strategy, max_epochs=2, use_distributed_sampler=False, accumulate_grad_batches=2, precision=precision
    )
    trainer.fit(Tied(), words())
    return {k: v.clone() for k, v in trainer.strategy.lightning_module_state_dict().items()}


@pytest.mark.wide
def test_tied_weights_with_offloaded_updates_in_two_precisions():
    expected = once(train_tied, 1, None, "32-true")[0]
    pipeline = {"parallel.pipeline.size": 2, "parallel.pipeline.micro_batches": 4}
    for stage in (1, 3):
        options = {"stage": stage, **pipeline, "offload.optimizer": "cpu"}
        found = spawn(train_tied, 2, options, "32-true", init_process_group=False)[0]
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=2e-6, atol=2e-6)
    # In 16 bit the masters are within what 16-bit data parallelism leaves: its own distance from fp32, twice.
    flat = spawn(train_tied, 1, {"stage": 1}, "bf16-true", init_process_group=False)[0]
    found = spawn(train_tied, 2, {"stage": 1, **pipeline}, "bf16-true", init_process_group=False)[0]
    for key, value in expected.items():
        assert (found[key] - value).abs().max() <= 2 * (flat[key] - value).abs().max() + 1e-6, key


COMPILED: list[int] = []
"""Nodes of every graph that was compiled in this process."""


def counting(graph: Any, inputs: Any) -> Any:
    """A backend of ``torch.compile`` that changes nothing."""
    COMPILED.append(len(graph.graph.nodes))
    return graph.forward


class CompiledParts(Tied):
    """Blocks and what lies around them compiled, in place or in wrappers."""

    def __init__(self, wrapped: bool) -> None:
        super().__init__()
        parts: list[Any] = [self.table, *self.blocks, self.head]
        if wrapped:
            parts = [torch.compile(part, backend=counting) for part in parts]
            self.table, self.blocks, self.head = parts[0], nn.Sequential(*parts[1:-1]), parts[-1]
        for part in () if wrapped else parts:
            part.compile(backend=counting)


def train_compiled(rank: int, world_size: int, how: str) -> tuple[dict[str, Tensor], int]:
    COMPILED.clear()
    options: Any = {"sharding": {"min_unit_numel": 0}, "parallel": {"pipeline": {"size": 2, "micro_batches": 4}}}
    if how == "option":
        torch._dynamo.register_backend(counting, name="counting")
        options["compile"] = {"regions": "blocks", "backend": "counting"}
        options["sharding"]["block_classes"] = ["Linear"]
    strategy = ZeROStrategy(1, **options)
    trainer = trainer_of(strategy, max_epochs=2, use_distributed_sampler=False, accumulate_grad_batches=2)
    trainer.fit(Tied() if how == "option" else CompiledParts(how == "wrapped"), words())
    weights = trainer.strategy.lightning_module_state_dict()
    return {k.replace("_orig_mod.", ""): v.clone() for k, v in weights.items()}, len(COMPILED)


@pytest.mark.wide
@pytest.mark.parametrize("how", [pytest.param("in place", marks=pytest.mark.slow), "wrapped", "option"])
def test_compiled_blocks_and_layers_around_them(how):
    expected = once(train_tied, 1, None, "32-true")[0]
    found = spawn(train_compiled, 2, how, init_process_group=False)
    for weights, compiled in found:
        # A block, and what comes before or after all blocks. The latter is a module of torch's own with a hook, whose
        # frame torch 2.11 does not compile after it has left the hook out. With the option it is linear layers, of
        # which torch 2.11 compiles none by themselves.
        assert compiled >= (2 if how != "option" else 1) - torch.__version__.startswith("2.11.")
        for key, value in expected.items() if weights else ():
            torch.testing.assert_close(weights[key], value, rtol=2e-6, atol=2e-6)
    assert found[0][0].keys() == expected.keys()


class Manual(AlexNetLike):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class CompiledWhole(AlexNetLike):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.compile(self.net, backend=counting)  # type: ignore[assignment]


class CompiledStep(AlexNetLike):
    def __init__(self) -> None:
        super().__init__()
        self.training_step = torch.compile(self.training_step, backend=counting)  # type: ignore[method-assign]


class Short(AlexNetLike):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten())


@on_ranks(2)
def test_refusals(rank, world_size):
    size = {"parallel.pipeline.size": 2}
    cases: list[tuple[type[LSError], str, type[AlexNetLike], dict[str, Any]]] = [
        (PlanError, "does not divide the 2 ranks", AlexNetLike, {"parallel.pipeline.size": 3}),
        (PlanError, "no ModuleList or Sequential of 2 modules", Short, size),
        (PlanError, "automatic_optimization=True", Manual, size),
        (
            PlanError,
            "needs 4 or more",
            AlexNetLike,
            {**size, "parallel.pipeline.micro_batches": 3, "parallel.pipeline.schedule": "dualpipe_v"},
        ),
    ]
    for error, pattern, module, options in cases:
        with pytest.raises(error, match=pattern):
            trainer_of(ZeROStrategy(1, **nested(options)), max_epochs=1).fit(module(), images())
    for pattern, options in {
        "consolidate": {**size, "checkpoint.format": "file"},
        "Got parallel.pipeline.micro_batches=0": {**size, "parallel.pipeline.micro_batches": 0},
        "parallel.pipeline.partition='time'": {**size, "parallel.pipeline.partition": "time"},
        "accumulate_grad_batches": {"parallel.pipeline.size": 1, "parallel.pipeline.micro_batch_size": 4},
        "Choose one of micro_batches and micro_batch_size": {
            **size,
            "parallel.pipeline.micro_batches": 2,
            "parallel.pipeline.micro_batch_size": 3,
        },
        "Got parallel.pipeline.micro_batch_size=0": {**size, "parallel.pipeline.micro_batch_size": 0},
    }.items():
        with pytest.raises(ConfigError, match=pattern):
            ZeROStrategy(1, **nested(options))


@pytest.mark.wide
@on_ranks(2)
def test_what_is_compiled_as_a_whole_is_refused(rank, world_size):
    size = {"parallel.pipeline.size": 2}
    for pattern, module in (
        (r"'net' is compiled together with its blocks.*block.compile\(\)", CompiledWhole),
        (r"training_step is compiled.*block.compile\(\)", CompiledStep),
    ):
        with pytest.raises(PlanError, match=pattern):
            trainer_of(ZeROStrategy(1, **nested(size)), max_epochs=1).fit(module(), images())
    compiled: Any = torch.compile(AlexNetLike(), backend=counting)
    with pytest.raises(PlanError, match="forward is compiled"):
        trainer_of(ZeROStrategy(1, **nested(size)), max_epochs=1).fit(compiled, images())


class Measured(AlexNetLike):
    """Early layers have most operations, late ones most parameters. Its steps do more than compute."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        loss = super().training_step(batch, batch_idx)
        self.mean(loss.detach())
        return loss


class Samples(torch.utils.data.Dataset):
    """Samples that are changed at random; a quarter of the size on every second replica."""

    def __init__(self, small: bool) -> None:
        self.side = 4 if small else 8

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.rand(1, self.side, self.side), index % 3


class OnMaps(Measured):
    """Of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*self.net[:5], nn.AdaptiveAvgPool2d(4), *self.net[5:])


def balance(rank: int, world_size: int, methods: list[str]) -> list[tuple[Any, list[int], list[float]]]:
    found: list[Any] = []
    for method in methods:
        strategy = ZeROStrategy(1, parallel={"pipeline": {"size": 2, "micro_batches": 4, "partition": method}})
        module, seen = OnMaps(), Seen()
        trainer = trainer_of(strategy, max_epochs=1, callbacks=[seen])
        trainer.fit(module, DataLoader(Samples(rank % 2 == 1), batch_size=8, shuffle=True))
        assert strategy.parallel.pipeline is not None
        cut = strategy.parallel.pipeline.cut
        assert method in cut.table()
        found.append((cut.bounds, [module.steps, module.mean.update_count], seen.outputs))
    return found


@pytest.mark.wide
def test_operations_are_balanced_the_same_on_all_ranks_and_without_a_trace():
    """The batches of one replica have other shapes, for which the other division would be best."""
    found = spawn(balance, 4, ["flops", "parameters"], init_process_group=False)
    for flops, parameters in found:
        assert flops[0] == (0, 3, 10)
        assert parameters[0] == (0, 7, 10)
        assert flops[1] == parameters[1] == [4, 4]  # one batch of 8 samples on each of two replicas
        assert flops[2] == pytest.approx(parameters[2], rel=1e-6)  # the same random numbers


@on_ranks(2)
def test_a_figure_and_a_trace_of_the_stages(rank, world_size, tmp_path):
    logger = TensorBoardLogger(str(tmp_path), name="run", version="")
    strategy = ZeROStrategy(0, parallel={"pipeline": {"size": 2, "micro_batches": 4}})
    callbacks = [PipelineTimeline(every_n_steps=3)]
    trainer = trainer_of(strategy, max_epochs=1, logger=logger, callbacks=callbacks, log_every_n_steps=1)
    trainer.fit(AlexNetLike(), images())
    assert trainer.strategy.parallel.pipeline.recorder.take() == []  # nothing is noted between pictures
    if rank == 0:
        logger.experiment.flush()
        events = EventAccumulator(str(tmp_path / "run"), size_guidance={"images": 0}).Reload()
        assert [e.step for e in events.Images("zero_pipeline/timeline")] == [2, 5]
        assert all(0 < e.value < 1 for e in events.Scalars("zero_pipeline/bubble"))
        events = json.loads((tmp_path / "run" / "pipeline_step2.json").read_text())["traceEvents"]
        names = [e["name"] for e in events if e["ph"] == "X"]
        assert sorted(names) == sorted(f"{s}{kind}{m}" for s in range(2) for kind in "FB" for m in range(4))
    with pytest.raises(PlanError, match="without a pipeline"):
        trainer_of(ZeROStrategy(1), max_epochs=1, callbacks=callbacks).fit(AlexNetLike(), images())
