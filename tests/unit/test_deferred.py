"""What is done to weights on meta is done again when they get memory, with the bits of a run that had memory."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from ls_strategy import MoE
from ls_strategy.distributed.comm import Comm
from ls_strategy.distributed.mesh import Mesh
from ls_strategy.errors import PlanError
from ls_strategy.meta_init.deferred import deferred_of, note_deferred
from ls_strategy.meta_init.program import needed, place_of
from ls_strategy.pretrained.huggingface import without_memory
from ls_strategy.zero.setup.materialize import Materializer, require_values

CPU = torch.device("cpu")


def fill(model: nn.Module, *, backwards: bool = False) -> None:
    """As the strategy does it, with every parameter as a unit."""
    note_deferred(model)
    require_values(model, ())
    made = Materializer(model, CPU, {}, Mesh.data_only(Comm(None, None)))
    params = list(model.parameters())
    for p in reversed(params) if backwards else params:
        made.provide([p])
    made.finish()


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def compare(build: Callable[[], nn.Module], *, backwards: bool = False) -> nn.Module:
    """Build with and without memory, and compare the bits and the generator afterwards."""
    torch.manual_seed(7)
    expected = build()
    after = torch.randn(3)
    torch.manual_seed(7)
    with without_memory(CPU):
        model = build()
    state = torch.get_rng_state()
    fill(model, backwards=backwards)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(torch.randn(3), after)
    found = tensors(model)
    assert not any(t.is_meta for t in found.values())
    for name, value in tensors(expected).items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
    return model


class Bag(nn.Module):
    """A module without `reset_parameters`."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        for name, value in values.items():
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value)


def parameter(*shape: int, **options: Any) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, **options))


CASES: dict[str, Callable[[], nn.Module]] = {}


def case(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    CASES[build.__name__] = build
    return build


@case
def recurrent_layers() -> nn.Module:
    return nn.Sequential(nn.LSTM(3, 4, num_layers=2), nn.GRU(4, 2))


@case
def weights_computed_before_every_forward() -> nn.Module:
    """torch's old functions keep the last one, with its graph."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return torch.nn.utils.weight_norm(torch.nn.utils.spectral_norm(nn.Linear(2, 3)), "bias")


@case
def factories() -> nn.Module:
    return Bag(
        ones=nn.Parameter(torch.ones(3)),
        full=nn.Parameter(torch.full((2, 2), 3.5)),
        randn=nn.Parameter(torch.randn(5, 5)),
        rand=nn.Parameter(torch.rand(17, dtype=torch.float64)),
        numbers=nn.Parameter(torch.tensor([1.0, 2.0])),
        like=nn.Parameter(torch.randn_like(torch.empty(4, 3))),
        arange=torch.arange(6),
        eye=torch.eye(3),
        linspace=torch.linspace(0, 1, 4),
        order=torch.randperm(9),
        new=torch.ones(1).new_tensor([4, 5]),
        counts=torch.tensor(0),
    )


@case
def in_place_and_through_views() -> nn.Module:
    weight, table = parameter(6, 4), parameter(5, 3)
    weight.data.normal_(0, 0.02)
    with torch.no_grad():
        weight[0] = 0
        weight[1:3, ::2].uniform_(-1, 1)
        weight.t()[3].mul_(2).add_(weight[:, 0])
        weight.detach().view(-1)[5:9].fill_(7)
        table.copy_(torch.outer(torch.arange(5.0), torch.tensor([1.0, 2.0, 3.0])))
        table[:, 0] = torch.sin(table[:, 1])
    return Bag(weight=weight, table=table)


@case
def values_of_another_moment() -> nn.Module:
    a, b, c = parameter(3), parameter(3), parameter(3)
    with torch.no_grad():
        a.fill_(1)
        b.copy_(a)
        a.mul_(5)
        c.copy_(a + b)
        b.add_(a)
        a.zero_()
        a.copy_(a)
        c.copy_(c.flip(0))
    return Bag(a=a, b=b, c=c)


@case
def initializers() -> nn.Module:
    made = {name: parameter(8, 6) for name in ("trunc", "tail", "orthogonal", "wide", "sparse", "xavier", "kaiming")}
    nn.init.trunc_normal_(made["trunc"], std=0.02)
    nn.init.trunc_normal_(made["tail"], a=1.5, b=3)
    nn.init.orthogonal_(made["orthogonal"], gain=2)
    nn.init.orthogonal_(made["wide"].data.view(4, 12))
    nn.init.sparse_(made["sparse"], sparsity=0.5)
    nn.init.xavier_normal_(made["xavier"])
    nn.init.kaiming_uniform_(made["kaiming"], generator=torch.Generator().manual_seed(3))
    dirac = parameter(4, 4, 3)
    nn.init.dirac_(dirac, 2)
    return Bag(**made, dirac=dirac)


@case
def overwritten() -> nn.Module:
    """The constructors' draws are lost, and still move the generator."""
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Embedding(9, 4, padding_idx=2), nn.Conv1d(3, 5, 2))

    def init(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(mean=0.0, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.bias)

    return model.apply(init)


@case
def reused() -> nn.Module:
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    copied = copy.deepcopy(first)
    with torch.no_grad():
        copied.weight.mul_(2)
    half = nn.Linear(4, 4).to(torch.bfloat16)
    moved = nn.Linear(4, 4)
    moved.weight.data = torch.linalg.svd(first.weight.detach())[0]
    return nn.ModuleList([first, last, copied, half, moved])


@case
def parametrized() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), parametrizations.spectral_norm(nn.Linear(4, 3)))


