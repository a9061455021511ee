"""DTensor parameters become plain shards, which modules see as DTensors during forward. One rank is enough here."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from ls_strategy.distributed.axis import Axis
from ls_strategy.errors import PlanError, StateError
from ls_strategy.layout import TensorPart
from ls_strategy.parallel.tensor.dtensor import has_dtensors, localize, parallelize


@pytest.fixture(autouse=True)
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tensor_parallel",))
    dist.destroy_process_group()


class Watched(nn.Linear):
    """Records the type of its weight during forward."""

    seen: type | None = None

    def forward(self, input: Tensor) -> Tensor:
        self.seen = type(self.weight)
        return super().forward(input)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.norm = Watched(4, 6), nn.Linear(6, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).relu())


STYLES = {"up": ColwiseParallel(), "down": RowwiseParallel()}
X = torch.ones(2, 4)


def weight(value: Tensor, mesh: DeviceMesh) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(value, mesh, [Shard(0)]))


def test_parameters_are_plain_and_forward_sees_dtensors_and_computes_the_same(mesh: DeviceMesh) -> None:
    model, expected = Mlp(), Mlp()
    parts = parallelize(model, STYLES, mesh, Axis("tensor")).parts
    assert all(type(p) is nn.Parameter and type(p.data) is Tensor for p in model.parameters())
    assert not has_dtensors(model)
    torch.testing.assert_close(model(X), expected(X))
    assert model.up.seen is DTensor
    for net in (model, expected):
        net(X).square().sum().backward()
    for parameter, reference in zip(model.parameters(), expected.parameters(), strict=True):
        assert type(parameter) is nn.Parameter
        assert type(parameter.grad) is Tensor
        torch.testing.assert_close(parameter.grad, reference.grad)
    assert parts[id(model.up.weight)] == TensorPart((6, 4), 0, ((0, 6),))
    assert parts[id(model.down.weight)] == TensorPart((4, 6), 1, ((0, 6),))
    for key in ("down.bias", "norm.weight"):
        assert id(model.get_parameter(key)) not in parts, "replicated"


def test_a_shared_parameter_stays_shared_and_a_frozen_one_frozen(mesh: DeviceMesh) -> None:
    model = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    model[0].weight = model[1].weight = weight(torch.ones(4, 4), mesh).requires_grad_(False)
    localize(model, Axis("tensor"))
    assert model[0].weight is model[1].weight
    assert not model[0].weight.requires_grad


def test_removal_gives_dtensors_of_the_present_values(mesh: DeviceMesh) -> None:
    model = Mlp()
    localized = parallelize(model, STYLES, mesh, Axis("tensor"))
    nn.init.constant_(model.up.weight, 3.0)
    localized.remove()
    assert isinstance(model.up.weight, DTensor)
    assert (model.up.weight.to_local() == 3).all()


def test_a_forward_that_raises_leaves_no_dtensor(mesh: DeviceMesh) -> None:
    model = Mlp()
    parallelize(model, STYLES, mesh, Axis("tensor"))
    with pytest.raises(RuntimeError):
        model.up(torch.ones(2, 3))
    assert "weight" not in vars(model.up)


def test_a_copy_computes_with_its_own_parameters(mesh: DeviceMesh) -> None:
    model = Mlp()
    parallelize(model, STYLES, mesh, Axis("tensor"))
    copied, before = copy.deepcopy(model), model(X)
    nn.init.zeros_(model.down.weight)
    torch.testing.assert_close(copied(X), before)


def test_a_localized_model_cannot_be_pickled(mesh: DeviceMesh) -> None:
    model = nn.Linear(4, 4, bias=False)
    model.weight = weight(torch.ones(4, 4), mesh)
    localize(model, Axis("tensor"))
    with pytest.raises(StateError, match=r"sharded over the tensor-parallel ranks, so it cannot be pickled"):
        pickle.dumps(model)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_partial_parameter_is_refused_and_kept(mesh: DeviceMesh) -> None:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]))
    with pytest.raises(PlanError, match=r"placements \(Partial\(sum\),\).* Remove fully_shard"):
        localize(model, Axis("tensor"))
    assert has_dtensors(model)


def test_a_list_of_parameters_is_refused(mesh: DeviceMesh) -> None:
    model = nn.ParameterList([weight(torch.ones(4, 4), mesh)])
    with pytest.raises(PlanError, match="a DTensor in a ParameterList, which has no forward"):
        localize(model, Axis("tensor"))


def test_a_mesh_of_two_dimensions_is_refused() -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)]))
    with pytest.raises(PlanError, match=r"on a mesh of dimensions \('data', 'tensor'\)"):
        localize(model, Axis("tensor"))
