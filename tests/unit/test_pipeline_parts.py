"""Placeholders, backward in two parts, headers, and the figure of a run."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

from ls_strategy._torch import is_compiled, route_calls
from ls_strategy.distributed.comm import Comm
from ls_strategy.errors import PlanError, StateError
from ls_strategy.extras.plots.pipeline import chrome_trace, draw
from ls_strategy.parallel.pipeline.p2p import Shapes, TensorShape, make_links
from ls_strategy.parallel.pipeline.partition import keep_own, make_cut
from ls_strategy.parallel.pipeline.placeholder import Placeholder, PlaceholderMode, is_meta, placeholder
from ls_strategy.parallel.pipeline.runner import PipelineRunner
from ls_strategy.parallel.pipeline.schedules import (
    SCHEDULES,
    Action,
    make_table,
    place,
    placement_of,
    stages_per_rank_of,
)
from ls_strategy.parallel.pipeline.simulate import bubble, simulate
from ls_strategy.parallel.pipeline.split import backward_inputs
from ls_strategy.parallel.pipeline.stage import StageRunner
from ls_strategy.parallel.pipeline.transfer import SIDE, SideLoss, StageTransfer
from tests import papers

CPU = torch.device("cpu")


def held(*shape: int, dtype: torch.dtype = torch.float32) -> Placeholder:
    return placeholder(shape, dtype, CPU)


# --- placeholders -----------------------------------------------------------------------------------------------------


def test_functions_of_placeholders_have_shapes_and_no_values() -> None:
    x = held(2, 3)
    for y in (
        x + 1,
        torch.ones(2, 3) * x,
        functional.linear(x, torch.ones(5, 3)).relu(),
        x[0, None],
        x.to("cpu").half(),
    ):
        assert isinstance(y, Placeholder)
        assert y.device == CPU
        assert not y.is_meta
        assert is_meta(y)
    assert functional.linear(x, torch.ones(5, 3)).shape == (2, 5)
    assert x.half().dtype == torch.float16
    assert [part.shape for part in x.split(2, dim=1)] == [(2, 2), (2, 1)]
    assert torch.arange(3, device=x.device).tolist() == [0, 1, 2]
    assert torch.equal(torch.zeros_like(x), torch.zeros(2, 3))
    assert torch.equal(x.new_full((2,), 7.0), torch.full((2,), 7.0))
    total = held(2, 3)
    total += x
    assert isinstance(total, Placeholder)
    x.register_hook(lambda g: g)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: x.sum().item(), r"item\(\) asks for the value"),
        (lambda x: bool(x.sum() > 0), r"__bool__\(\) asks for the value"),
        (lambda x: x.tolist(), r"tolist\(\) asks for the value"),
        (
            lambda x: x[x > 0].sum(),
            r"__getitem__\(\) failed .* on another rank .*shapes must not depend on values",
        ),
        (lambda x: torch.ones(2, 3).add_(x), r"add_\(\) writes a value"),
        (lambda x: torch.ones(2, 3).__setitem__(0, x[0]), r"__setitem__\(\) writes a value"),
        (lambda x: x @ torch.ones(2, 2), r"matmul\(\) failed .*\[2, 3\] X \[2, 2\]"),
    ],
)
def test_what_needs_a_value_is_refused_by_name(call: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        call(held(2, 3))


def test_absent_parameters_compute_on_shapes() -> None:
    table = nn.Embedding(10, 4, device="meta")
    free = nn.Parameter(torch.ones(3, 4))
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    with PlaceholderMode(CPU) as mode:
        assert isinstance(table(tokens), Placeholder)
        assert table(tokens).shape == (2, 3, 4)
        assert isinstance(free * 2, Placeholder)  # before this rank's blocks every parameter may be absent
        assert torch.equal(torch.arange(3, device=table.weight.device), torch.arange(3))
        assert torch.equal(torch.ones(3).to(table.weight.device), torch.ones(3))
        assert not isinstance(tokens + 1, Placeholder)
        mode.parameters = False
        assert torch.equal(free * 2, torch.full((3, 4), 2.0))
        assert isinstance(table(tokens), Placeholder)
        assert mode.missing is table.weight


# --- routes -----------------------------------------------------------------------------------------------------------


def test_routed_calls_keep_hooks_and_are_not_copied() -> None:
    module = nn.Linear(2, 2)
    seen: list[Any] = []
    module.register_forward_hook(lambda *_: seen.append("hook"))
    route = route_calls(module, lambda call, args, kwargs: (seen.append("route"), call(*args, **kwargs))[1])
    assert not is_compiled(module)
    module(torch.ones(2))
    assert seen == ["route", "hook"]
    copy.deepcopy(module)(torch.ones(2))
    assert seen == ["route", "hook", "hook"]
    route.remove()
    module(torch.ones(2))
    assert seen.count("route") == 1


def test_routes_are_removed_in_any_order() -> None:
    seen: list[str] = []
    module = nn.Linear(2, 2)

    def route(name: str) -> Any:
        return route_calls(module, lambda call, args, kwargs: (seen.append(name), call(*args, **kwargs))[1])

    first, second = route("first"), route("second")
    module(torch.ones(2))
    assert seen == ["second", "first"]
    first.remove()
    module(torch.ones(2))
    assert seen == ["second", "first", "second"]
    second.remove()
    module(torch.ones(2))
    assert len(seen) == 3


# --- one stage --------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(2, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def second_stage(model: nn.Module) -> StageRunner:
    cut = make_cut(model, (0, 1), method="uniform")
    keep_own(model, cut, 1)
    return StageRunner(model, cut, CPU)


class EarlyHead(Net):
    """Registers the head before the blocks."""

    def __init__(self) -> None:
        super().__init__()
        blocks = self.blocks
        del self.blocks
        self.blocks = blocks


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda y: y.sum(), "the result of step"),
        (lambda y: y.sum().item(), r"the value that item\(\) needs"),
        (lambda y: y[y > 0].sum(), r"the value that __getitem__\(\) needs"),
    ],
)
def test_what_depends_on_a_parameter_of_another_stage_names_it(use: Any, words: str) -> None:
    model = EarlyHead()
    stages = second_stage(model)
    cause = r"depends on the parameter 'head.weight', which is on another rank \(stage 0\).*partition='flops'"
    with pytest.raises(PlanError, match=rf"{words} {cause}"):
        stages.run(1, lambda x: use(model(x)), torch.ones(3, 2), StageTransfer({0: torch.ones(3, 4)}, 1))


def test_a_value_of_an_earlier_stage_is_not_there_after_the_blocks() -> None:
    model = Net()
    stages = second_stage(model)

    def step(x: Tensor) -> float:
        before = model.stem(x).sum()
        return model(x).sum() + before.item()

    with pytest.raises(PlanError, match=r"item\(\) needs depends on a tensor that is computed on an earlier stage"):
        stages.run(1, step, torch.ones(3, 2), StageTransfer({0: torch.ones(3, 4)}, 1))


def test_user_code_cannot_swallow_the_end_of_a_stage() -> None:
    model = Net()
    cut = make_cut(model, (0, 1), method="uniform")
    stages = StageRunner(model, cut, CPU)

    def step(x: Tensor) -> Tensor:
        try:
            return model(x).sum()
        except Exception:
            return torch.zeros(())

    handover = stages.run(0, step, torch.ones(3, 2), None)
    x = model.blocks[1](model.blocks[0](model.stem(torch.ones(3, 2))))  # outside of run, blocks are what they were
    assert torch.equal(handover.tensors[0], x)

    def swallows(x: Tensor) -> Tensor:
        try:
            return model(x).sum()
        except BaseException:
            return torch.zeros(())

    with pytest.raises(StateError, match=r"BaseException"):
        stages.run(0, swallows, torch.ones(3, 2), None)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda m, x: m.blocks[2](m.stem(x)).sum(), r"'blocks.2' was called, but the next one must be 'blocks.0'"),
        (lambda m, x: m.blocks[0](m.blocks[0](m.stem(x))).sum(), "'blocks.0' was called, .* must be 'blocks.1'"),
        (lambda m, x: m.stem(x).sum(), r"without a call of block 'blocks.0'"),
    ],
)
def test_blocks_out_of_order_are_refused(step: Any, words: str) -> None:
    model = Net()
    stages = second_stage(model)
    with pytest.raises(StateError, match=words):
        stages.run(1, lambda x: step(model, x), torch.ones(3, 2), StageTransfer({0: torch.ones(3, 4)}, 1))


def test_what_skips_the_blocks_is_refused_by_name() -> None:
    model = Net()
    stages = second_stage(model)

    def step(x: Tensor) -> Tensor:
        first = y = model.stem(x)
        for block in model.blocks:
            y = block(y)
        return model.head(y + first.relu()).sum()

    with pytest.raises(PlanError, match="the result of step depends on a tensor that is computed on an earlier stage"):
        stages.run(1, step, torch.ones(3, 2), StageTransfer({0: torch.ones(3, 4)}, 1))


def test_a_parameter_beside_the_blocks_is_also_on_the_last_stage() -> None:
    model = Net()
    model.late = nn.Parameter(torch.full((4,), 2.0))  # bare parameters come before those of modules
    stages = second_stage(model)
    received = StageTransfer({0: torch.ones(3, 4)}, 1)
    loss = stages.run(1, lambda x: (model(x) * model.late).sum(), torch.ones(3, 2), received)
    expected = model.head(model.blocks[3](model.blocks[2](torch.ones(3, 4)))).sum() * 8
    torch.testing.assert_close(loss, expected)


def test_hooks_of_absent_modules_do_not_run() -> None:
    """Those that ZeRO or tensor parallelism set would communicate."""
    model = Net()
    model.stem.register_buffer("shift", torch.ones(4))
    model.head.weight = nn.Parameter(torch.ones(1, 4))
    stages = second_stage(model)
    seen: list[str] = []
    for name in ("stem", "blocks.0", "blocks.2", "head"):
        model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: seen.append(name))
    received = StageTransfer({0: torch.ones(3, 4)}, 1)
    stages.run(1, lambda x: model(x).sum(), torch.ones(3, 2), received)
    assert seen == ["blocks.2", "head"]
    stages.remove()
    model.head(torch.ones(4))
    assert seen == ["blocks.2", "head", "head"]


def test_absent_blocks_run_once_per_shape() -> None:
    model = Net()
    calls: list[Any] = []
    model.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    stages = second_stage(model)
    for samples in (3, 3, 5, 3, 5):
        received = StageTransfer({0: torch.ones(samples, 4)}, 1)
        assert stages.run(1, lambda x: model(x).sum(), torch.ones(samples, 2), received).isfinite()
    assert len(calls) == 2


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.linear(pair[0]) * pair[1], pair[1]


def test_shapes_of_absent_blocks_keep_no_tensor_of_a_batch() -> None:
    model = nn.Sequential(Masked(), Masked(), Masked())
    stages = StageRunner(model, make_cut(model, (0, 1, 2)), CPU)
    mask = torch.ones(3, 4)
    alive = weakref.ref(mask)
    received = StageTransfer({0: torch.ones(3, 4), 1: torch.ones(3, 4)}, 2)
    stages.run(2, lambda x: model((x[0], x[1]))[0].sum(), (torch.ones(3, 4), mask), received)
    del mask, received
    gc.collect()
    assert alive() is None


def test_one_rank_runs_every_schedule_without_a_process_group() -> None:
    for schedule in SCHEDULES:
        torch.manual_seed(0)
        model = Net()
        reference = copy.deepcopy(model)
        cut = make_cut(model, place(1, stages_per_rank_of(schedule), placement_of(schedule)))
        runner = PipelineRunner(StageRunner(model, cut, CPU), make_links(Comm(None, None)), schedule)
        x = torch.randn(8, 2)
        report = runner.train(lambda x, model=model: model(x).square().sum(), list(x.split(2)))
        for part in x.split(2):
            (reference(part).square().sum() / 4).backward()
        assert len(report.losses) == 4
        for parameter, trusted in zip(model.parameters(), reference.parameters(), strict=True):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, trusted.grad), schedule
        with torch.no_grad():
            assert torch.equal(runner.evaluate(model, [x])[0], reference(x))


def test_a_cut_for_another_schedule_is_refused() -> None:
    model = Net()
    cut = make_cut(model, (0, 0))
    with pytest.raises(PlanError, match=r"stages_per_rank=2, but gpipe requires 1"):
        PipelineRunner(StageRunner(model, cut, CPU), make_links(Comm(None, None)), "gpipe")


class Sorting(nn.Module):
    """Computes by values: how many rows are positive."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.linear(x).split([int((x.sum(1) > 0).sum()), int((x.sum(1) <= 0).sum())])
        return torch.cat([first, -second])


