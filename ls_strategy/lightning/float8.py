"""``precision.matmul="fp8"``: linear layers of a module multiply in fp8 while a Trainer runs, as torchao computes it.

A layer becomes torchao's in place: it stays the same object with the same parameter, name and hooks, and checkpoints
hold plain weights. Stage 3 gathers the full weight before a layer runs, so scales are those of one process; ranks that
share a layer agree on them (`ls_strategy.lightning.float8_split`). If one cast of the weight serves forward and
backward, stage 3 gathers that (`ls_strategy.zero.flat.float8`), and torchao's product gets it from here.

Source: torchao.float8 (https://github.com/pytorch/ao), and its paper, arXiv 2507.16099.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ls_strategy import device as dev
from ls_strategy.config import PrecisionConfig
from ls_strategy.errors import PlanError
from ls_strategy.host.pytorch import rank_zero_info
from ls_strategy.lightning.float8_split import WeightSplit, split_product
from ls_strategy.parallel.tensor.dtensor import Localized
from ls_strategy.parallel.tensor.shard import TensorParallel, linear_product
from ls_strategy.precision import PrecisionPolicy
from ls_strategy.zero.flat.float8 import float8_weight
from ls_strategy.zero.flat.parameters import unnoticed
from ls_strategy.zero.setup.frozen import linear_layers
from ls_strategy.zero.setup.kept import kept_in_fp32

_MULTIPLE = 16
"""Both sizes of a weight are multiples of this in products of fp8."""

_FIRST_CAPABILITY = (8, 9)
"""Of GPUs that multiply in fp8."""


class _Context:
    """Stands for the context of torchao's product."""

    def __init__(self, config: Any = None, mm_config: Any = None, saved: tuple[Tensor, ...] = ()) -> None:
        self.config, self.linear_mm_config, self.saved_tensors = config, mm_config, saved

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


