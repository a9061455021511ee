"""Meta tensors get memory and values; buffers and the modules that stay in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ls_strategy.distributed.comm import Comm
from ls_strategy.distributed.mesh import Mesh
from ls_strategy.errors import PlanError
from ls_strategy.layout import TensorPart
from ls_strategy.zero.setup.materialize import Fp32Boundary, Materializer, place_buffers

CPU = torch.device("cpu")


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def meta_network() -> nn.Sequential:
    with torch.device("meta"):
        return network()


def maker(model: nn.Module, **options: object) -> Materializer:
    return Materializer(model, CPU, options.pop("parts", {}), Mesh.data_only(Comm(None, None)), **options)  # type: ignore[arg-type]


def test_values_are_those_of_the_plain_constructor_and_parameters_keep_their_identity() -> None:
    torch.manual_seed(3)
    plain = network()
    model = meta_network()
    before = list(model.parameters())
    torch.manual_seed(3)
    made = maker(model)
    for p in before:
        made.provide([p])
    made.finish()
    assert {k: v.tolist() for k, v in model.state_dict().items()} == {
        k: v.tolist() for k, v in plain.state_dict().items()
    }
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


def test_only_as_many_modules_are_filled_as_a_unit_needs() -> None:
    model = meta_network()
    maker(model).provide(list(model[0].parameters()))
    assert [p.is_meta for p in model.parameters()] == [False, False, True, True, True, True]


def test_values_of_the_user_and_attributes_of_a_filled_parameter_stay() -> None:
    model = meta_network()
    model[0].bias = nn.Parameter(torch.full((6,), 5.0))
    model[0].weight.decays = False
    maker(model).finish()
    assert model[0].bias.tolist() == [5.0] * 6
    assert not model[0].weight.is_meta
    assert model[0].weight.decays is False


def test_a_part_has_the_values_of_the_full_parameter() -> None:
    torch.manual_seed(3)
    plain = nn.Linear(4, 6)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 6))
    model[0].weight = nn.Parameter(torch.empty(3, 4, device="meta"))
    torch.manual_seed(3)
    maker(model, parts={id(model[0].weight): TensorPart.cut((6, 4), 0, 1, 2)}).finish()
    assert torch.equal(next(model[0].parameters()), plain.weight[3:])


def test_a_module_without_reset_parameters_is_refused() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3, device="meta"))

    with pytest.raises(PlanError, match=r"module '0' \(Bare\) was built without memory .* no reset_parameters"):
        maker(nn.Sequential(Bare())).finish()


def test_absent_parameters_draw_their_numbers_and_take_no_memory() -> None:
    torch.manual_seed(3)
    plain = network()
    model = meta_network()
    torch.manual_seed(3)
    maker(model, absent={id(p) for p in model[0].parameters()}).finish()
    assert model[0].weight.is_meta
    assert all(map(torch.equal, model[2].parameters(), plain[2].parameters()))


def test_buffers_are_cast_but_those_that_are_kept() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    place_buffers(model, CPU, torch.bfloat16, {(id(model[1]), "running_mean")})
    assert [m.running_mean.dtype for m in model] == [torch.bfloat16, torch.float32]  # type: ignore[union-attr]
    assert model[0].num_batches_tracked.dtype == torch.int64  # type: ignore[union-attr]


def test_a_boundary_casts_in_and_out_until_it_is_removed() -> None:
    seen: list[torch.dtype] = []
    module = nn.Identity()
    module.register_forward_hook(lambda _m, args, _out: seen.append(args[0].dtype))
    boundary = Fp32Boundary(module, torch.bfloat16)
    assert module(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.bfloat16
    boundary.remove()
    assert module(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert seen == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_refer_to_their_new_weights(kind: type[nn.RNNBase]) -> None:
    with torch.device("meta"):
        layer = kind(2, 3)
    made = maker(layer)
    made.provide(list(layer.parameters()))
    made.finish()
    held = [ref() for ref in layer._flat_weight_refs if ref is not None]
    assert held == list(layer.parameters())
    assert all(a is b for a, b in zip(layer._flat_weights, layer.parameters(), strict=True))
    layer(torch.ones(1, 2))[0].sum().backward()
    assert layer.weight_ih_l0.grad is not None