@case
def seeds_and_draws_in_between() -> nn.Module:
    made = {name: parameter(20) for name in "abcdef"}
    nn.init.normal_(made["a"])
    made["host"] = nn.Parameter(torch.rand(5, device="cpu"))
    nn.init.normal_(made["b"])
    with torch.device("cpu"):
        made["layer"] = nn.Linear(3, 3).weight
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        nn.init.normal_(made["c"])
    nn.init.normal_(made["d"], generator=torch.Generator().manual_seed(5))
    state = torch.get_rng_state()
    nn.init.normal_(made["e"])
    torch.set_rng_state(state)
    nn.init.normal_(made["f"])
    assert state.is_cpu
    return Bag(**made)


@case
def values_that_python_needs() -> nn.Module:
    rates = [x.item() for x in torch.linspace(0, 0.3, 4)]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3])
    weight = parameter(4, 5)
    nn.init.normal_(weight)
    with torch.no_grad():
        if weight.std() > 1e-3:
            weight.div_(weight.std().item())
        weight[weight > 1] = 0
        weight[weight.abs().sum(1) > 100] = 1
    chosen = weight.detach()[weight[:, 0] > 0]
    return Bag(weight=weight, copied=weight.detach().to("cpu"), chosen=nn.Parameter(chosen))


@case
def random_functions_of_values() -> nn.Module:
    start = torch.rand(40)
    mask = torch.bernoulli(start)
    noisy = nn.functional.dropout(start, 0.5)
    counts = torch.poisson(start * 4)
    return Bag(mask=mask, noisy=nn.Parameter(noisy), counts=counts, last=nn.Parameter(torch.rand(3)))


@case
def captured_from_the_host() -> nn.Module:
    table = torch.arange(4.0, device="cpu")
    weight = parameter(4)
    with torch.no_grad():
        weight.copy_(table)
    table.zero_()
    import numpy

    made = torch.as_tensor(numpy.array([3.0, 4.0]))
    return Bag(weight=weight, kept=torch.tensor([1.0, 2.0]) * made)


@case
def experts() -> nn.Module:
    return nn.ModuleList([MoE(4, nn.Linear(4, 4), num_experts=3), MoE(4, lambda: nn.Linear(4, 4), num_experts=2)])


@case
def default_dtype() -> nn.Module:
    torch.set_default_dtype(torch.bfloat16)
    try:
        return Bag(a=nn.Parameter(torch.randn(40)), b=torch.arange(4) / 3, c=nn.Linear(3, 20).weight)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_a_run_with_memory(name: str) -> None:
    compare(CASES[name])
    compare(CASES[name], backwards=True)


def test_attributes_and_ties_stay() -> None:
    def build() -> nn.Module:
        model = CASES["reused"]()
        model[0].weight.no_decay = True
        model[1].weight.requires_grad_(False)
        return model

    model = compare(build)
    assert model[0].weight is model[1].weight
    assert model[0].weight.no_decay
    assert not model[0].weight.requires_grad
    assert deferred_of(model[0].weight) is None


