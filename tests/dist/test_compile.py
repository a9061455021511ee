"""``torch.compile``: the numbers of plain code, and the graphs of plain code wherever parameters stay in memory.

Backends that compile nothing: ``Graphs`` runs what dynamo has captured, ``Traced`` what autograd makes of it.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from ls_strategy.config import nested
from ls_strategy.lightning.strategy import ZeROStrategy
from tests.dist import ranks
from tests.dist.ranks import OPTIONS, Net, assert_close, fit, on_ranks, weights

pytestmark = pytest.mark.own_ranks  # dynamo replaces functions of torch

WITHOUT_BLOCKS = [] if torch.__version__.startswith("2.11.") else [1]
"""Graphs of the layers before or after blocks at stage 3: torch 2.11 compiles no module of torch's own with a hook."""

BLOCKS = 10
"""More than dynamo's limit of recompilations, 8: if blocks did not share a graph, it would give up."""


class Graphs:
    """A backend that counts the operations of every graph, and runs them one by one."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.sizes.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward


class Traced(Graphs):
    """The same with a backward that is traced, as it is for every real backend."""

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        super().__call__(graph, inputs)
        return aot_eager(graph, inputs)


class Plain(Net):
    def __init__(self, backend: Graphs | None = None) -> None:
        self.backend = backend or Graphs()
        super().__init__()

    def build(self) -> None:
        super().build()
        self.blocks = torch.nn.ModuleList(type(self.blocks[0])() for _ in range(BLOCKS))
        self.net = Stack(self.first, self.blocks, self.last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)  # type: ignore[no-any-return]


class Stack(torch.nn.Module):
    def __init__(self, first: torch.nn.Module, blocks: torch.nn.ModuleList, last: torch.nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.last = first, blocks, last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]


class BlocksInPlace(Plain):
    """``block.compile()`` keeps the module."""

    def build(self) -> None:
        super().build()
        for block in self.blocks:
            block.compile(backend=self.backend, fullgraph=True)


class BlocksInWrappers(Plain):
    """``torch.compile(block)`` is a module around the module."""

    def build(self) -> None:
        super().build()
        self.blocks = torch.nn.ModuleList(torch.compile(b, backend=self.backend, fullgraph=True) for b in self.blocks)
        self.net = Stack(self.first, self.blocks, self.last)


class Whole(Plain):
    def build(self) -> None:
        super().build()
        self.net.compile(backend=self.backend)


class WholeInOneGraph(Plain):
    def build(self) -> None:
        super().build()
        self.net.compile(backend=self.backend, fullgraph=True)


class Function(Plain):
    def build(self) -> None:
        super().build()
        self.run = torch.compile(lambda x: self.net(x), backend=self.backend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)  # type: ignore[no-any-return]


def trained(options: Any, module: Net, **trainer: Any) -> Net:
    torch._dynamo.reset()
    fit(ZeROStrategy(**nested(options)), module, **trainer)
    return module


def assert_equal(actual: Net, expected: Net, what: str) -> None:
    assert actual.losses == expected.losses, what
    values = {name.replace("_orig_mod.", ""): value for name, value in weights(actual).items()}
    ranks.assert_equal(values, weights(expected), what)


def assert_graphs(stage: int, made: type[Plain], sizes: list[int]) -> None:
    options = {"stage": stage, "sharding.min_unit_numel": 0}
    plain, module = trained(options, Plain()), made()
    assert_equal(trained(options, module), plain, f"stage {stage}, {made.__name__}")
    assert module.backend.sizes == sizes, module.backend.sizes
    # A graph reads weights that the step before has sent, and nothing inside of it waits for them.
    assert not plain.trainer.strategy.engine.gatherer._waits_before_steps
    assert module.trainer.strategy.engine.gatherer._waits_before_steps == (
        made in (Whole, WholeInOneGraph, Function) and stage < 3
    )


@on_ranks(2, timeout_s=120)
def test_graphs_are_those_of_plain_code(rank: int, world_size: int) -> None:
    """Below stage 3 a model is one graph; blocks are one graph for all of them at every stage, without a break."""
    assert_graphs(2, Whole, [5 * BLOCKS + 2])
    assert_graphs(3, Whole, [*WITHOUT_BLOCKS, 5, *WITHOUT_BLOCKS])


@pytest.mark.wide
@pytest.mark.parametrize("made", [BlocksInPlace, BlocksInWrappers, Function])
@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2, timeout_s=120)
def test_graphs_of_other_habits_are_those_of_plain_code(
    rank: int, world_size: int, stage: int, made: type[Plain]
) -> None:
    blocks, between = made in (BlocksInPlace, BlocksInWrappers), [*WITHOUT_BLOCKS, 5, *WITHOUT_BLOCKS]
    assert_graphs(stage, made, [5] if blocks else [5 * BLOCKS + 2] if stage < 3 else between)


@pytest.mark.wide
@on_ranks(2, timeout_s=120)
def test_a_model_in_one_graph_is_refused_at_stage_3_alone(rank: int, world_size: int) -> None:
    for stage in (0, 1, 2):
        assert_graphs(stage, WholeInOneGraph, [5 * BLOCKS + 2])
    with pytest.raises(Exception, match=r"gathers a unit's parameters before its module runs.*compile='blocks'"):
        trained({"stage": 3, "sharding.min_unit_numel": 0}, WholeInOneGraph())


def graphs() -> int:
    """How many dynamo has made since it was reset."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]  # type: ignore[no-any-return]