class _Product(torch.autograd.Function):
    """torchao's product with a weight that is in fp8 already. Autograd saves its bytes, the version of which counts."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, input: Tensor, weight: Tensor, values: Tensor, scale: Tensor, mm_config: Any, config: Any
    ) -> Tensor:
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args as product

        ctx.save_for_backward(input, values, scale)
        ctx.mm_config, ctx.config, ctx.dtype = mm_config, config, weight.dtype
        transposed = _wrapped(values, scale, weight.dtype, mm_config).t()
        return product.forward(_Context(), input, transposed, mm_config, config)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args as product

        input, values, scale = ctx.saved_tensors
        saved = input, _wrapped(values, scale, ctx.dtype, ctx.mm_config).t()
        to_input, to_transposed, *_ = product.backward(_Context(ctx.config, ctx.mm_config, saved), grad)
        return to_input, to_transposed.t(), None, None, None, None


def _wrapped(values: Tensor, scale: Tensor, dtype: torch.dtype, mm_config: Any) -> Tensor:
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

    return Float8TrainingTensor(values, scale, dtype, mm_config, GemmInputRole.WEIGHT)


class _PlainInCopies:
    """Base of the classes of layers that multiply in fp8: a copy or pickle of one has the class that it had before."""

    plain: type[nn.Linear]
    added: frozenset[str]
    """Attributes that torchao's layer has and the other one has not."""
    reads_weight_in: torch.dtype | None
    """The dtype of the one cast of the weight that serves forward and backward. None: there are several."""

    def forward(self, input: Tensor) -> Tensor:
        """Multiply, with the weight that stage 3 has gathered in fp8, if it has."""
        if self.reads_weight_in is None or torch.compiler.is_dynamo_compiling():
            return super().forward(input)  # type: ignore[misc,no-any-return]
        layer: Any = self
        gathered = float8_weight(layer.weight)
        if gathered is None:
            return super().forward(input)  # type: ignore[misc,no-any-return]
        input = _as_autocast(input)
        with unnoticed():
            output = _Product.apply(input, layer.weight, *gathered, layer.linear_mm_config, layer.config)
        return output if layer.bias is None else output + layer.bias.to(output.dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        make, _, state, *rest = super().__reduce_ex__(protocol)
        assert isinstance(state, dict)
        return make, (self.plain,), {name: value for name, value in state.items() if name not in self.added}, *rest


class _SplitInCopies(_PlainInCopies):
    """The same of layers whose weights are sharded over tensor-parallel ranks."""

    def forward(self, input: Tensor) -> Tensor:
        """Multiply this rank's part. Collective over the ranks that share the layer."""
        layer: Any = self
        split: WeightSplit = layer.weight_split
        output = split_product(_as_autocast(input), layer.weight, split, layer.linear_mm_config, layer.config)
        return output if layer.bias is None or split.sums_outside else output + layer.bias.to(output.dtype)


def _as_autocast(input: Tensor) -> Tensor:
    """Return the input of a product in the dtype of autocast, if it is on, as torchao asks."""
    return input.to(torch.get_autocast_gpu_dtype()) if torch.is_autocast_enabled() else input


@cache
def _made_of(
    plain: type[nn.Linear], made: type[nn.Linear], added: frozenset[str], reads_weight_in: torch.dtype | None
) -> Any:
    """Return the class of a converted layer: one for all layers of a class, which share graphs then."""
    first = _SplitInCopies if "weight_split" in added else _PlainInCopies
    bases = (first, made) if plain is nn.Linear else (first, made, plain)
    return type(made.__name__, bases, {"plain": plain, "added": added, "reads_weight_in": reads_weight_in})


class Float8Layer:
    """A linear layer that multiplies in fp8 while ``on``, from construction until `remove`."""

    def __init__(self, layer: nn.Linear, converted: nn.Linear, split: WeightSplit | None = None) -> None:
        """``converted``: a layer that torchao has converted. ``split``: how ranks share the weight, if they do."""
        self._layer: Any = layer
        self._plain = type(layer)
        self._state = added_by(converted) | ({} if split is None else {"weight_split": split})
        # Attention reads the weight of its last layer without calling the layer.
        whole = split is None and not isinstance(layer, NonDynamicallyQuantizableLinear)
        self._made = _made_of(
            self._plain, type(converted), frozenset(self._state), _one_cast(converted) if whole else None
        )
        self._forward = vars(layer).get("forward")
        """That of tensor parallelism, which leaves the bias out."""
        self._on = False
        self.on = True

    @property
    def on(self) -> bool:
        """Whether the layer multiplies in fp8."""
        return self._on

    @on.setter
    def on(self, on: bool) -> None:
        if on == self._on:
            return
        self._on = on
        self._layer.__class__ = self._made if on else self._plain
        for name, value in self._state.items():
            if on:
                vars(self._layer)[name] = value
            else:
                vars(self._layer).pop(name, None)
        if self._forward is not None:
            if on:
                vars(self._layer).pop("forward", None)
            else:
                vars(self._layer)["forward"] = self._forward

    def remove(self) -> None:
        """Make the layer what it was."""
        self.on = False


def added_by(converted: nn.Linear) -> dict[str, Any]:
    """Return the attributes of a layer that torchao has converted which a plain one has not."""
    plain = vars(nn.Linear(1, 1, device="meta"))
    return {name: value for name, value in vars(converted).items() if name not in plain}


def _one_cast(converted: Any) -> torch.dtype | None:
    """Return the dtype of the one cast of the weight that serves forward and backward. None: it is cast twice.

    With a scale per row, the weight and its transpose have scales of their own. Those that are powers of two would give
    the same digits for most numbers, but not for the smallest, which have fewer digits in fp8.
    """
    from torchao.float8.config import ScalingGranularity

    config = converted.config
    cast = config.cast_config_weight
    once = cast == config.cast_config_weight_for_grad_input and not config.round_scales_to_power_of_2
    return cast.target_dtype if once and cast.scaling_granularity is ScalingGranularity.TENSORWISE else None


def multiply_in_fp8(
    module: nn.Module,
    options: PrecisionConfig,
    policy: PrecisionPolicy,
    device: torch.device,
    *,
    tensor: TensorParallel | Localized | None = None,
    log: bool = True,
) -> list[Float8Layer]:
    """Let linear layers of ``module`` multiply in fp8, but none that stays in fp32. Not collective.

    Args:
        module: the full module, or a tensor-parallel one.
        options: ``options.float8`` says whether, and how.
        policy: of ``Trainer(precision=...)``.
        device: of the products.
        tensor: what has sharded the layers of the module over ranks.
        log: say how many layers do.

    Raises:
        PlanError: torchao is not installed, no layer can multiply in fp8, or numbers would depend on the number of
            tensor-parallel ranks. On all ranks alike.
    """
    if options.float8 is None:
        return []
    if policy.compute == torch.float64:
        raise PlanError(
            "Got precision.matmul='fp8' with Trainer(precision='64-true'), which asks for more digits than fp32 has. "
            "Choose one of them."
        )
    emulated = dev.compute_capability(device) < _FIRST_CAPABILITY
    recipe = options.float8.recipe
    converted = _convert(recipe, emulated=emulated)
    # Authors of models list more for fp16 than for bf16: what either needs in fp32 is not rounded to fp8.
    kept = kept_in_fp32(module, options.fp32_modules, torch.float16).params
    found: dict[str, Any] = linear_layers(module, options.float8.skip, "precision.matmul.skip")
    parts = {} if tensor is None else tensor.parts

    def shape(layer: Any) -> tuple[int, ...]:
        part = parts.get(id(layer.weight))
        return tuple(layer.weight.shape) if part is None else part.full_shape

    layers = {n: m for n, m in found.items() if _fits(m, converted, shape(m)) and id(m.weight) not in kept}
    if not layers:
        raise PlanError(
            f"Got precision.matmul='fp8', but {type(module).__name__} has no nn.Linear, outside of output heads, "
            "routers, precision.fp32_modules and precision.matmul.skip, with in_features and out_features that are "
            f"multiples of {_MULTIPLE}. Change the sizes, or leave matmul out."
        )
    left = [name for name in found if name not in layers]
    if log:
        rank_zero_info(
            f"ZeROStrategy: {len(layers)} linear layers multiply in fp8 ({recipe}"
            + (f"; emulated on {device.type}, more slowly than without" if emulated else "")
            + (f"); {len(left)} do not, such as {left[0]}" if left else ")")
        )
    splits = {} if tensor is None else _splits(layers, recipe, tensor)
    return [Float8Layer(layer, converted, splits.get(name)) for name, layer in layers.items()]


def _splits(layers: dict[str, Any], recipe: str, tensor: TensorParallel | Localized) -> dict[str, WeightSplit]:
    """Return how the weights of layers are sharded, by name.

    Raises:
        PlanError: scales cannot be those of one process.
    """
    if isinstance(tensor, Localized):
        raise PlanError(
            "Got precision.matmul='fp8' for layers partitioned by parallelize_module or a plan in torch's styles. Set "
            "parallel.tensor.plan='auto' or a plan in this package's styles, or leave matmul out."
        )
    found: dict[str, WeightSplit] = {}
    for name, layer in layers.items():
        part = tensor.parts.get(id(layer.weight))
        if part is None and id(layer.weight) not in tensor.partial:
            continue  # every rank computes all of it
        if part is None:
            if recipe != "rowwise_with_gw_hp":
                raise PlanError(
                    f"Got precision.matmul='fp8' with recipe={recipe!r}, but tensor-parallel ranks run layer {name!r} "
                    "on different tokens or heads, and a scale of several of them would depend on the number of ranks. "
                    "Set precision.matmul=Float8Config(recipe='rowwise_with_gw_hp'), or add the layer to "
                    "precision.matmul.skip."
                )
            continue
        if part.copies > 1:
            raise PlanError(
                f"Got precision.matmul='fp8', but {part.copies} tensor-parallel ranks share a part of layer {name!r}, "
                "and would round parts of its gradient instead of their sum. Set parallel.tensor to at most the "
                "number of key and value heads, or add the layer to precision.matmul.skip."
            )
        length = part.full_shape[part.dim] // tensor.axis.size
        if length % _MULTIPLE:
            raise PlanError(
                f"Got precision.matmul='fp8', but layer {name!r} with the weight {part.full_shape} has {length} of "
                f"{part.full_shape[part.dim]} {'inputs' if part.dim else 'outputs'} on each of {tensor.axis.size} "
                f"tensor-parallel ranks, which is no multiple of {_MULTIPLE}. Set a smaller parallel.tensor, or add "
                "the layer to precision.matmul.skip."
            )
        found[name] = WeightSplit(tensor.axis, part.dim, part.dim == 1)
    return found


def _convert(recipe: str, *, emulated: bool) -> nn.Linear:
    try:
        logging.getLogger("torchao").setLevel(logging.ERROR)  # of kernels for other releases, which nothing here uses
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise PlanError(
            "Got precision.matmul='fp8', but products in fp8 are torchao's, which cannot be imported "
            f"({type(error).__name__}: {error}). pip install torchao, or leave matmul out."
        ) from error
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulated)
    layer: Any = convert_to_float8_training(nn.Linear(_MULTIPLE, _MULTIPLE, device="meta"), config=config)
    return layer  # type: ignore[no-any-return]


def _fits(layer: Any, converted: nn.Linear, shape: tuple[int, ...]) -> bool:
    """Return whether torchao's layer computes what this one does, and needs no attribute that this one has itself.

    ``shape``: of the full weight.
    """
    plain = isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward
    own = vars(layer).get("forward")
    plain = plain and (own is None or getattr(own, "__func__", None) is linear_product)
    free = plain and not any(hasattr(layer, name) for name in added_by(converted))
    return free and not any(size % _MULTIPLE for size in shape)