class SortingByShapes(Sorting):
    def forward_shapes(self, x: Tensor) -> Tensor:
        return torch.empty_like(x)


@pytest.mark.parametrize("layer", [Sorting, SortingByShapes])
def test_a_layer_that_computes_by_values_says_its_shapes(layer: type[Sorting]) -> None:
    model = Net()
    model.blocks[0] = nn.Sequential(layer(), nn.ReLU())
    stages = second_stage(model)
    received = StageTransfer({0: torch.ones(3, 4)}, 1)
    if layer is Sorting:
        with pytest.raises(PlanError, match=r"__int__\(\) asks for the value"):
            stages.run(1, lambda x: model(x).sum(), torch.ones(3, 2), received)
    else:
        assert stages.run(1, lambda x: model(x).sum(), torch.ones(3, 2), received).isfinite()


# --- the side loss ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [torch.ones(2), torch.tensor(1)])
def test_a_side_loss_is_a_scalar(given: Tensor) -> None:
    model = Net()
    side = SideLoss(give=lambda: given, receive=lambda _: None)
    stages = StageRunner(model, make_cut(model, (0, 1), method="uniform"), CPU, side=side)
    with pytest.raises(StateError, match="floating-point scalar"):
        stages.run(0, lambda x: model(x).sum(), torch.ones(3, 2), None)


