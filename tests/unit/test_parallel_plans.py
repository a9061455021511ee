"""Sources of a tensor-parallel plan: the model's method, a mapping, torch's styles."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from ls_strategy.parallel.styles import Column, Row
from ls_strategy.parallel.tensor.plans import resolve_tensor_plan
from tests.unit.test_parallel_plan_from_names import HEADS, HIDDEN, WIDTH, Decoder, refused


class WithPlan(nn.Module):
    """Attention that defines its plan, whatever its names."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.first, self.second = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def tensor_parallel_plan(self) -> dict[str, Any]:
        return {"": "divide:heads", "first": "column", "second": "row"}


def test_the_model_has_the_first_word() -> None:
    plan = resolve_tensor_plan(nn.ModuleDict({"net": nn.Sequential(WithPlan(), WithPlan())}), "auto", 2)
    assert plan.source == "WithPlan.tensor_parallel_plan()"
    assert plan.styles["net.1.first"] == [Column()]
    assert set(plan.styles) == {f"net.{i}{part}" for i in (0, 1) for part in ("", ".first", ".second")}

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.ModuleList([WithPlan()])

        def tensor_parallel_plan(self) -> Any:
            return {"net.*.first": "column", "net.*.second": "row"}

    assert set(resolve_tensor_plan(Whole(), "auto", 2).styles) == {"net.*.first", "net.*.second"}

    class Wrong(Whole):
        def tensor_parallel_plan(self) -> Any:
            return ["net.*.first"]

    assert "tensor_parallel_plan() of the model returned list" in refused(Wrong())


def test_a_mapping_is_parsed_and_checked() -> None:
    plan = resolve_tensor_plan(Decoder(), {"layers.*.w1": "column", "layers.*.w3": Column(), "layers.*.w2": "row"}, 2)
    assert plan.styles == {"layers.*.w1": [Column()], "layers.*.w3": [Column()], "layers.*.w2": [Row()]}
    assert "matches no module" in refused(Decoder(), {"layers.*.w9": "column"})
    assert "unknown tensor-parallel style 'columns'" in refused(Decoder(), {"layers.*.w1": "columns"})
    assert "is empty" in refused(Decoder(), {})
    assert 'Set "auto"' in refused(Decoder(), "automatic")


def test_styles_of_torch() -> None:
    given = {"layers.*.feed_forward.w1": ColwiseParallel(), "layers.*.feed_forward.w2": RowwiseParallel()}
    plan = resolve_tensor_plan(Decoder(), given, 2)
    assert plan.torch_styles == given
    assert plan.styles == {}
    assert "ColwiseParallel" in plan.describe()
    assert "mixes torch's ParallelStyle" in refused(Decoder(), {**given, "output": "vocab"})
    assert "every component between dots" in refused(Decoder(), {"*.w1": ColwiseParallel()})
