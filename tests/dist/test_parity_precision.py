"""16 bit crossed with everything: no more than twice the error that plain Lightning makes in 16 bit.

Reference: the same training in fp32. Trusted run: Lightning's own plugins, under DDP or on one process. What only the
loss scale could spoil is compared bit for bit in `test_loss_scale_exact`; here real rounding takes part.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from ls_strategy.config import LossScaleConfig
from ls_strategy.lightning.precision import ZeROPrecision
from ls_strategy.testing import spawn
from tests.dist import parallel_runs
from tests.dist.parallel_runs import Outcome, Run
from tests.marks import covering, slow
from tests.models import Case, Result, fp16_plugin, run

PRECISIONS = ("16-mixed", "16-true", "bf16-mixed", "bf16-true")
STAGES = (0, 1, 2, 3)
TIERS = ("none", "cpu", "nvme")
CLIPS: dict[str, dict[str, Any]] = {
    "none": {},
    "norm": {"clip": "norm", "clip_at": 0.05},
    "value": {"clip": "value", "clip_at": 0.01},
}
POWER = 10
GROWING = LossScaleConfig(initial_power=POWER, window=3)
STEPS = 8

Errors = dict[str, float]


def errors(reference: Any, other: Any) -> Errors:
    """Largest difference of a loss, and of a norm relative to it; root of the summed squares of weight differences."""
    losses = [abs(a - b) for a, b in zip(reference.losses, other.losses, strict=True)]
    norms = [abs(a - b) / a for a, b in zip(reference.norms, other.norms, strict=True)]
    squares = [(v.double() - other.weights[k].double()).square().sum() for k, v in reference.weights.items()]
    found = {"losses": max(losses), "weights": float(sum(squares)) ** 0.5}
    return found | ({"norms": max(norms)} if norms else {})


def too_large(found: list[tuple[Any, str, Errors, Errors]]) -> list[str]:
    """Which errors are more than twice those of the trusted run; NaN is.

    How far a norm, one number, is off is much a matter of luck: of norms the largest error of all trusted runs in a
    precision counts.

    Args:
        found: what was trained, precision of the trusted run, our errors, the trusted run's.
    """
    norms: dict[str, float] = {}
    for _, precision, _, trusted in found:
        norms[precision] = max(norms.get(precision, 0.0), trusted.get("norms", 0.0))
    return [
        f"{what}: {kind} off by {ours[kind]:.3g}, the trusted run by {limit:.3g}"
        for what, precision, ours, trusted in found
        for kind, limit in (trusted | {"norms": norms[precision]}).items()
        if kind in ours and not ours[kind] <= 2 * limit
    ]


# --- one model, every stage and tier ----------------------------------------------------------------------------------


AXES: dict[str, Sequence[Any]] = {
    "precision": PRECISIONS,
    "accumulate": (1, 3),
    "clip": list(CLIPS),
    "optimizer": ("adamw", "sgd", "two"),
    "stage": STAGES,
    "tier": TIERS,
    "traits": ((), ("private",)),
}


def is_possible(row: dict[str, Any]) -> bool:
    return (row["stage"] > 0 or row["tier"] == "none") and (row["optimizer"] != "two" or not row["traits"])


def case_of(row: dict[str, Any]) -> Case:
    options = {} if row["tier"] == "none" else {"offload.optimizer": row["tier"]}
    names = ("stage", "traits", "optimizer", "accumulate", "precision")
    own = {"fused": None, "steps": STEPS, "options": tuple(options.items())}
    return Case(**{name: row[name] for name in names}, **own, **CLIPS[row["clip"]])


def trusted_of(case: Case) -> Case:
    """What Lightning can do that is nearest.

    Its ``16-true`` has neither masters nor a loss scale, in which Adam's second moments vanish; and where optimization
    is manual, its ``16-mixed`` clips gradients that are still scaled. Then ``bf16-mixed``, the coarsest of all.
    """
    plain = replace(case, stage=None, options=(), traits=())
    by_hand = case.optimizer == "two" and case.clip is not None
    vanish = case.precision == "16-true" and (case.optimizer != "sgd" or case.clip is not None)
    return replace(plain, precision="bf16-mixed") if vanish or (by_hand and case.precision == "16-mixed") else plain


def compare_cases(rank: int, world_size: int, folder: str, cases: list[Case]) -> list[str]:
    """Which of them are too far from fp32."""
    known: dict[Case, Result] = {}

    def of(case: Case) -> Result:
        if case not in known:
            known[case] = run(rank, world_size, case)
        return known[case]

    found: list[tuple[Any, str, Errors, Errors]] = []
    for case in cases:
        trusted = trusted_of(case)
        options = (("offload.nvme_path", folder), ("precision.loss_scale", GROWING), *case.options)
        ours = run(rank, world_size, replace(case, options=options))
        reference, theirs = of(replace(trusted, precision="32-true")), of(trusted)
        if not ours.norms:
            reference, theirs = replace(reference, norms=[]), replace(theirs, norms=[])
        found.append((case, trusted.precision, errors(reference, ours), errors(reference, theirs)))
    return too_large(found)


def check(function: Any, world_size: int, *args: Any, timeout_s: float = 170) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = spawn(function, world_size, folder, *args, init_process_group=False, timeout_s=timeout_s)
    problems = [p for rank in found for p in rank]
    assert not problems, f"{len(problems)} too large:\n" + "\n".join(problems[:30])


def test_every_setting() -> None:
    check(compare_cases, 2, [case_of(row) for row in covering(AXES, 1, is_possible)])


@pytest.mark.parametrize("world_size", [slow(1), pytest.param(2, marks=pytest.mark.wide)])
def test_every_pair_of_settings(world_size: int) -> None:
    rows = covering(AXES, allowed=is_possible)
    check(compare_cases, world_size, [case_of(row) for row in rows if world_size > 1 or row["stage"] in (0, 2)])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_three_settings() -> None:
    check(compare_cases, 2, [case_of(row) for row in covering(AXES, 3, is_possible)], timeout_s=3500)


# --- divided models ---------------------------------------------------------------------------------------------------

# Without losses that a rank computes of its own tokens, so that one process is the reference of two ranks; and every
# token goes to every expert, since rounding sends one of them elsewhere otherwise, which doubles the error of a norm.
EXPERTS = {"num_experts": 4, "k": 4, "drop_tokens": False, "second_expert_sampling": False, "balance_loss": 0.0}
PIPELINE = {"parallel.pipeline.size": 2, "parallel.pipeline.micro_batches": 2}
KINDS: dict[str, Run] = {
    "tensor": Run({"parallel.tensor.size": 2}),
    "megatron": Run({"parallel.tensor.size": 2, "parallel.tensor.sequence_parallel": True}),
    "ulysses": Run({"parallel.context": 2}),
    "ring": Run({"parallel.context": 2, "parallel.ring": 2}),
    "pipeline": Run(PIPELINE),
    "zero_bubble": Run({**PIPELINE, "parallel.pipeline.schedule": "zero_bubble"}),
    "expert": Run({"parallel.expert": 2}, experts=EXPERTS),
}
TWICE: dict[str, Run] = {
    "tensor, ulysses": Run({"parallel.tensor.size": 2, "parallel.context": 2}),
    "megatron, ulysses": Run({
        "parallel.tensor.size": 2, "parallel.tensor.sequence_parallel": True, "parallel.context": 2,
    }),
    "megatron, ring": Run({
        "parallel.tensor.size": 2, "parallel.tensor.sequence_parallel": True,
        "parallel.context": 2, "parallel.ring": 2,
        "activations.loss": {"chunk_bytes": 4 * 61 * 5}, "activations.checkpointing": "full",
    }),
    "pipeline, megatron": Run({
        **PIPELINE, "parallel.tensor.size": 2, "parallel.tensor.sequence_parallel": True,
    }),
    "pipeline, ring": Run({**PIPELINE, "parallel.context": 2, "parallel.ring": 2}),
    "zero_bubble, ulysses": Run({
        **PIPELINE, "parallel.pipeline.schedule": "zero_bubble", "parallel.context": 2,
    }),
    "expert, ulysses": Run({"parallel.expert": 2, "parallel.context": 2}, experts=EXPERTS),
    "expert, tensor": Run(
        {"parallel.expert": 2, "parallel.tensor.size": 2, "parallel.tensor.plan": parallel_runs.attention_plan()},
        experts=EXPERTS,
    ),
}  # fmt: skip
"""Two kinds at once, on four ranks."""


class Unfused(parallel_runs.Module):
    """Lightning's ``16-mixed`` cannot clip what torch's fused kernel unscales."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        groups = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in optimizer.param_groups]
        return torch.optim.AdamW(groups, lr=2e-3, eps=1e-4)


