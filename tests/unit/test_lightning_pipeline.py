"""`Pipeline` on one rank: batches that are split, gradients of the full batch, and what the steps log."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from ls_strategy.config import ParallelConfig, PipelineConfig
from ls_strategy.distributed.comm import Comm
from ls_strategy.distributed.mesh import Mesh
from ls_strategy.errors import PlanError, StateError
from ls_strategy.lightning.pipeline import step as pipeline_file
from ls_strategy.lightning.pipeline.log import Logged
from ls_strategy.lightning.pipeline.step import Pipeline, refuse
from ls_strategy.moe.losses import LossKeeper
from ls_strategy.parallel.pipeline.partition import Tied
from ls_strategy.parallel.pipeline.shares import Shares

CPU = torch.device("cpu")
WIDTH = 3


class Module(pl.LightningModule):
    """Four blocks in double precision; keeps what reaches Lightning's `log`, and what each step saw."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(4))
        self.mean = MeanMetric()
        self.logged: dict[str, tuple[Any, dict[str, Any]]] = {}
        self.drawn: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:  # type: ignore[override]
        assert not args
        self.logged[name] = value, options

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.drawn.append(torch.rand(()).item())
        loss = functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, batch_size=len(batch[0]), prog_bar=True)
        self.log("samples", len(batch[0]), reduce_fx="sum")
        self.mean(batch[1])
        self.log("mean", self.mean)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        self.drawn.append(torch.rand(()).item())
        self.log("rows", float(len(batch[0])))
        out = self(batch[0])
        return {"out": out, "loss": functional.mse_loss(out, batch[1])}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Engine:
    """Notes what the pipeline asks for. Gradients stay where autograd adds them up."""

    def __init__(self, *, scale: float | None = None, optimizers: int = 1) -> None:
        self.calls: list[Any] = []
        self.optimizers = [object()] * optimizers
        self.scaler = None if scale is None else SimpleNamespace(scale=scale)
        self.keeps_gradients = True

    def zero_grad(self, index: int) -> None:
        assert not self.keeps_gradients
        self.calls.append(("zero_grad", index))

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda **options: self.calls.append((name, *options.values()))


def trainer(*, batch_idx: int = 0, epoch: int = 0, accumulate: int = 1) -> Any:
    return SimpleNamespace(
        accumulate_grad_batches=accumulate,
        current_epoch=epoch,
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_idx=batch_idx)),
    )


def mesh_of(rank: int = 0, world_size: int = 1) -> Mesh:
    """Return a mesh whose pipeline says that it has other ranks, though nothing is sent."""
    mesh = Mesh.data_only(Comm(None, None))
    mesh.pipeline.rank, mesh.pipeline.world_size = rank, world_size
    return mesh


def make(module: Module, mesh: Mesh | None = None, *, on: Any = None, **options: Any) -> Pipeline:
    """Return the pipeline of ``module``. On one rank it has as many stages as the schedule has there."""
    config = ParallelConfig(pipeline=PipelineConfig(**{"size": 2, "schedule": "gpipe", **options}))
    module._trainer = on or trainer()
    return Pipeline(config, module, mesh or mesh_of(), CPU, recomputes=False)


def batch_of(samples: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(samples)
    x, y = torch.randn(2, samples, WIDTH, dtype=torch.float64, generator=rng)
    return x, y


def train(one: Pipeline, module: Module, batch: Any, engine: Any = None, *, last: bool = True) -> Tensor:
    recorded: Any = engine or Engine()
    return one.train(module, recorded, module.training_step, (batch, 0), last=last)


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


@pytest.fixture(autouse=True)
def same_random_numbers() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "stages"), [("gpipe", None), ("interleaved_1f1b", 2), ("zbv", None)])
def test_loss_and_gradients_of_unequal_micro_batches_are_those_of_the_batch(schedule: str, stages: int | None) -> None:
    """Trusted: one backward of the mean over the 7 samples."""
    module, plain = Module(), Module()
    one = make(module, schedule=schedule, stages_per_rank=stages, micro_batches=3)
    loss = train(one, module, batch_of(7))
    x, y = batch_of(7)
    expected = functional.mse_loss(plain(x), y)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)  # returned in fp32
    assert len(gradients(module)) == 8
    torch.testing.assert_close(gradients(module), gradients(plain))