def test_a_side_loss_without_a_receiver_is_refused() -> None:
    model = Net()
    stages = second_stage(model)
    received = StageTransfer({0: torch.ones(3, 4), SIDE: torch.ones(())}, 1)
    with pytest.raises(StateError, match="this rank has no SideLoss"):
        stages.run(1, lambda x: model(x).sum(), torch.ones(3, 2), received)


# --- backward in two parts --------------------------------------------------------------------------------------------


class Shared(nn.Module):
    """Weights used twice, in a chain; one that no input reaches; a skip; a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.free = nn.Parameter(torch.randn(4))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.a(x).tanh()
        y = self.b(self.norm(y)).tanh() + x
        y = self.a(y).tanh() * self.free.exp()
        y = functional.linear(y, self.b.weight @ self.c.weight)
        return self.c(y) + self.a(y), self.free.sin() * 2


@pytest.mark.parametrize("with_input", [True, False])
def test_backward_in_two_parts_is_backward(with_input: bool) -> None:
    torch.manual_seed(0)
    model = Shared()
    reference = copy.deepcopy(model)
    x = torch.randn(3, 4, requires_grad=with_input)
    outputs = model(x)
    gradients = [torch.randn_like(t) for t in outputs]
    trusted_x = x.detach().clone().requires_grad_(with_input)
    torch.autograd.backward(reference(trusted_x), gradients)
    hooked: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: hooked.append(name))
    inputs = [x] if with_input else []
    found, rest = backward_inputs([get_gradient_edge(t) for t in outputs], gradients, inputs)
    assert all(p.grad is None for p in model.parameters())
    rest.run()
    if with_input:
        torch.testing.assert_close(found[0], trusted_x.grad, rtol=1e-6, atol=1e-6)
    for (name, parameter), trusted in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, trusted.grad, rtol=1e-5, atol=1e-6, msg=name)
    assert set(hooked) == {name for name, _ in model.named_parameters()}


def test_the_first_part_computes_no_weight_gradient() -> None:
    """FLOPs of both parts together are those of one backward: nothing is computed twice."""
    from torch.utils.flop_counter import FlopCounterMode

    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh())))
    x = torch.randn(5, 8, requires_grad=True)
    y = model(x)
    with FlopCounterMode(display=False) as first:
        _, rest = backward_inputs([get_gradient_edge(y)], [torch.ones_like(y)], [x])
    with FlopCounterMode(display=False) as second:
        rest.run()
    assert first.get_total_flops() == second.get_total_flops() == 6 * 2 * 5 * 8 * 8


class Product(torch.autograd.Function):
    """A node of Python, which does not keep itself alive as torch's own nodes do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.T @ grad