def test_tensors_that_are_neither_parameters_nor_buffers() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3))
        model[0].table = torch.arange(3.0)
        model[0].more = {"a": [torch.rand(2), torch.tensor(4)], "b": model[0].table}
        return model

    layer: Any = compare(build)[0]
    torch.manual_seed(7)
    expected: Any = build()[0]
    assert torch.equal(layer.table, expected.table)
    assert [t.tolist() for t in layer.more["a"]] == [t.tolist() for t in expected.more["a"]]
    assert layer.more["b"] is layer.table


def test_modules_that_nothing_filled_fill_themselves() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = parameter(3)
            self.scale = nn.Parameter(torch.full((3,), 2.0))
            self.register_buffer("table", torch.arange(3.0))

        def reset_parameters(self) -> None:
            nn.init.constant_(self.weight, 5)
            nn.init.constant_(self.scale, 1)
            self.table.zero_()

    with without_memory(CPU):
        model = nn.Sequential(Late(), copy.deepcopy(Late()))
    fill(model)
    for late in model:
        assert [t.tolist() for t in tensors(late).values()] == [[5.0] * 3, [2.0] * 3, [0.0, 1.0, 2.0]]


def test_dead_draws_are_not_replayed() -> None:
    with without_memory(CPU):
        layer = nn.Linear(4, 4)
        nn.init.zeros_(layer.weight)
    assert [operation.name for operation in needed([place_of(layer.weight)])] == ["zero_.default"]


def test_lists_of_numbers_are_indices() -> None:
    def build() -> Bag:
        table = torch.arange(12.0).view(4, 3)
        table[[0, 2], 1:] = -1.0
        mask = [True, False, False, True]
        return Bag(rows=nn.Parameter(table[[2, 0]] + 1), element=table[[1, 2], [2, 0]].clone(), few=table[mask].clone())

    with without_memory(CPU):
        model = build()
    fill(model)
    found, expected = tensors(model), tensors(build())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_what_is_not_known_is_refused() -> None:
    with torch.device("meta"):
        elsewhere = torch.ones(3)
    with without_memory(CPU):
        model = Bag(weight=nn.Parameter(elsewhere + 1))
    with pytest.raises(PlanError, match=r"parameter 'weight': .*made elsewhere.*torch\.device\('cpu'\)"):
        fill(model)
    with without_memory(CPU), pytest.raises(PlanError, match="made elsewhere"):
        elsewhere.sum().item()


def test_a_large_tensor_that_changes_later_is_refused() -> None:
    table = torch.ones(1 << 17)
    with without_memory(CPU):
        model = Bag(weight=parameter(1 << 17), table=torch.empty(1 << 17).copy_(table))
        model.weight.data.copy_(table)
    table.zero_()
    with pytest.raises(PlanError, match=r"parameter 'weight': .*host memory that was changed"):
        fill(model)


def test_nothing_but_nothing_is_refused() -> None:
    with without_memory(CPU):
        model = nn.Sequential(Bag(weight=parameter(3)))
    with pytest.raises(PlanError, match=r"module '0' \(Bag\).*nothing gave.*no reset_parameters"):
        fill(model)


def test_without_draws_the_generator_stays() -> None:
    state = torch.get_rng_state()
    with without_memory(CPU, draws=False):
        model = nn.Linear(50, 50)
    assert torch.equal(torch.get_rng_state(), state)
    fill(model)
    assert 0.05 < model.weight.std().item() < 0.1


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("name", ["GPT2", "Llama", "Bert", "Swin", "T5", "Wav2Vec2"])
def test_transformers_from_config(name: str) -> None:
    import transformers

    sizes: dict[str, dict[str, Any]] = {
        "GPT2": {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8},
        "Llama": {
            "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
        "Bert": {
            "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
        "T5": {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2},
        "Wav2Vec2": {
            "vocab_size": 8, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 16, "conv_dim": (8, 8), "conv_stride": (2, 2), "conv_kernel": (3, 3),
            "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
        },
        "Swin": {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2]},
    }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**sizes[name])

    def build() -> nn.Module:
        return transformers.AutoModel.from_config(config)

    compare(build, backwards=True)


def test_values_that_are_lost_before_the_fit_are_an_error() -> None:
    with without_memory(CPU):
        model = nn.Sequential(nn.Linear(2, 3))
    model.half()  # outside, nothing is recorded
    with pytest.raises(PlanError, match=r"'0.weight' was built without memory, and was changed after"):
        fill(model)
    with without_memory(CPU):
        inside = nn.Sequential(nn.Linear(2, 3)).half()
    fill(inside)
    assert inside[0].weight.dtype == torch.float16
