"""Recomputation changes no bit of losses, gradients and buffers, and keeps what the policy says."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen  # registers its operation
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ls_strategy.activations.policy import KINDS, SelectivePolicy
from ls_strategy.activations.recompute import apply_recompute
from ls_strategy.config import RecomputeConfig
from ls_strategy.errors import ConfigError, PlanError

WIDTH = 32
BLOCKS = 4


@pytest.fixture(autouse=True)
def inductor_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch sets this variable when it first looks for a cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


class Block(nn.Module):
    """Attention and a wide layer, with dropout in both."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        h = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=True)
        x = x + h.transpose(1, 2).flatten(-2)
        if scale is not None:
            x = x * scale
        return x + self.wide(x)


class Net(nn.Module):
    """Blocks that are called in different ways."""

    def __init__(self, call: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.call == "keyword":
                x = block(x=x, scale=self.scale.exp())
            elif self.call == "checkpointed":
                x = checkpoint(block, x, use_reentrant=False)  # type: ignore[assignment]
            else:
                x = block(x)
        return x.square().mean()


def gradients(model: nn.Module, *, steps: int = 2, autocast: bool = False) -> list[Tensor]:
    """Losses, gradients of the input and of every parameter, and buffers, after ``steps`` accumulated steps."""
    results = []
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(2, 8, WIDTH, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(x)
        loss.backward()
        assert x.grad is not None
        results += [loss.detach(), x.grad, torch.rand(1)]  # random numbers go on as they would
    return [*results, *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a, b), f"tensor {i}: differs by up to {(a - b).abs().max()}"


class Saved:
    """Counts the bytes that autograd saves, each storage once, without those of parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._seen: dict[int, Tensor] = {}
        self.shapes: list[tuple[int, ...]] = []

    def pack(self, tensor: Tensor) -> Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in self._parameters and pointer not in self._seen:
            self._seen[pointer] = tensor  # alive, so that its address is not used again
            self.shapes.append(tuple(tensor.shape))
        return tensor

    @property
    def bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self._seen.values())

    def count(self, forward: Any) -> int:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda t: t):
            self.loss = forward()
        return self.bytes


FULL = RecomputeConfig(policy="full")
SELECTIVE = RecomputeConfig(policy="selective")


@pytest.mark.sample(8)
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("call", ["plain", "keyword", "checkpointed"])
@pytest.mark.parametrize(
    "config",
    [
        FULL,
        SELECTIVE,
        RecomputeConfig(policy="full", every=2),
        RecomputeConfig(policy="full", block_classes=("Sequential",)),
    ],
    ids=str,
)
def test_no_bit_changes(config: RecomputeConfig, call: str, autocast: bool) -> None:
    expected = gradients(Net(call), autocast=autocast)
    model = Net(call)
    apply_recompute(model, config)
    assert_same(gradients(model, autocast=autocast), expected)


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["module.compile", "torch.compile"])
@pytest.mark.parametrize("config", [FULL, SELECTIVE], ids=["full", "selective"])
def test_no_bit_changes_in_compiled_blocks(config: RecomputeConfig, how: str) -> None:
    def compiled(config: RecomputeConfig | None) -> tuple[list[Tensor], int]:
        torch.compiler.reset()
        model = Net()
        for i, block in enumerate(model.blocks):
            if how == "module.compile":
                block.compile(backend="aot_eager")
            else:
                model.blocks[i] = torch.compile(block, backend="aot_eager")  # type: ignore[assignment]
        if config is not None:
            assert apply_recompute(model, config).compiled
        return gradients(model), Saved(model).count(lambda: model(torch.randn(2, 8, WIDTH, requires_grad=True)))

    expected, plain_bytes = compiled(None)
    actual, recompute_bytes = compiled(config)
    assert_same(actual, expected)
    assert recompute_bytes < plain_bytes
    torch.compiler.reset()


@pytest.mark.wide
def test_blocks_share_compiled_code() -> None:
    """Another copy per block would hit the limit of recompilations, and run the rest of them uncompiled."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    model = nn.Sequential(*[Block() for _ in range(12)])
    for block in model:
        block.compile(backend="aot_eager")
    apply_recompute(nn.ModuleList([model]), SELECTIVE)
    model(torch.randn(2, 8, WIDTH, requires_grad=True)).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1
    torch.compiler.reset()


class Odd(nn.Module):
    """Every kind of argument and result; asks whether two arguments are the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, pair: tuple[Tensor, int], *, more: dict[str, Any]) -> dict[str, Any]:
        first = self.part(x) if pair[0] is x else x
        y = functional.dropout(torch.tanh(first), 0.2, self.training) * pair[1] + more["bias"][0].sin()
        return {"y": y, "rest": (y.exp(), more["text"])}


class OddNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Odd() for _ in range(3)])
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for layer in self.layers:
            result = layer(x, (x, 2), more={"bias": [self.bias * 2], "text": "kept"})
            assert result["rest"][1] == "kept"
            x = result["y"]
            total = total + result["rest"][0].mean()
        return total


@pytest.mark.parametrize("config", [FULL, SELECTIVE], ids=["full", "selective"])
def test_arguments_and_results_of_every_kind(config: RecomputeConfig) -> None:
    expected = gradients(OddNet())
    model = OddNet()
    apply_recompute(model, config)
    assert_same(gradients(model), expected)


def test_tensors_anywhere_in_the_arguments_are_saved_where_hooks_see_them() -> None:
    model = OddNet()
    apply_recompute(model, FULL)
    saved = Saved(model)
    saved.count(lambda: model.layers[0](torch.randn(4, WIDTH), (torch.randn(5, 1, WIDTH), 2), more={
        "bias": [torch.randn(7, 1, WIDTH, requires_grad=True)], "text": "",
    })["y"].sum())  # fmt: skip
    assert {(4, WIDTH), (5, 1, WIDTH), (7, 1, WIDTH)} <= set(saved.shapes)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(2)]
        )
        self.layers = nn.ModuleList([nn.ModuleDict({"body": layer}) for layer in self.layers])
        for layer in self.layers:
            layer.forward = layer["body"].forward  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("config", [FULL, SELECTIVE], ids=["full", "selective"])
def test_running_statistics_are_updated_once(config: RecomputeConfig) -> None:
    expected = gradients(Normalised())
    model = Normalised()
    applied = apply_recompute(model, config)
    assert_same(gradients(model), expected)
    assert int(model.layers[0]["body"][1].num_batches_tracked) == 2  # type: ignore[index]
    own = [layer["body"].forward for layer in model.layers]  # type: ignore[index]
    applied.remove()
    assert [layer.forward for layer in model.layers] == own  # an own forward comes back


def test_full_keeps_the_inputs_of_blocks_and_nothing_else() -> None:
    model = Net()
    x = torch.randn(2, 8, WIDTH, requires_grad=True)
    plain = Saved(model).count(lambda: model(x))
    applied = apply_recompute(model, FULL)
    # The inputs of all blocks, and the input of the loss.
    assert Saved(model).count(lambda: model(x)) == (BLOCKS + 1) * x.nbytes
    applied.remove()
    assert Saved(model).count(lambda: model(x)) == plain > 4 * BLOCKS * x.nbytes


def run_counting(config: RecomputeConfig) -> dict[str, int]:
    """Calls of operations in backward's second forward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls: dict[str, int] = {}

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = function.__name__.split(".")[0]
            calls[name] = calls.get(name, 0) + 1
            return function(*args, **(kwargs or {}))

    model = Net()
    apply_recompute(model, config)
    loss = model(torch.randn(2, 8, WIDTH, requires_grad=True))
    with Count():
        loss.backward()
    return calls


def test_selective_does_not_compute_twice_what_it_keeps() -> None:
    full, selective = run_counting(FULL), run_counting(SELECTIVE)
    assert full["addmm"] == 2 * BLOCKS  # torch stops before the last of three: nothing needs its output
    assert "addmm" not in selective
    assert selective["gelu"] == full["gelu"] == BLOCKS
    kept = run_counting(RecomputeConfig(policy="selective", keep=("aten.gelu",)))
    assert "gelu" not in kept
    assert kept["addmm"] > 0


def test_policies_know_operations_by_kind_and_by_name() -> None:
    aten = torch.ops.aten
    every = SelectivePolicy(tuple(KINDS))
    for operation in (
        aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten._grouped_mm.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default, aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_flash_attention.default,
        aten.convolution.default, torch.ops._c10d_functional.all_gather_into_tensor.default,
        torch.ops._c10d_functional.wait_tensor.default, torch.ops.higher_order.flex_attention,
        torch.ops.torch_attn._varlen_attn.default,
    ):  # fmt: skip
        assert every.keeps(operation), operation
    for operation in (
        aten.gelu.default, aten.native_dropout.default, aten.native_layer_norm.default, aten.mul.Tensor,
        aten._scaled_dot_product_flash_attention_backward.default, torch.ops.c10d.allreduce_.default,
    ):  # fmt: skip
        assert not every.keeps(operation), operation
    assert SelectivePolicy(("aten.mul",)).keeps(aten.mul.Tensor)
    assert SelectivePolicy(("aten.mul.Tensor",)).keeps(aten.mul.Tensor)
    assert not SelectivePolicy(("aten.mul.Tensor",)).keeps(aten.mul.Scalar)


@pytest.mark.parametrize("name", ["matmull", "aten.no_such_operation", "aten", "a.b.c.d"])
def test_unknown_operations_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"attention, collective, convolution, matmul"):
        apply_recompute(Net(), RecomputeConfig(policy="selective", keep=(name,)))


def test_a_model_without_such_modules_is_refused() -> None:
    with pytest.raises(PlanError, match=r"no module of class Blok .* Block, Dropout, GELU"):
        apply_recompute(Net(), RecomputeConfig(policy="full", block_classes=("Blok", "Block")))
    flat = nn.Sequential(nn.Linear(2, 2), nn.ReLU())  # recomputing a single linear layer saves nothing
    with pytest.raises(PlanError, match="Linear, ReLU"):
        apply_recompute(flat, FULL)


def test_names_copies_and_pickles() -> None:
    model = Net()
    names, keys = [n for n, _ in model.named_parameters()], list(model.state_dict())
    applied = apply_recompute(model, FULL)
    assert [n for n, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == keys
    assert inspect.signature(model.blocks[0].forward) == inspect.signature(Block().forward)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    model.eval()
    x = torch.randn(2, 8, WIDTH)
    expected = Net().eval()(x)
    for copied in copies:
        assert torch.equal(copied.eval()(x), expected)  # its own weights
    applied.remove()
    applied.remove()
    assert "forward" not in vars(model.blocks[0])


def test_without_gradients_nothing_is_recomputed() -> None:
    model = Net()
    calls: list[int] = []
    model.blocks[0].wide.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[union-attr]
    apply_recompute(model, FULL)
    with torch.no_grad():
        model(torch.randn(2, 8, WIDTH))
    assert len(calls) == 1


def test_a_forward_that_fails_leaves_nothing_behind() -> None:
    model = Net()
    apply_recompute(model, FULL)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        model(torch.randn(2, 8, WIDTH + 1, requires_grad=True))
    assert_same(gradients(model), gradients(Net()))


def test_frozen_modules_in_evaluation_are_recomputed_too() -> None:
    model = Net().eval().requires_grad_(False)
    x = torch.randn(2, 8, WIDTH, requires_grad=True)
    applied = apply_recompute(model, FULL)
    assert Saved(model).count(lambda: model(x)) == (BLOCKS + 1) * x.nbytes
    applied.remove()
    expected = torch.autograd.grad(model(x), x)[0]
    apply_recompute(model, FULL)
    assert torch.equal(torch.autograd.grad(model(x), x)[0], expected)


def test_models_of_transformers_train_with_their_cache_on() -> None:
    """A block that ran twice would append to it twice."""
    transformers = pytest.importorskip("transformers")

    def train(config: RecomputeConfig | None) -> list[Tensor]:
        torch.manual_seed(0)
        options = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "attention_dropout": 0.1}
        heads = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(use_cache=True, **options, **heads)).train()
        if config is not None:
            apply_recompute(model, config)
        tokens = torch.randint(0, 64, (2, 12))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if config is not None:
            model.eval()
            assert model(input_ids=tokens).past_key_values.get_seq_length() == 12
        return [loss.detach(), *(p.grad for p in model.parameters())]

    expected = train(None)
    assert_same(train(FULL), expected)
    assert_same(train(SELECTIVE), expected)


