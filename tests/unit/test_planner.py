"""The planner without ranks: sizes, the paper's figure, candidates, traces, tables, errors."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from ls_strategy.config import ActivationOffloadConfig, RecomputeConfig, TierConfig, ZeROConfig
from ls_strategy.distributed.comm import Comm
from ls_strategy.errors import ConfigError, PlanError
from ls_strategy.extras.planner.candidates import Candidate, ladder
from ls_strategy.extras.planner.choice import Question, choose, explain, smallest
from ls_strategy.extras.planner.forecast import Forecaster, Run, lacks_of, lightest, reason, scale, scaling_table, table
from ls_strategy.extras.planner.hardware import Hardware
from ls_strategy.extras.planner.micro_speeds import measure
from ls_strategy.extras.planner.simulated import simulated
from ls_strategy.extras.planner.sizes import parse_rate
from ls_strategy.extras.planner.states import ModelStates, moment_bytes
from ls_strategy.extras.planner.step import training_step
from ls_strategy.extras.planner.traffic import traffic
from ls_strategy.precision import resolve_precision
from tests import papers
from tests.live_bytes import LiveBytes

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(x)))


class Net(nn.Module):
    steps = 0

    def __init__(self, width=16, blocks=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.register_buffer("seen", torch.zeros(3))
        self.outputs = []

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        self.seen = self.seen + 1
        type(self).steps += 1
        loss = x.square().mean()
        self.last = loss.item()  # a number without a value on fake tensors
        self.outputs.append(loss)
        return loss


def question(**run):
    module = Net()
    return Question(
        module,
        [torch.optim.AdamW(module.parameters())],
        resolve_precision("32-true"),
        [torch.randn(5, 16)],
        Run(config=ZeROConfig(sharding={"min_unit_numel": 0}), **run),
    )


# sizes ---------------------------------------------------------------------------------------------------------------


def test_the_scaling_table_has_a_line_per_stage():
    with question().forecaster() as forecaster:
        rows = scale(forecaster, Hardware(ranks=2))
        one = forecaster.forecast(Candidate(2), Hardware(ranks=64))
    lines = scaling_table(rows).splitlines()
    assert lines[1].split() == ["8", "ranks", "64", "ranks", "512", "ranks", "4,096", "ranks"]
    assert [line.split()[0] for line in lines[2:]] == ["zero0", "zero1", "zero2", "zero3"]
    same = next(row for row in rows if (row.stage, row.ranks) == (2, 64))
    assert same.sent_bytes == one.traffic.sent
    assert same.state_bytes == sum(sum(kinds.values()) for kinds in one.peak.states.values())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [8, 64, 512])
def test_the_plan_scales_as_the_formula(stage, ranks):
    """A plan counts padding, too: below 5 % of a model of this size."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    states = ModelStates(model, [torch.optim.AdamW(model.parameters())], resolve_precision("bf16-true"))
    plan = states.plan(ZeROConfig(stage=stage, sharding={"min_unit_numel": 0}), ranks)
    numel = sum(p.numel() for p in model.parameters())
    formula = papers.bytes_per_rank(stage, numel, ranks, gradient_bytes=4)
    counted = sum(plan.state_bytes().values())
    if stage == 1:  # has gradients of its own beside the averages, which are divided
        counted += 4 * numel - 2 * numel - 4 * numel // ranks
    if stage == 3:  # gathered straight from the masters
        counted += 2 * numel // ranks
    assert counted == pytest.approx(formula, rel=0.05)


# optimizers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: torch.optim.AdamW(p), 8),
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 4),
        (lambda p: torch.optim.Adagrad(p), 4),
        (lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9), 12),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 12),
    ],
)
def test_bytes_that_an_optimizer_keeps_per_element(make, expected):
    params = [nn.Parameter(torch.zeros(3, 5))]
    assert moment_bytes(make(params), ZeROConfig()) == expected


def test_moments_in_fewer_bits():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(3))])
    assert moment_bytes(optimizer, ZeROConfig(precision={"moments": "bf16"})) == 4
    assert 2 < moment_bytes(optimizer, ZeROConfig(precision={"moments": "int8"})) < 2.1


