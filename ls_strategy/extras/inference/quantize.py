"""Choose and quantize the linear layers of a model.

Linear layers of the repeated blocks are quantized, and output heads to int8. Embeddings, norms, biases, routers and
experts keep their dtype, and so does a head that shares its weight with an embedding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ls_strategy.blocks import is_linear
from ls_strategy.errors import PlanError
from ls_strategy.extras.inference import rounding
from ls_strategy.extras.inference.linear import FORMATS, Format, quantize_linear
from ls_strategy.moe.sparse import SparseLayer
from ls_strategy.parallel.tensor.heads import width_in
from ls_strategy.parallel.tensor.plan_from_names import uniform_blocks
from ls_strategy.parallel.tensor.resolved_plan import plain_name

_ROUTERS = ("gate", "router", "classifier", "shared_expert_gate")
"""Layers that choose experts: they are small, and their rounding errors change the choice."""


@dataclass
class QuantizationReport:
    """Report of which linear layers of a model were quantized, and of the bytes saved."""

    format: Format
    # Quantized layers by name; int8 where no int4 group size divides the input features, and for output heads.
    layers: dict[str, Format] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)  # linear layers that were not quantized, and why
    bytes_before: int = 0  # bytes of parameters and buffers on this rank, each storage counted once
    bytes_after: int = 0

    def describe(self) -> str:
        """Return one line for a log."""
        counts = ", ".join(f"{list(self.layers.values()).count(f)} {f}" for f in FORMATS if f in self.layers.values())
        kept = f", {len(self.kept)} kept" if self.kept else ""
        return (
            f"quantized linear layers: {counts or 'none'}{kept}; weights reduced from {self.bytes_before / 1e6:,.1f} "
            f"to {self.bytes_after / 1e6:,.1f} MB"
        )


class Quantizer:
    """Quantizes the chosen layers of one model as they get their values."""

    def __init__(
        self, model: nn.Module, format: Format, *, heads: Collection[nn.Module] = (), biases_later: Collection[int] = ()
    ) -> None:
        """Choose the layers, without changing them. Not collective.

        Args:
            model: the model, on meta or not. Each rank of a tensor-parallel model rounds its own shards.
            format: format of the blocks' layers.
            heads: linear layers outside of the blocks.
            biases_later: ``id`` of row layers whose bias is added after the sum over ranks.

        Raises:
            PlanError: no layer can be quantized.
        """
        self.report = QuantizationReport(format, bytes_before=weight_bytes(model))
        self.report.bytes_after = self.report.bytes_before
        self._biases_later = biases_later
        self._waiting: dict[int, tuple[str, Format]] = {}
        for name, module, wanted, why_not in _candidates(model, format, heads, biases_later):
            if why_not:
                self.report.kept[name] = why_not
            else:
                fits = rounding.group_size(width_in(module)) is not None
                self._waiting[id(module)] = name, wanted if fits else "int8"
        if not self._waiting:
            kept = "; ".join(f"{name} {why}" for name, why in list(self.report.kept.items())[:3])
            raise PlanError(
                f"Got quantize={format!r}, but the model has no linear layer in a list of repeated blocks to quantize"
                + (f" ({kept})." if kept else ".")
                + " Set quantize=None."
            )

    def apply(self, root: nn.Module) -> None:
        """Quantize in place the chosen layers of ``root`` that have not been quantized yet. They must have values."""
        for module in root.modules():
            name, wanted = self._waiting.pop(id(module), (None, None))
            if name is None or wanted is None:
                continue
            before = module.weight.nbytes  # type: ignore[union-attr]
            layer = quantize_linear(module, wanted, adds_bias=id(module) not in self._biases_later)
            self.report.layers[name] = wanted
            self.report.bytes_after += layer.weight.nbytes + layer.scales.nbytes - int(before)  # type: ignore[arg-type]


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters and buffers: of each storage once, or of each tensor on meta."""
    sizes: dict[int, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_meta:
            sizes[id(tensor)] = tensor.nbytes
        else:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(sizes.values())


def _candidates(
    model: nn.Module, format: Format, heads: Collection[nn.Module], biases_later: Collection[int]
) -> Iterator[tuple[str, nn.Module, Format, str | None]]:
    """Yield the linear layers of the blocks, and the heads: name, module, format, and why it is not quantized."""
    modules = dict(model.named_modules())
    owners = Counter(id(p) for m in modules.values() for p in m.parameters(recurse=False))
    with_experts = {id(m) for sparse in modules.values() if isinstance(sparse, SparseLayer) for m in sparse.modules()}
    blocks = [m for _, block in uniform_blocks(model) for m in block.modules()]
    wanted: dict[int, Format] = {id(head): "int8" for head in heads}
    wanted.update((id(m), format) for m in blocks if is_linear(m))
    for name, module in modules.items():
        if id(module) not in wanted:
            continue
        weight = module._parameters["weight"]
        assert weight is not None
        parent, _, last = name.rpartition(".")
        routes = last in _ROUTERS and any("expert" in n for n, _ in modules[parent].named_children())
        if owners[id(weight)] > 1:
            why = "shares its weight with another module"
        elif id(module) in with_experts or routes:
            why = "belongs to a layer with experts"
        else:
            why = _why_not(module, weight, bias_later=id(module) in biases_later)
        yield plain_name(name), module, wanted[id(module)], why


def _why_not(module: nn.Module, weight: Tensor, *, bias_later: bool) -> str | None:
    """Return why a layer cannot be quantized; None if it can."""
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "is used by nn.MultiheadAttention without calling its forward"
    if not weight.is_floating_point():
        return f"has {weight.dtype} weights"
    if "forward" in vars(module) and not bias_later:
        return "has a replaced forward"
    return None