def test_second_derivatives() -> None:
    def penalty(config: RecomputeConfig | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())])
        outer = nn.ModuleDict({"layers": nn.ModuleList([_Wrapped(model[0])])})
        if config is not None:
            apply_recompute(outer, config)
        x = torch.randn(4, WIDTH, requires_grad=True)
        (g,) = torch.autograd.grad(outer["layers"][0](x).sum(), x, create_graph=True)  # type: ignore[index]
        g.square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert_same(penalty(FULL), penalty(None))


class _Wrapped(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def test_describe() -> None:
    assert apply_recompute(Net(), RecomputeConfig(policy="full", every=2)).describe() == "2 Block, full"
    assert apply_recompute(Net(), SELECTIVE).describe().startswith("4 Block, selective (keeps matmul")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "some"}, "policy='some'"),
        ({"every": 2}, "policy is required"),
        ({"policy": "full", "every": 0}, "every=0"),
        ({"policy": "full", "block_classes": "Block"}, "a list of texts"),
        ({"policy": "selective", "keep": ()}, "empty keep"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RecomputeConfig(**options)


def test_own_forwards_of_instances() -> None:
    """Other libraries replace ``forward`` in the same way."""
    model, reference = Net(), Net()
    for net in (model, reference):
        for block in net.blocks:
            block.forward = functools.partial(block.forward, scale=net.scale)
    apply_recompute(model, FULL)
    assert_same(gradients(model), gradients(reference))
