"""The search over all kinds of parallelism: what it keeps, what it finds, how long it takes, and its picture."""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch.nn import functional

from ls_strategy.config import ActivationOffloadConfig, RecomputeConfig, TierConfig, ZeROConfig
from ls_strategy.errors import ConfigError, PlanError
from ls_strategy.extras import cli
from ls_strategy.extras.cli import plan as plan_search
from ls_strategy.extras.planner import search as search_module
from ls_strategy.extras.planner.block_steps import BlockSteps, Known, NotUniform, sharded_size
from ls_strategy.extras.planner.candidates import Candidate
from ls_strategy.extras.planner.choice import Question
from ls_strategy.extras.planner.forecast import Run
from ls_strategy.extras.planner.hardware import Hardware
from ls_strategy.extras.planner.parallelism import Job, Parallelism
from ls_strategy.extras.planner.partitioned import partitioned
from ls_strategy.extras.planner.pieces import SHORT, Composer, Span
from ls_strategy.extras.planner.search import FULL, bubble_of, explanation, front_table, jobs_of, search
from ls_strategy.extras.plots.front import draw_front
from ls_strategy.parallel.pipeline.schedules import make_table
from ls_strategy.parallel.pipeline.simulate import simulate
from ls_strategy.precision import resolve_precision
from recipes.gpt.network import GPT, GPTConfig
from recipes.moe.network import MoEConfig, MoEGPT
from tests.marks import few_or_all

MANY = Hardware(
    ranks=4096, ranks_per_node=8, device_memory=80 * 10**9, tflops=300, link_gbs=100, node_gbs=12.5
)  # fmt: skip


class Model(pl.LightningModule):
    def __init__(self, layers, heads):
        super().__init__()
        self.model = GPT(GPTConfig(vocab_size=512, block_size=128, num_layers=layers, num_heads=heads, width=256))

    def training_step(self, batch, batch_idx):
        tokens, targets = batch
        return functional.cross_entropy(self.model(tokens).float().flatten(0, 1), targets.flatten())


class Sparse(Model):
    """Experts in every block, so that all blocks are alike."""

    def __init__(self, layers, heads):
        pl.LightningModule.__init__(self)
        shape = GPTConfig(vocab_size=512, block_size=128, num_layers=layers, num_heads=heads, width=256)
        self.model = MoEGPT(shape, MoEConfig(every=1, num_experts=[8]))


def question(layers=9, samples=2, heads=8, kind=Model, **config):
    with torch.device("meta"):
        module = kind(layers, heads)
    tokens = torch.zeros(samples, 128, dtype=torch.long)
    run = Run(config=ZeROConfig(sharding={"min_unit_numel": 0}, **config))
    return Question(
        module, [torch.optim.AdamW(module.parameters())], resolve_precision("bf16-true"), [tokens, tokens], run
    )


@pytest.mark.wide
@pytest.mark.parametrize("short", SHORT)
@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(1),
        Candidate(3, recompute=RecomputeConfig(policy="full")),
        Candidate(2, recompute=RecomputeConfig(policy="selective")),
        Candidate(2, TierConfig(tier="cpu")),
        Candidate(3, TierConfig(tier="nvme"), TierConfig(tier="cpu")),
        Candidate(1, by_node="shard_size"),
        Candidate(3, by_node="hpz"),
        Candidate(
            3, TierConfig(tier="cpu"), TierConfig(tier="cpu"), RecomputeConfig(policy="full"),
            ActivationOffloadConfig(tier="cpu"),
        ),
    ],
    ids=lambda candidate: candidate.name if isinstance(candidate, Candidate) else None,
)  # fmt: skip
def test_a_few_blocks_stand_for_all(candidate, short):
    """Memory, operations, traffic and the module: as the plain plan, which traces all blocks, to the byte."""
    asked, hardware = question(), Hardware(ranks=4, ranks_per_node=2, device="cpu")
    names = [name for name, _ in asked.module.named_parameters()]
    with asked.forecaster() as forecaster:
        trusted = forecaster.forecast(candidate, hardware)
    job = Job(candidate=candidate, parallel=Parallelism(), ranks=4, node_size=2, samples=2, micro_batches=1)
    with partitioned(asked, Parallelism(), native=False, short=short) as model:
        assert model.short == short
        assert model.peak(job) == trusted.peak
        assert model.spent(job)["flops"] == trusted.flops
        assert model.zero_traffic(job) == trusted.traffic
    assert [name for name, _ in asked.module.named_parameters()] == names
    assert all(p.is_meta for p in asked.module.parameters())


