"""Kinds of parallelism with fp16 and its loss scale."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.parallel_runs import Run, assert_same_bits, plain, start, unequal

pytestmark = pytest.mark.dist

KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, {"parallel.tensor.size": 2, "parallel.tensor.sequence_parallel": True}),
    "pipeline": (2, {"parallel.pipeline.size": 2, "parallel.pipeline.micro_batches": 4}),
    "context": (2, {"parallel.context": 2}),
    "ring": (2, {"parallel.context": 2, "parallel.ring": 2}),
    "expert": (2, {"parallel.expert": 2}),
    "tensor and pipeline": (4, {"parallel.tensor.size": 2, "parallel.pipeline.size": 2}),
}
EXPERTS = {"num_experts": 4, "k": 2, "drop_tokens": False, "second_expert_sampling": False, "balance_loss": 0.1}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "tensor" else pytest.mark.wide) for kind in KINDS]
)
def test_fp16_has_the_numbers_of_fp32(kind: str) -> None:
    """Same bits at stages 2 and 3. Offload has its own update, the device torch's (``fused=True``)."""
    ranks, options = KINDS[kind]
    experts = EXPERTS if kind == "expert" else None
    trainer = {"precision": "16-mixed", "accumulate_grad_batches": 2, "gradient_clip_val": 0.3}
    choices = [{"stage": 2}, {"stage": 3}, {"stage": 3, "offload": "cpu"}]
    runs = [Run({**each, **options}, experts=experts, steps=8, trainer=trainer) for each in choices]
    found = start(ranks, runs)
    assert_same_bits(found[:2])
    fp32 = plain(Run(experts=experts, steps=8, trainer={**trainer, "precision": "32-true"}))
    # A token near the border between two experts goes to the other one in fp16.
    limit = 1e-2 if experts else 1e-3
    assert not unequal(fp32, runs, found, losses=limit / 10, norms=limit, weights=limit)