def test_gradients_carry_the_loss_scale_and_the_share_of_the_accumulation() -> None:
    plain, scaled = Module(), Module()
    train(make(plain), plain, batch_of(4))
    loss = train(make(scaled, on=trainer(accumulate=2)), scaled, batch_of(4), Engine(scale=16.0))
    for mine, theirs in zip(gradients(scaled), gradients(plain), strict=True):
        assert torch.equal(mine, theirs * 8)
    assert loss.item() == pytest.approx(scaled.logged["loss"][0].item())  # neither of them is in the loss


@pytest.mark.parametrize(("batch_idx", "zeroed"), [(0, [0, 1]), (1, []), (2, [0, 1])])
def test_gradients_are_zeroed_before_the_first_batch_of_an_accumulation_and_kept_then(
    batch_idx: int, zeroed: list[int]
) -> None:
    module, engine = Module(), Engine(optimizers=2)
    train(make(module, on=trainer(batch_idx=batch_idx, accumulate=2)), module, batch_of(4), engine)
    assert [call[1] for call in engine.calls if call[0] == "zero_grad"] == zeroed
    assert engine.keeps_gradients


@pytest.mark.parametrize("last", [True, False])
def test_every_backward_is_between_begin_and_end_and_reduction_comes_at_the_end(last: bool) -> None:
    module, engine = Module(), Engine()
    train(make(module, schedule="zbv", micro_batches=2), module, batch_of(4), engine, last=last)
    backwards = [("begin_backward", False), ("end_backward",)] * 2 * 2 * 2  # stages, micro-batches, I and W
    assert engine.calls == [
        ("zero_grad", 0), ("begin_micro_batches",), *backwards, ("end_micro_batches", last),
    ]  # fmt: skip


@pytest.mark.parametrize(("last", "stages", "eager"), [(True, None, 1), (False, None, 0), (True, 2, 0)])
def test_gradients_of_a_single_stage_are_reduced_in_its_last_backward(
    last: bool, stages: int | None, eager: int
) -> None:
    module, engine = Module(), Engine()
    schedule = "gpipe" if stages is None else "interleaved_1f1b"
    train(make(module, schedule=schedule, stages_per_rank=stages), module, batch_of(4), engine, last=last)
    assert engine.calls.count(("begin_backward", True)) == eager
    if eager:
        assert engine.calls[-3:] == [("begin_backward", True), ("end_backward",), ("end_micro_batches", True)]


def test_the_loss_has_no_graph_and_can_go_backward() -> None:
    module = Module()
    loss = train(make(module), module, batch_of(4))
    before = [g.clone() for g in gradients(module)]
    loss.backward()  # Lightning's loop does
    assert all(map(torch.equal, gradients(module), before))