@pytest.mark.wide
@pytest.mark.parametrize(
    "sizes",
    [
        [Parallelism(tensor=n) for n in (2, 4, 8)],
        [Parallelism(context=n) for n in (2, 4, 8)],
        [Parallelism(tensor=n, context=2) for n in (2, 4, 8)],
    ],
    ids=["tensor", "context", "both"],
)
@pytest.mark.parametrize("recompute", [None, RecomputeConfig(policy="full")], ids=["kept", "recomputed"])
def test_steps_on_two_and_four_ranks_tell_those_on_eight(sizes, recompute):
    """Every storage, operation and byte sent, as if the step on eight ranks had been traced."""
    asked, known = question(heads=32), Known()  # one head per rank would be another step
    for parallel in sizes[:-1]:
        with partitioned(asked, parallel, native=True, known=known) as model:
            model.pieces(recompute, 1)
    with (
        partitioned(asked, sizes[-1], native=True, known=known) as model,
        mock.patch.object(BlockSteps, "_traced", side_effect=AssertionError("it was traced")),
    ):
        told = model.pieces(recompute, 1)
    with partitioned(asked, sizes[-1], native=True) as model:
        traced = model.pieces(recompute, 1)
    assert told.items == traced.items
    assert told.sizes == traced.sizes
    assert told.freed == traced.freed
    assert told.spent == traced.spent


@pytest.mark.wide
def test_layers_that_ranks_share_multiply_in_fp8():
    """Ranks send 4 bytes per scale that covers parts of several."""
    pytest.importorskip("torchao.float8")
    spent = {}
    for config in ({}, {"precision": {"matmul": {"recipe": "tensorwise"}}}):
        asked = question(**config)
        with partitioned(asked, Parallelism(tensor=2), native=True, short=0) as model:
            layers = [m.weight_split.dim for m in asked.module.modules() if hasattr(m, "weight_split")]
            spent[bool(config)] = model.pieces(None, 1).spent
        assert not any(hasattr(m, "weight_split") for m in asked.module.modules())
    assert layers == [0, 1, 0, 1] * 9  # of attention and MLP
    for at, without in spent[False].items():
        inner = 0 <= at.block < 9
        # Column layers agree on weights, and in backward on gradients, twice; row layers on weights and inputs.
        scales = 0 if not inner else 2 * (3 + 2) if at.backward else 2 * (1 + 2)
        assert spent[True][at] == without + Counter({1: 4 * scales})


@pytest.mark.wide
def test_heads_that_do_not_divide_are_not_told_but_refused():
    """Steps on two and four ranks cannot tell that eight are too many for four heads."""
    asked, known = question(heads=4), Known()
    for size in (2, 4):
        with partitioned(asked, Parallelism(context=size), native=True, known=known) as model:
            model.pieces(None, 1)
    with (
        partitioned(asked, Parallelism(context=8), native=True, known=known) as model,
        pytest.raises(PlanError, match="must be a multiple of the 8 ranks"),
    ):
        model.pieces(None, 1)


def most_alive(pieces, span, forwards):
    """Of a micro-batch's forward, or of several, and the first backward, event by event."""
    composer = Composer(pieces, span, lambda *_: [])
    now = most = 0
    for event in [*chain(*map(composer.forward, range(forwards))), *composer.backward(0)]:
        if event.kind == "bytes":
            now += event.amount
            most = max(most, now)
    return most


@pytest.mark.wide
@pytest.mark.parametrize("recompute", [None, RecomputeConfig(policy="full")], ids=["kept", "recomputed"])
def test_the_activations_of_a_stage_are_known_without_a_replay(recompute):
    asked = question()
    with partitioned(asked, Parallelism(), native=True) as model:
        pieces = model.pieces(recompute, 1)
    for stop, forwards in ((9, 1), (4, 1), (4, 3), (1, 8)):
        expected = most_alive(pieces, Span(0, stop, 9), forwards)
        assert pieces.alive_bytes(stop, 9, forwards=forwards) == expected, (stop, forwards)


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize(
    ("kind", "ways"),
    [
        (Model, [Parallelism(), Parallelism(tensor=2)]),
        pytest.param(Sparse, [Parallelism(), Parallelism(expert=2), Parallelism(expert=8)], marks=pytest.mark.wide),
    ],
    ids=["dense", "experts"],
)
@pytest.mark.parametrize("every", few_or_all(9, 3))
def test_no_combination_needs_less_than_its_bound(kind, ways, offloads, every):
    """Otherwise a search would leave out what is best. And it tells most of what is needed: few are replayed."""
    hardware = replace(MANY, ranks=64, bus_gbs=50.0 if offloads else None)
    asked, shares = question(samples=4, kind=kind), []
    for parallel in ways:
        with partitioned(asked, parallel, native=True, short=SHORT[0]) as model:
            for job in list(jobs_of(parallel, hardware, blocks=9, batch=256, policies=[None, FULL]))[::every]:
                model.prepare(job)
                shares.append(model.least(job) / model.peak(job).device)
    assert len(shares) > 90 / every
    assert max(shares) <= 1
    assert statistics.median(shares) > 0.6


