"""The branches for NCCL, on a device that is told apart from its host: see `tests.native_ranks`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ls_strategy.config import ShardingConfig, ZeROConfig
from ls_strategy.distributed.axis import Axis
from ls_strategy.distributed.comm import Comm, make_comm
from ls_strategy.distributed.mesh import Mesh
from ls_strategy.engine import Engine
from ls_strategy.layout import TensorPart
from ls_strategy.precision import resolve_precision
from ls_strategy.testing import spawn
from ls_strategy.zero.parts import full_of
from ls_strategy.zero.setup.share import Share
from ls_strategy.zero.step.global_norm import global_norm
from tests.conftest import NATIVE
from tests.dist.parallel_runs import Outcome, Run, plain, train, unequal
from tests.native_ranks import BACKEND, DEVICE, HOST, on_native_device

pytestmark = pytest.mark.wide

ROOT = Path(__file__).parents[2]


def on_device(*values: float) -> torch.Tensor:
    return torch.tensor(values).to(DEVICE)


def mistakes() -> dict[str, str]:
    """What each mistake raises: the device has to notice them."""

    def message(mistake: Any) -> str:
        try:
            mistake()
        except RuntimeError as error:
            return str(error)
        return ""

    here, there = torch.ones(2), torch.ones(2, device=DEVICE)
    return {
        "all_reduce": message(lambda: dist.all_reduce(here)),
        "broadcast": message(lambda: dist.broadcast(there.cpu(), 0)),
        "all_gather": message(lambda: dist.all_gather_into_tensor(torch.empty(4), there)),
        "send": message(lambda: dist.isend(here.to(DEVICE).to("cpu"), 1)),
        "add": message(lambda: here + there),
        "dot": message(lambda: (there * 2).view(1, 2) @ here),
        "fused": message(lambda: torch._foreach_add_([here], [there])),
    }


def places() -> dict[str, torch.device]:
    """Where results are."""
    layer = nn.Linear(2, 2).to(DEVICE)
    y = layer(torch.ones(2, device=DEVICE))
    y.sum().backward()
    assert layer.weight.grad is not None
    there = torch.ones(2, device=DEVICE)
    return {
        "result": y.device,
        "gradient": layer.weight.grad.device,
        "view": there[:1].device,
        "like": torch.empty_like(there).device,
        "cast": there.to(torch.bfloat16).device,
        "scalar": (there + torch.tensor(1.0)).device,
        "pickled": torch.zeros(2).to(there).device,
    }


def collectives(rank: int, world_size: int) -> dict[str, Any]:
    dist.init_process_group(BACKEND)
    comm = make_comm()
    assert comm.native
    axis = Axis("tensor", comm)
    found: dict[str, Any] = {"mistakes": mistakes(), "places": places()}
    axis.traffic.reset()
    found["scalar"] = axis.all_reduce(on_device(rank + 1.0)[0]).item()
    found["sum"] = axis.all_reduce(on_device(1.0, 2.0, 3.0)).tolist()
    found["sent"] = dict(axis.traffic.elements), dict(axis.traffic.bytes)
    axis.traffic.reset()
    mine = (torch.arange(6.0).view(2, 3) + 10 * rank).to(DEVICE)
    found["gathered"] = [axis.all_gather(mine, dim).tolist() for dim in (0, 1, -1)]
    found["gathered, sent"] = axis.traffic.elements["all_gather"]
    found["gathered, transposed"] = axis.all_gather(mine.T, 0).tolist()
    found["gathered, uneven"] = axis.all_gather(mine[: rank + 1], 0, sizes=[1, 2]).tolist()
    part = TensorPart((4, 3), 0, ((2 * rank, 2),))
    full = full_of(torch.full((2, 3), float(rank)), part, axis)
    found["full"] = full.tolist(), full.device
    tied = torch.full((3,), float(rank + 1))
    Share(pipeline=comm, tied_group=comm.group).sum_tied(tied)
    found["tied"] = tied.tolist(), tied.device
    norm = global_norm(_flats(comm) if rank else [], comm)
    found["norm"] = norm.item(), norm.device
    uneven = torch.zeros(5, device=DEVICE)
    uneven.split([2, 3])[rank].fill_(rank + 1.0)
    comm.all_gather(uneven, sizes=[2, 3]).wait()
    found["uneven"] = uneven.tolist()
    return found


def _flats(comm: Comm) -> list[Any]:
    """Flat buffers whose gradients are ones: 2 x 2 + 2 of them."""
    model = nn.Linear(2, 2)
    config = ZeROConfig.of(1, sharding=ShardingConfig(min_unit_numel=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = Mesh.data_only(Comm(None, None))
    engine = Engine(
        model, [optimizer], config=config, precision=resolve_precision("32-true"), mesh=alone, device=DEVICE
    )
    engine.begin_step()
    loss = model(torch.ones(1, 2, device=DEVICE)).sum()
    engine.end_forward()
    engine.begin_backward(eager=True)
    loss.backward()
    engine.end_backward()
    engine.finish(0)
    return engine.flats


def test_collectives() -> None:
    ranks = spawn(on_native_device, 2, collectives, init_process_group=False)
    for found in ranks:
        assert found["scalar"] == 3.0
        assert found["sum"] == [2.0, 4.0, 6.0]
        assert found["sent"] == ({"all_reduce": 1 + 3}, {"all_reduce": 4 + 12})  # 2 (n - 1) / n of the elements
        one, other = (torch.arange(6.0).view(2, 3) + 10 * rank for rank in range(2))
        assert found["gathered"] == [torch.cat([one, other], dim).tolist() for dim in (0, 1, -1)]
        assert found["gathered, sent"] == 3 * 6
        assert found["gathered, transposed"] == torch.cat([one.T, other.T]).tolist()
        assert found["gathered, uneven"] == torch.cat([one[:1], other]).tolist()
        assert found["full"] == ([[0.0] * 3] * 2 + [[1.0] * 3] * 2, HOST)
        assert found["tied"] == ([3.0] * 3, HOST)
        assert found["norm"] == (pytest.approx(6**0.5), DEVICE)
        assert found["uneven"] == [1.0, 1.0, 2.0, 2.0, 2.0]
        refused = {"all_reduce", "broadcast", "all_gather", "send"}
        for mistake, message in found["mistakes"].items():
            assert ("no backend type" if mistake in refused else "expected all tensors") in message, mistake
        assert set(found["places"].values()) == {DEVICE}


STEPS = 3
RUNS: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2 with offload": {"stage": 2, "offload": "cpu"},
    "zero3": {"stage": 3},
    "zero3 with offload": {"stage": 3, "offload": "cpu"},
    "tensor": {"stage": 1, "parallel.tensor.size": 2, "checkpoint": "file"},
    "tensor with offload": {"stage": 1, "parallel.tensor.size": 2, "offload": "cpu", "checkpoint": "file"},
    "pipeline with tied weights and offload": {"stage": 1, "parallel.pipeline.size": 2, "offload": "cpu"},
    "context": {"stage": 1, "parallel.context": 2},
}


def train_each(rank: int, world_size: int, runs: list[Run], folder: str) -> tuple[list[Outcome], list[str]]:
    """Train, and save the last step of the runs that save a file. Returns the files' entries too."""
    outcomes: list[Outcome] = []
    for i, run in enumerate(runs):
        if (run.options or {}).get("checkpoint") == "file":
            run.save = (STEPS, f"{folder}/{i}.ckpt")
        outcomes.append(train(rank, world_size, run))
    return outcomes, sorted(path.name for path in Path(folder).iterdir())