# candidates ----------------------------------------------------------------------------------------------------------


def test_the_ladder_begins_with_nothing_and_ends_with_everything():
    names = [c.name for c in ladder(ranks=8, drive=True)]
    assert names[:4] == ["zero0", "zero1", "zero2", "zero3"]
    assert names[-1] == "zero3_nvme, full recompute, activations on the host"
    assert len(set(names)) == len(names)


def test_one_rank_divides_nothing_and_a_choice_of_the_user_stays():
    assert [c.stage for c in ladder(ranks=1) if c.optimizer is None] == [0, 0, 0]
    chosen = RecomputeConfig(policy="full", every=2)
    assert {c.recompute for c in ladder(ranks=4, recompute=chosen, drive=True)} == {chosen}


def test_every_candidate_is_a_configuration():
    for candidate in ladder(ranks=4, drive=True):
        assert candidate.config(ZeROConfig(sharding={"min_unit_numel": 7})).sharding.min_unit_numel == 7


def test_candidates_by_node():
    names = [c.name for c in ladder(ranks=16, by_node=True)]
    assert names[:3] == ["zero0", "zero1, shard_size=node", "zero1"]
    assert {"zero3, shard_size=node", "zero3, hpz=node"} < set(names)
    given = ZeROConfig(sharding={"hpz": 2, "quantized_gathers": "int8"})
    for candidate in ladder(ranks=16, by_node=True, drive=True):
        made = candidate.config(given)
        assert made.sharding.quantized_gathers == ("int8" if candidate.stage == 3 else None)
        assert ZeROConfig.of(**candidate.arguments()).sharding == replace(
            candidate.config(ZeROConfig()).sharding, prefetch_units=1
        )


def test_plans_by_node_know_their_states_and_what_leaves_a_node():
    """Two nodes of eight: gathers and reductions of groups stay inside, but for one shard there or back in fp32."""
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(512, 512) for _ in range(4))})
    states = ModelStates(model, [torch.optim.AdamW(model.parameters())], resolve_precision("bf16-true"))
    found = {}
    for name, sharding in (("flat", {}), ("groups", {"shard_size": "node"}), ("copy", {"hpz": "node"})):
        plan = states.plan(ZeROConfig(sharding={"min_unit_numel": 0, **sharding}), 16, 8)
        found[name] = (plan, traffic(plan, (8.0,), node_size=8))
    p = sum(f.layout.numel for u in found["flat"][0].units for f in u.flats)
    flat, groups, copy = (moved.between_nodes for _, moved in found.values())
    plan = found["flat"][0]
    units = zip(plan.gathers_per_step(), plan.units, strict=True)
    gathers = sum(n * f.layout.numel for n, u in units for f in u.flats)
    assert flat == (gathers + p) // 2 * 2
    assert copy == (p + p) // 2 * 2
    assert groups == p // 8 * 4
    masters = {name: plan.state_bytes()["masters"] for name, (plan, _) in found.items()}
    assert masters["groups"] == 2 * masters["flat"] == 2 * masters["copy"]
    assert found["copy"][0].state_bytes()["parameters"] - found["flat"][0].state_bytes()["parameters"] > 0


@pytest.mark.parametrize("text", ["", "100", "fast", "0Gbit", "-1Gbit", "100 Gbit/h"])
def test_what_is_no_bandwidth(text):
    with pytest.raises(ConfigError, match="not a bandwidth"):
        parse_rate(text)


def test_aliases_of_candidates_mean_what_they_say():
    from ls_strategy.autoload import ALIASES

    for candidate in ladder(ranks=4, drive=True):
        given = {k: v for k, v in candidate.arguments().items() if not k.startswith("activation")}
        assert ALIASES[candidate.strategy] == given


# simulated ------------------------------------------------------------------------------------------------------------