@pytest.mark.parametrize(("size", "numbers"), [(8, [64, 8, 56, 7, 1, 256, 28]), (16, [64, 4, 60, 3.75, 0.25, 512, 60])])
def test_what_two_sizes_tell(size, numbers):
    """Of a whole of 64, on two and four ranks: whole, shard, others' shards, and so on; a ratio of none of them."""
    pairs = [(64, 64), (32, 16), (32, 48), (16, 12), (16, 4), (64, 128), (4, 12)]
    law = sharded_size(size)
    assert [law(*pair) for pair in pairs] == [n if n == int(n) else None for n in numbers]
    assert law(64, 65) is None
    assert law(0, 64) is None


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_a_search_for_4096_ranks_keeps_the_global_batch():
    asked = question(layers=24)
    found = search(asked, MANY)
    assert found.seconds < 60  # ten on a machine of its own: nine, and what was begun before
    assert found.global_batch == 2 * 4096
    assert found.front
    for option in found.options:
        replicas = 4096 // option.job.parallel.replica
        settings = option.settings
        assert settings["batch_size_per_replica"] * settings["accumulate_grad_batches"] * replicas == 2 * 4096
    times = [o.costs.seconds[1] for o in found.front]
    memory = [o.peak.device for o in found.front]
    assert times == sorted(times)
    assert memory == sorted(memory, reverse=True)
    assert len(explanation(found, MANY)) == 5
    assert len(front_table(found).splitlines()) == 2 + len(found.front)


@pytest.mark.wide
@pytest.mark.parametrize(("then", "tried"), [(8.0, True), (8.5, False)])
def test_what_known_steps_tell_is_tried_after_the_time_to_trace(monkeypatch, then, tried):
    """Steps on eight ranks are told by those on two and four, if these leave time to replay memory."""
    now = [0.0]
    monkeypatch.setattr(search_module.time, "perf_counter", lambda: now[0])
    trace = search_module._timed

    def timed(asked, hardware, parallel, *rest):
        jobs = trace(asked, hardware, parallel, *rest)
        now[0] = then if parallel.tensor == 4 else now[0]
        return jobs

    monkeypatch.setattr(search_module, "_timed", timed)
    hardware = replace(MANY, ranks=64, ranks_per_node=8)
    found = search(question(), hardware, seconds=9.0)
    assert found.traced == ["data parallelism", "tp 2", "tp 4", *(["tp 8"] if tried else [])]
    assert ("tp 8" in found.skipped) is not tried
    told = [o for o in found.options if o.job.parallel.tensor == 8]
    assert {o.job.candidate.recompute for o in told} == ({None, FULL} if tried else set())


@pytest.mark.wide
def test_four_blocks_stand_for_all_where_the_first_one_slices_the_sequence():
    known = Known()
    for short, fits in ((3, False), (4, True)):
        parts = partitioned(question(), Parallelism(context=2), native=True, short=short, known=known)
        with parts as model, nullcontext() if fits else pytest.raises(NotUniform):
            model.pieces(None, 1)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "gpipe"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (8, 32), (4, 7)])
def test_the_bubble_is_that_of_the_schedule(schedule, ranks, micro_batches):
    """The formulas for what a search tries, against the table, action by action."""
    simulated = simulate(make_table(schedule, ranks, micro_batches)).bubble
    assert bubble_of(schedule, ranks, micro_batches) == pytest.approx(simulated, rel=1e-12)
    assert bubble_of(schedule, 1, micro_batches) == 0


def test_blocks_whose_shards_are_too_small_for_units_are_traced_in_full():
    """On one rank, but not on 4 tensor-parallel ranks, a block has enough elements for a unit of its own."""
    asked = replace(question(4), run=Run(config=ZeROConfig(sharding={"min_unit_numel": 300_000})))
    hardware = Hardware(ranks=4, ranks_per_node=4, tflops=300, link_gbs=100)
    with mock.patch.object(search_module, "layer_shardings", return_value=[Parallelism(tensor=4)]):
        assert search(asked, hardware, seconds=20).options


def test_a_picture_of_the_front(tmp_path):
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "front.png"
    draw_front([(1.0, 40.0), (1.5, 20.0), (3.0, 8.0)], "memory against time", "s per step", "GB", path)
    with image.open(path) as picture:
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 16)}
    assert (0, 114, 178) in colours


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"search": True, "tflops": None}, "Got --search without --tflops and --link"),
        ({"search": False}, "Got --picture without --search"),
        ({"search": True}, "is no folder"),
    ],
)
def test_what_a_search_needs(given, message, tmp_path):
    picture = None if given.get("tflops", 1) is None else tmp_path / "nowhere" / "front.png"
    options = {"tflops": 300.0, "link": 50.0, "picture": picture, **given}
    with pytest.raises(ConfigError, match=message):
        plan_search.check_search(argparse.Namespace(**options))


def test_the_search_gets_the_seconds_of_the_command():
    args = cli.parse(["plan", "x.yaml", "--search", "--search-seconds", "2.5"])
    with mock.patch.object(search_module, "search") as searches:
        plan_search.run_search(args, "question", MANY)
    searches.assert_called_once_with("question", MANY, seconds=2.5)