def test_weights_of_a_function_in_python_wait_for_the_second_part() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    x = torch.randn(3, 4, requires_grad=True)

    def first() -> Any:  # the outputs are freed when it returns, as they are in a pipeline
        y = (Product.apply(x * 1, weight) * 2).sum()
        return backward_inputs([get_gradient_edge(y)], [torch.ones(())], [x])

    (found,), rest = first()
    gc.collect()
    rest.run()
    torch.testing.assert_close(found, 2 * torch.ones(3, 4) @ weight.detach().T)
    torch.testing.assert_close(weight.grad, 2 * x.detach().T @ torch.ones(3, 4))


# --- headers ----------------------------------------------------------------------------------------------------------


def test_a_header_says_all_about_what_follows() -> None:
    shapes = Shapes(
        (TensorShape(0, (2, 3), torch.bfloat16, True), TensorShape(4, (), torch.bool, False)),
        7,
    )
    assert Shapes.decode(shapes.encode()) == shapes
    assert Shapes.of(StageTransfer({0: torch.ones(2, 3, requires_grad=True), 3: torch.ones(1).bool()}, 9)) == Shapes(
        (TensorShape(0, (2, 3), torch.float32, True), TensorShape(3, (1,), torch.bool, False)), 9
    )
    with pytest.raises(PlanError, match=r"at most 16 tensors of at most 8 dimensions"):
        Shapes((TensorShape(0, (1,) * 9, torch.float32, True),), 1).encode()