def with_precision(one: Run, precision: str) -> Run:
    """The run in another precision, also on the CPU."""
    if not precision.startswith("16"):
        return replace(one, trainer={**one.trainer, "precision": precision})
    if one.options is None:
        return replace(one, trainer={**one.trainer, "plugins": [fp16_plugin(precision, power=POWER)]})
    options = {**one.options, "precision_plugin": ZeROPrecision(precision), "precision.loss_scale": GROWING}
    return replace(one, options=options)


Divided = tuple[str, int, str, int, float | None]
"""Kind, stage, precision, accumulation, limit of the norm."""


def train_divided(rank: int, world_size: int, folder: str, keys: list[Any]) -> list[Outcome]:
    """One run after the other; kind None is the plain Trainer."""
    outcomes = []
    for kind, stage, precision, accumulate, clip, experts in keys:
        plain = Run(experts=EXPERTS if experts else None)
        one = plain if kind is None else (KINDS | TWICE)[kind]
        if kind is not None:
            one = replace(one, options={**(one.options or {}), "stage": stage})
        trainer = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
        one = replace(one, steps=STEPS * accumulate, batch=8, trainer=trainer)
        outcome = parallel_runs.train(rank, world_size, with_precision(one, precision), Unfused)
        outcome.notes.clear()
        outcomes.append(outcome)
    return outcomes