def test_training_and_saving(tmp_path: Path) -> None:
    """The numbers of one process, with every kind of parallelism, and a file that plain torch reads."""
    expected = plain(Run(steps=STEPS))
    runs = [Run(options, steps=STEPS) for options in RUNS.values()]
    outcomes, saved = spawn(on_native_device, 2, train_each, runs, str(tmp_path), init_process_group=False)[0]
    assert not unequal(expected, runs, outcomes)
    assert saved == ["4.ckpt", "5.ckpt"]
    for name, outcome in zip(saved, outcomes[4:6], strict=True):
        checkpoint = torch.load(tmp_path / name, weights_only=True)
        assert all(torch.equal(v, outcome.weights[k]) for k, v in checkpoint["state_dict"].items())
        moments = [s["exp_avg"] for s in checkpoint["optimizer_states"][0]["state"].values()]
        assert {m.shape for m in moments} == {v.shape for v in expected.weights.values()}
        assert all(bool(m.any()) for m in moments)


def test_experts_on_different_ranks(tmp_path: Path) -> None:
    whole = Run({"stage": 1}, experts={"num_experts": 4}, steps=STEPS)
    native = Run({"stage": 1, "parallel.expert": 2, "checkpoint": "file"}, experts=whole.experts, steps=STEPS)
    expected = spawn(train, 2, whole, init_process_group=False)[0]
    outcomes, saved = spawn(on_native_device, 2, train_each, [native], str(tmp_path), init_process_group=False)[0]
    assert not unequal(expected, [native], outcomes)
    assert saved == ["0.ckpt"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "module",
    [
        "test_parity",
        "test_offload",
        "test_tensor_parallel",
        "test_sequence_parallel",
        "test_pipeline",
        "test_expert_parallel",
        "test_checkpoint_file",
        "test_checkpoint_folder",
    ],
)
def test_the_tests_of_training(module: str) -> None:
    """What runs over gloo passes on the native device too, but torch's own collectives.

    Nor does torch compile anything under a dispatch mode, which is what the native device is made of.
    """
    left_out = "not test_compiled_blocks_and_layers_around_them and not test_torchs_own_tools_read_the_folder"
    options = ["-q", "-x", "-o", "timeout=1500", "-k", left_out, "-m", "not slow"]
    command = [sys.executable, "-m", "pytest", *options, f"tests/dist/{module}.py"]
    found = subprocess.run(
        command, cwd=ROOT, env={**os.environ, NATIVE: "1"}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout[-4000:]