# --- micro-batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "options", "sizes"),
    [
        (8, {}, [2, 2, 2, 2]),
        (3, {}, [1, 1, 1]),
        (7, {"micro_batches": 3}, [3, 2, 2]),
        (7, {"micro_batch_size": 3}, [3, 2, 2]),
        (6, {"micro_batch_size": 3}, [3, 3]),
        (2, {"micro_batch_size": 3}, [2]),
    ],
    ids=str,
)
def test_micro_batches_have_sizes_as_equal_as_possible(samples: int, options: dict[str, Any], sizes: list[int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parts, found = make(Module(), **options)._split(batch_of(samples))
    assert found == sizes == [len(part[0]) for part in parts]
    assert torch.equal(torch.cat([part[1] for part in parts]), batch_of(samples)[1])


@pytest.mark.parametrize(
    ("options", "samples", "words"),
    [
        ({"micro_batches": 4}, 3, "only 3 samples: it is split into 3 micro-batches"),
        ({"schedule": "dualpipe_v"}, 1, "needs 2 micro-batches, but this batch of 1 samples has only 1: .* zbv"),
    ],
    ids=["than asked for", "than the schedule needs"],
)
def test_fewer_micro_batches_are_a_warning(options: dict[str, Any], samples: int, words: str) -> None:
    one = make(Module(), **options)
    with pytest.warns(UserWarning, match=words):
        assert one._split(batch_of(samples))[1] == [1] * samples


@pytest.mark.parametrize(
    ("batch", "words"), [({"n": torch.tensor(2)}, "no tensor with 1 rows"), ({"ids": ["a", "b"]}, "has no tensor.$")]
)
def test_a_batch_without_rows_is_refused(batch: Any, words: str) -> None:
    with pytest.raises(StateError, match=words):
        make(Module())._split(batch)


# --- random numbers ---------------------------------------------------------------------------------------------------


def drawn(*, stage: int | None = 0, micro_batch: int = 0, rank: int = 0, on: Any = None) -> float:
    """Return what a stage draws in training; every call starts from the same state of the generator."""
    torch.manual_seed(5)
    module = Module()
    one = make(module, on=on)
    one.mesh.pipeline.rank = rank
    with one.random.own_numbers(module.trainer):
        one.random.begin(micro_batch)
        if stage is not None:
            one.random.enter(stage)
        return torch.rand(()).item()


@pytest.mark.parametrize(
    ("other", "base", "equal"),
    [
        ({}, {}, True),
        ({"stage": None, "rank": 1}, {"stage": None}, True),
        ({"stage": 1}, {}, False),
        ({"stage": None}, {}, False),
        ({"micro_batch": 1}, {}, False),
        ({"on": trainer(batch_idx=1)}, {}, False),
        ({"on": trainer(epoch=1)}, {}, False),
    ],
    ids=["same place", "ranks before the blocks", "stage", "before the blocks", "micro-batch", "batch", "epoch"],
)
def test_the_same_numbers_are_drawn_at_the_same_place_only(
    other: dict[str, Any], base: dict[str, Any], equal: bool
) -> None:
    assert (drawn(**other) == drawn(**base)) is equal


def test_micro_batches_draw_different_numbers_and_leave_the_generator_alone() -> None:
    module = Module()
    one = make(module)
    before = torch.get_rng_state()
    train(one, module, batch_of(4))
    assert len(set(module.drawn)) == 4
    assert torch.equal(torch.get_rng_state(), before)


def test_every_batch_of_a_validation_draws_other_numbers_and_the_next_validation_the_same() -> None:
    module = Module()
    one = make(module)

    def validate() -> list[float]:
        module.drawn = []
        for _ in range(2):
            one.evaluate(module, module.validation_step, (batch_of(4), 0))
        return list(module.drawn)

    first = validate()
    assert len(set(first)) == 8
    train(one, module, batch_of(4))
    assert validate() == first


def test_an_error_restores_the_generator() -> None:
    module = Module()
    one = make(module)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="mine"), one.random.own_numbers(module.trainer):
        raise ValueError("mine")
    assert torch.equal(torch.get_rng_state(), before)


# --- evaluation -------------------------------------------------------------------------------------------------------


def test_an_evaluation_returns_what_one_step_would() -> None:
    module = Module()
    found = make(module, micro_batches=3).evaluate(module, module.validation_step, (batch_of(7), 0))
    expected = Module().validation_step(batch_of(7), 0)
    torch.testing.assert_close(found, {k: v.detach() for k, v in expected.items()})
    assert not any(t.requires_grad for t in found.values())


# --- logs -------------------------------------------------------------------------------------------------------------


def test_what_steps_log_is_logged_once_for_the_batch() -> None:
    module, plain = Module(), Module()
    train(make(module, micro_batches=3), module, batch_of(7))
    loss = plain.training_step(batch_of(7), 0)
    value, options = module.logged["loss"]
    assert value.item() == pytest.approx(loss.item(), rel=1e-6)
    assert options == {"batch_size": 7, "prog_bar": True}
    assert module.logged["samples"] == (torch.tensor(7.0), {"reduce_fx": "sum"})
    assert module.logged["mean"] == (module.mean, {})
    assert module.mean.compute().item() == pytest.approx(plain.mean.compute().item(), rel=1e-6)


@pytest.fixture
def module() -> Module:
    return Module()


def recorded(module: Module, *calls: Callable[[], Any], sizes: tuple[int, ...] = (3, 1)) -> Any:
    logged = Logged(module)
    with logged.recording():
        for call in calls:
            call()
    return logged.summary(Shares(sizes))


def test_a_mean_is_weighted_by_the_samples(module: Module) -> None:
    values, *_ = recorded(module, lambda: module.log("a", 1.0), lambda: module.log("a", 3.0))
    assert values == [("a", ("value", torch.tensor(1.5)), {})]


def test_options_are_those_of_every_value_and_in_lightnings_order_too(module: Module) -> None:
    values, *_ = recorded(
        module,
        lambda: module.log("a", 1.0, True),
        lambda: module.log_dict(dictionary={"b": 1.0}),
        lambda: module.log_dict({"c": 1.0, "d": 2.0}, True, False),
        lambda: module.log_dict({"e": 1.0, "f": 2.0}, on_step=True),
        sizes=(4,),
    )
    assert [(name, options) for name, _, options in values] == [
        ("a", {"prog_bar": True}),
        ("b", {}),
        *((name, {"prog_bar": True, "logger": False}) for name in "cd"),
        *((name, {"on_step": True}) for name in "ef"),
    ]


def test_logging_is_lightnings_again_after_an_error(module: Module) -> None:
    with pytest.raises(ValueError, match="mine"), Logged(module).recording():
        raise ValueError("mine")
    module.log("a", 1.0)
    assert module.logged == {"a": (1.0, {})}
    assert not {"log", "log_dict"} & vars(module).keys()


def test_only_metrics_that_the_steps_updated_are_sent(module: Module) -> None:
    module.other = MeanMetric()
    module.other(torch.ones(2))
    logged = Logged(module)
    module.mean(torch.ones(3))
    _, states, _ = logged.summary(Shares([3]))
    assert states.keys() == {"mean"}


def test_another_ranks_metric_is_taken_over(module: Module) -> None:
    theirs = Module()
    far = Logged(theirs)
    with far.recording():
        theirs.mean(torch.tensor([2.0, 4.0]))
        theirs.log("mean", theirs.mean)
    Logged(module).replay(far.summary(Shares([2])))
    assert module.logged["mean"][0] is module.mean
    assert module.mean.compute() == 3.0
    assert module.mean.update_count == 1


# --- partition --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_keeps_its_blocks_and_names_those_of_others(rank: int) -> None:
    module = Module()
    one = make(module, mesh_of(rank, 2))
    assert one.is_last == (rank == 1)
    optimizer = torch.optim.SGD([{"params": [module.blocks[i].weight]} for i in (0, 3)])  # type: ignore[list-item]
    share = one.share(module, [optimizer])
    blocks = tuple(f"blocks.{i}." for i in range(4))
    mine, others = (blocks[:2], blocks[2:]) if rank == 0 else (blocks[2:], blocks[:2])
    assert (share.blocks, share.all_blocks) == (mine, blocks)
    assert share.absent == {id(p) for name, p in module.named_parameters() if name.startswith(others)}
    assert [len(group["params"]) for group in optimizer.param_groups] == [1 - rank, rank]
    assert share.group_names == [[["blocks.0.weight"], ["blocks.3.weight"]]]
    assert share.tied == share.replicas == frozenset()


@pytest.mark.parametrize(("rank", "replica"), [(0, False), (1, True)])
def test_the_first_rank_counts_a_tied_parameter(rank: int, replica: bool) -> None:
    module = Module()
    one = make(module)
    one.mesh.pipeline.rank = rank
    one.cut = SimpleNamespace(  # type: ignore[assignment]
        tied=[Tied(("blocks.0.weight",), (0, 1), (0, 1)), Tied(("blocks.1.weight",), (0, 1), (0,))],
        names_of=lambda _: frozenset(name for name, _ in module.named_parameters()),
        rank_of=(), blocks=(), bounds=(),
    )  # fmt: skip
    share = one.share(module, [])
    tied = {id(module.blocks[0].weight)}
    assert share.tied == tied
    assert share.replicas == (tied if replica else set())


def test_parameters_tied_over_different_stages_are_refused() -> None:
    one = make(Module())
    tied = [Tied(("a",), (0, 1), (0, 1)), Tied(("b",), (0, 2), (0, 2))]
    one.cut = SimpleNamespace(tied=tied)  # type: ignore[assignment]
    with pytest.raises(PlanError, match=r"different sets of stages: \[\(0, 1\), \(0, 2\)\]"):
        one._make_tied_groups()


def test_a_batch_norm_is_a_warning() -> None:
    module = Module()
    module.norm = nn.BatchNorm1d(WIDTH)
    with pytest.warns(UserWarning, match="norm and others are batch norms: in a pipeline they see one micro-batch"):
        make(module)


# --- a dry run --------------------------------------------------------------------------------------------------------


class Narrows(Module):
    """The first block has more operations than all others: its input has many rows per sample."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x[:, None].expand(-1, 64, -1)).mean(1)
        for block in self.blocks[1:]:  # type: ignore[union-attr, index]
            x = torch.tanh(block(x))
        return x


def fitting() -> Any:
    made = trainer()
    made.state = SimpleNamespace(fn=TrainerFn.FITTING)
    made.strategy = SimpleNamespace(root_device=CPU, lightning_module=None)
    return made


def test_operations_are_counted_on_a_copy_without_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(TensorDataset(*batch_of(8)), batch_size=8, shuffle=True)
    monkeypatch.setattr(pipeline_file, "batches_of", lambda _: loader)
    module, before = Narrows(), torch.get_rng_state()
    counted = make(module, mesh_of(0, 2), on=fitting(), partition="flops")
    assert counted.cut.bounds == (0, 1, 4)
    assert make(Narrows(), mesh_of(0, 2), on=fitting()).cut.bounds == (0, 2, 4)
    assert (module.drawn, module.logged, module.mean.update_count) == ([], {}, 0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_dry_run_that_fails_is_refused_everywhere(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def observed(*_: Any) -> None:
        torch.rand(1)
        if where == "here":
            raise ValueError("mine")

    monkeypatch.setattr(Pipeline, "_observed", observed)
    mesh, before = mesh_of(), torch.get_rng_state()
    if where == "elsewhere":
        monkeypatch.setattr(mesh.world, "exchange_objects", lambda mine: [mine, "ValueError: theirs"])
    words = "mine" if where == "here" else "theirs Set partition='parameters'"
    with pytest.raises(PlanError, match=f"failed: ValueError: {words}"):
        make(Module(), mesh, partition="flops")
    assert torch.equal(torch.get_rng_state(), before)


# --- losses of experts ------------------------------------------------------------------------------------------------


class Keeper(nn.Module, LossKeeper):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        LossKeeper.__init__(self)


def test_losses_of_experts_are_summed_and_left_for_the_last_stage() -> None:
    layers = nn.ModuleList([Keeper(), Keeper()])
    side = pipeline_file._side_loss(layers)
    assert side.give() is None
    for factor, layer in enumerate(layers, 1):
        layer.leave(torch.tensor(1.0 * factor))  # type: ignore[operator]
        layer.leave(torch.tensor(10.0 * factor))  # type: ignore[operator]
    assert side.give() == torch.tensor(33.0)
    assert side.give() is None
    side.receive(None)
    side.receive(torch.tensor(5.0))
    assert [loss for layer in layers for loss in layer.take()] == [torch.tensor(5.0)]  # type: ignore[operator]


# --- a recording ------------------------------------------------------------------------------------------------------


def test_a_recording_has_every_action_and_is_taken_once() -> None:
    module = Module()
    one = make(module, micro_batches=2)
    one.record(on=True)
    train(one, module, batch_of(4))
    one.record(on=False)
    train(one, module, batch_of(4))
    (spans,) = one.spans()
    assert [str(action) for action, _, _ in spans] == ["0F0", "0F1", "0B0", "0B1"]
    assert one.spans() == [[]]


# --- refusals ---------------------------------------------------------------------------------------------------------


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (Manual, {}, "automatic_optimization=True, or parallel.pipeline=1"),
        (Module, {"pipeline": {"size": 2, "schedule": "dualpipe_v", "micro_batches": 3}}, "needs 4 or more"),
    ],
    ids=["manual", "micro_batches"],
)
def test_what_a_pipeline_cannot_do_is_refused(kind: type[Module], options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        refuse(kind(), ParallelConfig(**{"pipeline": 2, **options}))


@pytest.mark.parametrize("name", ["forward", "training_step", "validation_step", "test_step", "predict_step"])
def test_a_compiled_step_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_file, "is_compiled_function", lambda function: function.__name__ == name)
    with pytest.raises(PlanError, match=rf"^{name} is compiled .* Compile the blocks instead"):
        refuse(Module(), ParallelConfig(pipeline=2))


def test_launches_that_block_are_refused_where_they_would_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ParallelConfig(pipeline=2)
    refuse(Module(), config, torch.device("cuda"))
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    refuse(Module(), config, torch.device("cpu"))
    with pytest.raises(PlanError, match=r"all ranks would wait for ever\. Unset it"):
        refuse(Module(), config, torch.device("cuda"))


@pytest.mark.parametrize("options", [{}, {"schedule": "dualpipe_v", "micro_batches": 4}, {"micro_batches": 1}], ids=str)
def test_what_a_pipeline_can_do_is_not_refused(options: dict[str, Any]) -> None:
    refuse(Module(), ParallelConfig(pipeline=PipelineConfig(size=2, **options)))