# --- timeline ---------------------------------------------------------------------------------------------------------


def test_the_figure_of_a_run() -> None:
    pytest.importorskip("matplotlib")
    spans = simulate(make_table("1f1b", 4, 8)).spans
    assert bubble(spans) == pytest.approx(papers.gpipe_bubble(4, 8))
    trace = json.loads(chrome_trace(spans))["traceEvents"]
    actions = [event for event in trace if event["ph"] == "X"]
    assert len(actions) == 4 * 16
    assert {event["tid"] for event in actions} == {0, 1, 2, 3}
    first = next(event for event in actions if event["name"] == "0B0")
    assert (first["ts"], first["dur"]) == (10e6, 2e6)  # four forwards there, three backwards back
    image = draw(spans)
    assert image.dtype == torch.uint8
    blue = (image == torch.tensor((66, 133, 244), dtype=torch.uint8)[:, None, None]).all(dim=0)
    line = image[:, blue.any(dim=1).nonzero()[5].item()]  # of pixels through rank 0
    grey = (line == 245).all(dim=0)
    inside = torch.arange(len(grey))[blue.any(dim=0) | grey]
    assert grey.sum().item() / (inside[-1] - inside[0] + 1) == pytest.approx(1 - 24 / 33, abs=0.02)
    assert Action("F", 0, 0) == spans[0][0][0]