@pytest.mark.wide
@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2, timeout_s=120)
def test_the_option_compiles_while_a_trainer_runs(rank: int, world_size: int, stage: int) -> None:
    """Fit, test, fit again, a fit without it, by hand: in place, so that names of weights do not change."""
    options = {"stage": stage, "sharding.min_unit_numel": 0}
    plain, module = Plain(), Plain()
    trained(options, plain)
    torch._dynamo.utils.counters.clear()
    trained(options | {"compile": {"regions": "blocks", "backend": "eager", "fullgraph": True}}, module)
    assert graphs() == 1
    assert_equal(module, plain, "fit")
    trainer = module.trainer
    tested = trainer.test(module, ranks.batches(), verbose=False)
    assert graphs() == 2, graphs()  # traced again, without gradients
    assert tested == plain.trainer.test(plain, ranks.batches(), verbose=False)
    if stage < 3:
        copied = pickle.loads(pickle.dumps(copy.deepcopy(module.net)))
        assert torch.equal(copied(x := torch.ones(3, module.first.in_features)), module(x))
    torch._dynamo.utils.counters.clear()
    trained(options, module)
    trained(options, plain)
    assert_equal(module, plain, "fit without it")
    assert graphs() == 0, graphs()
    trained(options | {"compile": {"regions": "model", "backend": "eager"}}, module)
    trained(options, plain)
    assert_equal(module, plain, "fit with another")
    assert graphs() > 0


class Counted(Plain):
    """Counts the graphs after each step."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(float(graphs()))


@pytest.mark.wide
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2, timeout_s=120)
def test_nothing_is_compiled_after_the_first_step(rank: int, world_size: int, stage: int) -> None:
    for precision in ("32-true", "bf16-mixed"):
        torch._dynamo.utils.counters.clear()
        options = {"stage": stage, "sharding.min_unit_numel": 0, "compile": {"regions": "blocks", "backend": "eager"}}
        module = trained(options, Counted(), max_steps=50, max_epochs=-1, precision=precision)
        assert len(module.seen) == 50
        assert set(module.seen) == {module.seen[0]}, (precision, module.seen)


class RunsBefore(Plain):
    """Runs its compiled model before any hook is attached: dynamo does not look for hooks that come later."""

    def build(self) -> None:
        super().build()
        self.net.compile(backend=self.backend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        with torch.no_grad():
            self(torch.ones(2, self.first.in_features))
        self(torch.ones(2, self.first.in_features)).sum().backward()
        self.zero_grad()
        return super().configure_optimizers()


@pytest.mark.wide
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2, timeout_s=120)
def test_what_was_compiled_before_the_fit_is_compiled_for_it(rank: int, world_size: int, stage: int) -> None:
    options = {"stage": stage, "sharding.min_unit_numel": 0}
    module = RunsBefore()
    plain = trained(options, Plain())
    assert_equal(trained(options, module), plain, f"stage {stage}")
    fit("ddp", ddp := Plain())
    assert_close(module.losses, ddp.losses, f"stage {stage}, DDP")


CELLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "recomputed": ({"activations": "full"}, {}),
    "selective": ({"activations": "selective"}, {}),
    "activations on the host": ({"activations.offload": "cpu"}, {}),
    "offload": (OPTIONS["zero3_offload"] | {"stage": 3}, {}),
    "bf16-mixed": ({}, {"precision": "bf16-mixed"}),
    "16-mixed": ({}, {"precision": "16-mixed"}),
    "bf16-true": ({}, {"precision": "bf16-true"}),
    "bf16-true, norms in fp32": ({"precision.fp32_modules": ["LayerNorm"]}, {"precision": "bf16-true"}),
    "accumulation and clipping": ({}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "tensor parallelism": (
        {"parallel.tensor": {"size": 2, "plan": {"blocks.*.wide": "replicate", "blocks.*.narrow": "replicate"}}},
        {},
    ),
}


@pytest.mark.wide
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2, timeout_s=180)
def test_numbers_are_those_of_plain_code(rank: int, world_size: int, stage: int, cell: str) -> None:
    """Bit for bit, with a backward that is traced."""
    more, trainer = CELLS[cell]
    options = {"sharding.min_unit_numel": 0} | more | {"stage": stage}
    if stage < 3:
        options.pop("offload.parameters", None)
    plain = trained(options, Plain(), **trainer)
    for regions in ("blocks", "model"):
        module = Plain()
        trained(options | {"compile": {"regions": regions, "backend": "aot_eager"}}, module, **trainer)
        assert_equal(module, plain, f"stage {stage}, compile={regions}, {cell}")
    for made in (BlocksInPlace, BlocksInWrappers, Whole):
        if cell == "tensor parallelism" and made is not Whole:
            continue  # the graph breaks at its collectives
        module = made(Traced())
        assert_equal(trained(options, module, **trainer), plain, f"stage {stage}, {made.__name__}, {cell}")