def test_a_forecast_leaves_the_module_as_it_was():
    asked = question()
    module = asked.module
    before = {name: (id(t), t.clone()) for name, t in module.state_dict(keep_vars=True).items()}
    state, steps = torch.get_rng_state(), Net.steps
    asked.forecasts(Hardware(ranks=4, device="cpu"))
    assert Net.steps == steps
    after = module.state_dict(keep_vars=True)
    assert all(id(after[n]) == i and torch.equal(after[n], t) for n, (i, t) in before.items())
    assert not hasattr(module, "last")
    assert module.outputs == []
    assert all(p.grad is None for p in module.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    assert asked.optimizers[0].param_groups[0]["params"][0] is module.blocks[0].up.weight
    assert torch.equal(torch.get_rng_state(), state)


def test_activations_are_what_a_real_step_holds():
    module, batch = Net(), [torch.randn(5, 16)]
    asked = question()
    for recompute in (None, RecomputeConfig(policy="full")):
        with simulated(asked.module, asked.precision, (), CPU) as fakes:
            forecaster = Forecaster(
                asked.module, [], fakes=fakes, precision=asked.precision,
                step=training_step(asked.module, []), batch=batch, run=asked.run,
            )  # fmt: skip
            trace = forecaster.trace(recompute)
        from ls_strategy.activations.recompute import apply_recompute

        applied = None if recompute is None else apply_recompute(module, recompute)

        def drop(p):
            p.grad = None

        handles = [p.register_post_accumulate_grad_hook(drop) for p in module.parameters()]
        with LiveBytes(ignore=[*module.parameters(), *module.buffers()]) as live:
            real = [torch.zeros(5, 16)]
            module.training_step(real, 0).backward()
        for handle in handles:
            handle.remove()
        if applied is not None:
            applied.remove()
        assert _most_activations(trace.events) == live.peak


def test_recompute_takes_less_memory_and_more_operations():
    asked = question()
    by_name = {f.candidate.name: f for f in asked.forecasts(Hardware(ranks=2, device="cpu"))}
    plain, full = by_name["zero2"], by_name["zero2, full recompute"]
    assert full.peak.device < plain.peak.device
    assert full.flops > plain.flops == 6 * 5 * 3 * 2 * 16 * 64 - 2 * 5 * 16 * 64  # the batch needs no gradient


def test_stages_need_less_and_less_and_send_more():
    asked = question()
    forecasts = asked.forecasts(Hardware(ranks=4, device="cuda"))[:4]
    states = [sum(f.peak.states["device"].values()) for f in forecasts]
    assert states == sorted(states, reverse=True)
    assert len(set(states)) == 4
    assert forecasts[3].traffic.sent > forecasts[2].traffic.sent


def test_offload_moves_states_from_tier_to_tier():
    by_name = {f.candidate.name: f for f in question().forecasts(Hardware(ranks=2, device="cuda", drive=None))}
    for name, tier in (("zero2", "device"), ("zero2_offload", "cpu"), ("zero3_nvme, full recompute", "nvme")):
        assert by_name[name].peak.states[tier]["optimizer"] > 0
        assert sum(s["optimizer"] > 0 for s in by_name[name].peak.states.values()) == 1
    assert by_name["zero2_offload"].traffic.bus > by_name["zero2"].traffic.bus == 0
    assert by_name["zero3_nvme, full recompute"].traffic.drive > 0


def test_offloaded_activations_are_bounded_by_what_is_in_flight():
    asked = question()
    offload = ActivationOffloadConfig(tier="cpu", min_bytes=0, in_flight_bytes=100)
    with simulated(asked.module, asked.precision, (), CPU) as fakes:
        optimizers = [fakes.optimizer(o) for o in asked.optimizers]
        forecaster = Forecaster(
            asked.module, optimizers, fakes=fakes, precision=asked.precision,
            step=training_step(asked.module, optimizers), batch=asked.batch, run=asked.run,
        )  # fmt: skip
        here = forecaster.peak(Candidate(2), 2, "cuda")
        away = forecaster.peak(Candidate(2, activation_offload=offload), 2, "cuda")
    assert away.at_peak["activations"] < here.at_peak["activations"]
    assert away.cpu > here.cpu


def test_a_step_that_cannot_be_counted_says_so():
    asked = question()
    asked.module.training_step = lambda batch, i: batch[0][batch[0] > 0].sum()
    with pytest.raises(PlanError, match=r"cannot be counted .* shapes must not depend on values"):
        asked.forecasts(Hardware(ranks=2))


def test_manual_optimization():
    class Manual(Net):
        automatic_optimization = False

        def optimizers(self):
            raise RuntimeError("no trainer")

        def log(self, *args):
            raise RuntimeError("no trainer")

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            self.manual_backward(loss)
            optimizer.step()

    module = Manual()
    optimizers = [torch.optim.AdamW(module.parameters())]
    run = Run(config=ZeROConfig(sharding={"min_unit_numel": 0}))
    asked = Question(module, optimizers, resolve_precision("32-true"), [torch.randn(5, 16)], run)
    manual = asked.forecasts(Hardware(ranks=2, device="cpu"))
    automatic = question().forecasts(Hardware(ranks=2, device="cpu"))
    assert [f.peak for f in manual] == [f.peak for f in automatic]
    assert "manual_backward" not in vars(module)


# choice --------------------------------------------------------------------------------------------------------------


@functools.cache
def forecasts_of():
    return question().forecasts(exact(None))


def exact(room, **options):
    return Hardware(ranks=4, device_memory=room, reserved_share=0, reserved_bytes=0, **options)


def on_hardware(forecasts, hardware):
    return [replace(f, lacks=lacks_of(f.peak, hardware)) for f in forecasts]


def test_the_lightest_that_fits_is_chosen_for_every_room():
    forecasts = forecasts_of()
    for f in forecasts:
        chosen = lightest(on_hardware(forecasts, exact(f.peak.device)))
        assert chosen is not None
        assert chosen.peak.device <= f.peak.device
        before = forecasts[: [g.candidate for g in forecasts].index(chosen.candidate)]
        assert all(g.peak.device > f.peak.device for g in before)


def test_the_table_marks_it_and_the_reason_names_what_the_one_before_lacks():
    forecasts = forecasts_of()
    room = exact(forecasts[0].peak.device - 1)
    forecasts = on_hardware(forecasts, room)
    marked = [line for line in table(forecasts, room).splitlines() if line.endswith("<- first that fits")]
    assert len(marked) == 1
    assert marked[0].split()[0] == lightest(forecasts).candidate.name
    assert "zero0 needs" in reason(forecasts)
    assert "device memory" in reason(forecasts)


def test_nothing_fits():
    forecasts = on_hardware(forecasts_of(), exact(10))
    assert lightest(forecasts) is None
    assert reason(forecasts).startswith("nothing fits.")


def test_one_process_chooses_for_itself():
    world = Comm(None, None)
    hardware = smallest(world, CPU)
    assert hardware.ranks == hardware.ranks_per_node == 1
    assert hardware.host_memory > 0
    choice = choose(question, world, hardware, measure(world, CPU, torch.float32))
    assert choice.candidate.name == "zero0"
    assert "None is clearly faster" in choice.words
    assert len([line for line in choice.words.splitlines() if line.endswith("<- chosen")]) == 1


def test_times_need_speeds():
    assert all(f.seconds is None for f in forecasts_of())
    fast = question().forecasts(exact(None, tflops=1.0, link_gbs=1.0, bus_gbs=1.0))
    for f in fast:
        assert f.seconds is not None
        assert 0 < f.seconds[0] < f.seconds[1]
        assert f.seconds[0] >= f.traffic.sent / 1e9


# out of memory -------------------------------------------------------------------------------------------------------


def test_the_explanation_names_something_smaller():
    asked = question()
    words = explain(asked, exact(None), Candidate(0))()
    assert words.startswith("zero0 needs ")
    assert "ZeROStrategy(stage=" in words
    assert "per rank, 4 ranks" in words


def test_a_plan_for_offload_is_the_engines():
    module = Net()
    states = ModelStates(module, [torch.optim.AdamW(module.parameters())], resolve_precision("32-true"))
    config = ZeROConfig(stage=3, offload={"optimizer": TierConfig(tier="cpu")}, sharding={"min_unit_numel": 0})
    assert states.plan(config, 2).bytes_by_tier()["cpu"]["optimizer"] > 0


def _most_activations(events):
    """The most that forward and backward hold at a time, without parameters and without their gradients."""
    now = most = 0
    for event in events:
        if event.kind == "bytes":
            now += event.amount
            most = max(most, now)
    return most