def check_divided(world_size: int, keys: list[Divided], timeout_s: float = 170) -> None:
    ours = [(*key, (KINDS | TWICE)[key[0]].experts is not None) for key in keys]
    plain = {
        (None, 0, p, a, c, e) for _, _, precision, a, c, e in ours for p in ("32-true", trusted_precision(precision))
    }
    with tempfile.TemporaryDirectory() as folder:
        start = {"init_process_group": False, "timeout_s": timeout_s}
        found = spawn(train_divided, world_size, folder, ours, **start)[0]  # type: ignore[arg-type]
        order = sorted(plain, key=str)
        known = dict(zip(order, spawn(train_divided, 1, folder, order, **start)[0], strict=True))  # type: ignore[arg-type]
    compared: list[tuple[Any, str, Errors, Errors]] = []
    for key, outcome in zip(ours, found, strict=True):
        _, _, precision, accumulate, clip, experts = key
        reference = known[None, 0, "32-true", accumulate, clip, experts]
        trusted = known[None, 0, trusted_precision(precision), accumulate, clip, experts]
        compared.append((key, trusted_precision(precision), errors(reference, outcome), errors(reference, trusted)))
    problems = too_large(compared)
    assert not problems, f"{len(problems)} too large:\n" + "\n".join(problems[:30])


def trusted_precision(precision: str) -> str:
    """See `trusted_of`."""
    return "bf16-mixed" if precision == "16-true" else precision


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("world_size", "kinds"), [(2, KINDS), (4, KINDS), (4, TWICE)], ids=["2", "4", "4-twice"])
def test_every_three_settings_of_divided_models(world_size: int, kinds: dict[str, Run]) -> None:
    """On four ranks, what divides a model by two has two replicas."""
    axes: dict[str, Sequence[Any]] = {
        "kind": list(kinds),
        "stage": (1, 2, 3),
        "precision": PRECISIONS,
        "accumulate": (1, 3),
        "clip": (None, 0.3),
    }
    keys: list[Any] = [tuple(row.values()) for row in covering(axes, 3)]
    check_divided(world_size, keys, timeout_s=3500)
