"""`init_inference`: prepare a trained model for generation.

::

    model ── cast ── shard ── quantize ── offload ──► InferenceEngine ── forward, generate
             dtype   tp size  int8, int4   cpu, nvme

Every step works in place, in this order, on the result of the step before. The model cannot be trained afterwards.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ls_strategy._torch import persistent_buffer_names
from ls_strategy.checked import at_least, checked
from ls_strategy.distributed.axis import Axis
from ls_strategy.distributed.comm import make_comm
from ls_strategy.distributed.mesh import MeshShape, make_mesh
from ls_strategy.errors import ConfigError, PlanError, StateError
from ls_strategy.extras.inference.deepspeed_names import read_options
from ls_strategy.extras.inference.fill import Filler, device_of, needs_filling
from ls_strategy.extras.inference.generate import generate
from ls_strategy.extras.inference.linear import Format
from ls_strategy.extras.inference.quantize import QuantizationReport, Quantizer
from ls_strategy.extras.inference.stream import StreamedBlocks, stream_blocks
from ls_strategy.parallel.hooks import Hooks
from ls_strategy.parallel.logits import gather
from ls_strategy.parallel.random import share_random_state
from ls_strategy.parallel.styles import Plan, Row, Vocab
from ls_strategy.parallel.tensor.plan_from_names import uniform_blocks
from ls_strategy.parallel.tensor.plans import ResolvedPlan, resolve_tensor_plan
from ls_strategy.parallel.tensor.policy import Policy, is_policy, styles_of_policy
from ls_strategy.parallel.tensor.resolved_plan import Resolved, resolve
from ls_strategy.parallel.tensor.shard import TensorParallel, apply_tensor_parallel
from ls_strategy.parallel.tensor.vocabulary import output_heads
from ls_strategy.zero.setup.kept import named_by_authors

# Most unsupported models are refused by their layers (see `ls_strategy.parallel.tensor.plan_from_names`). Listed here
# are those whose layers look supported, or which need a longer explanation.

_SHARED_TABLES = "its attention multiplies tables of relative positions by projections of full queries and keys"
_WINDOWS = "its attention over windows reshapes by the number of heads of the configuration, in several functions"
_LISTS = "it keeps attentions, feed-forwards and norms in separate lists, which are not blocks"
_STATE = "it mixes tokens by a recurrent state over all channels, not by heads"

REASONS = {
    "codegen": "one matrix computes query, key and value of four groups of heads, interleaved for other hardware",
    "deberta": _SHARED_TABLES,
    "deberta-v2": _SHARED_TABLES,
    "flaubert": _LISTS,
    "fsmt": "its attention reshapes time-major tensors by the number of heads and the model's width",
    "led": _WINDOWS,
    "longformer": _WINDOWS,
    "mamba": _STATE,
    "mamba2": _STATE,
    "pegasus_x": "its encoder attends within blocks of tokens, reshaped by the width of all heads",
    "reformer": "its attention hashes tokens into random buckets over all heads",
    "rwkv": _STATE,
    "xlm": _LISTS,
    "xlnet": "its query, key and value are bare parameters, used by einsum",
}
"""``model_type`` -> the reason."""


def refuse_known(model: nn.Module) -> None:
    """Refuse the models of `REASONS`.

    Raises:
        PlanError: the model, or a submodule of it, is listed.
    """
    for module in model.modules():
        kind = getattr(getattr(module, "config", None), "model_type", None)
        if isinstance(kind, str) and kind in REASONS:
            raise PlanError(
                f"tensor_parallel_size: {type(module).__name__} ({kind}) cannot be sharded: {REASONS[kind]}. Set "
                "tensor_parallel_size=1; use quantize and offload to save memory on one rank."
            )


log = logging.getLogger(__name__)

Tier = Literal["cpu", "nvme"]
Injection: TypeAlias = Policy | Plan | Literal["auto"] | None

DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16", "bfloat", "torch.bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), torch.float16),
}  # fmt: skip


@checked(tensor_parallel_size=at_least(1))
def init_inference(  # noqa: PLR0913 - one argument per option
    model: nn.Module,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    tensor_parallel_size: int | None = None,
    dtype: torch.dtype | str | None = None,
    quantize: Format | None = None,
    injection_policy: Injection = None,
    offload: Tier | None = None,
    nvme_path: str | os.PathLike[str] | None = None,
    fill_from: str | os.PathLike[str] | None = None,
    **deepspeed: Any,
) -> InferenceEngine:
    """Prepare a model for generation, in place. Collective over all ranks if there are several.

    Works with Hugging Face's causal and encoder-decoder models, and with networks that read with a cache
    (`generate.CausalNetwork`); both may be inside a LightningModule. A single rank needs no process group. Start
    several ranks with ``torchrun`` and initialize the default group. Ranks beyond ``tensor_parallel_size`` hold further
    replicas, in groups of neighbors: with a size of 2, ranks 0 and 1 hold one replica, ranks 2 and 3 the next.

    Args:
        model: the full model, with the same structure on every rank. Rank 0's values are used. It stays on its device;
            tensors on meta are allocated on the CPU.
        config: all options as a dict or a JSON file, as `deepspeed.init_inference` takes them.
        tensor_parallel_size: ranks that share every layer; None: 1.
        dtype: dtype of the parameters: a torch dtype, ``"fp32"``, ``"bf16"`` or ``"fp16"``; None leaves them. Buffers
            that are not saved with the model (rotary tables) keep theirs.
        quantize: ``"int8"`` or ``"int4"``: format of the linear layers' weights, see `rounding`. Output heads use 8
            bits, unless they share their weight with the embedding.
        injection_policy: how layers are sharded. None or ``"auto"``: as the model or its layers define it.
            DeepSpeed's form, ``{T5Block: ("SelfAttention.o", "DenseReluDense.wo")}``: for a block's class, or its name,
            the linear layers whose outputs are summed. Or a full plan, ``{"blocks.*.up": "column", ...}``.
        offload: ``"cpu"`` or ``"nvme"``: where the weights of repeated blocks are stored. They are fetched block by
            block.
        nvme_path: folder on an NVMe device for ``offload="nvme"``; None: ``LS_STRATEGY_NVME_PATH``.
        fill_from: weights for a model that was built on meta, file or folder: see `fill`. Each rank reads its shard,
            and quantizes and offloads block by block, so the full model is never in memory.
        **deepspeed: arguments of `deepspeed.init_inference` (``mp_size``, ``replace_with_kernel_inject`` ...), see
            `deepspeed_names`.

    Returns:
        A module with ``forward`` and ``generate``.

    Raises:
        ConfigError: an option is invalid.
        PlanError: the model cannot be sharded or quantized in this way. On all ranks, before any communication.
        CheckpointError: ``fill_from`` is incomplete, or does not belong to this model.
    """
    ours = {
        **{"tensor_parallel_size": tensor_parallel_size, "dtype": dtype, "quantize": quantize, "offload": offload},
        **{"injection_policy": injection_policy, "nvme_path": nvme_path, "fill_from": fill_from},
    }
    options = read_options(config, deepspeed, {name: value for name, value in ours.items() if value is not None})
    return _make(model, options.notes, **options.values)


@checked(("model", "notes", "injection_policy"), tensor_parallel_size=at_least(1))
def _make(  # noqa: PLR0913
    model: nn.Module,
    notes: list[str],
    *,
    tensor_parallel_size: int = 1,
    dtype: torch.dtype | str | None = None,
    quantize: Format | None = None,
    injection_policy: Injection = None,
    offload: Tier | None = None,
    nvme_path: str | os.PathLike[str] | None = None,
    fill_from: str | os.PathLike[str] | None = None,
) -> InferenceEngine:
    """Implement `init_inference` for options that have been read."""
    wanted = _check_options(tensor_parallel_size, dtype, offload, nvme_path)
    plan = _plan(model, injection_policy, tensor_parallel_size)
    model.eval().requires_grad_(False)
    if wanted is not None:
        _cast(model, wanted)
    sharded = _ShardedModel.of(model, plan, tensor_parallel_size)
    quantizer = None
    if quantize is not None:
        quantizer = Quantizer(model, quantize, heads=output_heads(model), biases_later=sharded.biases_later)
    stream = _make_stream(model, sharded, quantizer, fill_from, (offload, nvme_path))
    report = None if quantizer is None else quantizer.report
    engine = InferenceEngine(model, sharded, report, stream, notes)
    log.info(engine.describe())
    if notes and (not dist.is_initialized() or dist.get_rank() == 0):
        log.warning("init_inference: DeepSpeed's arguments:\n%s", "\n".join(notes))
    return engine


class InferenceEngine(nn.Module):
    """A model that is ready for generation. Unknown attributes are looked up on the model."""

    def __init__(
        self,
        module: nn.Module,
        sharded: _ShardedModel,
        quantization: QuantizationReport | None,
        stream: StreamedBlocks | None,
        notes: list[str],
    ) -> None:
        super().__init__()
        self.module = module
        self.quantization = quantization

        self.stream = stream  # the handle that `stream_blocks` returned; None without ``offload``
        self.notes = notes  # one line for each of DeepSpeed's arguments that has no effect
        self._sharded = sharded
        self.eval()

    @property
    def axis(self) -> Axis:
        """The tensor-parallel ranks of this replica."""
        return self._sharded.axis

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward, and gather logits. Collective over ``axis``, with the same input on each rank."""
        return gather(self.module(*args, **kwargs))

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate with the model's ``generate``, or with `generate.generate` for a network that reads with a cache.

        Collective over ``axis``, with the same input on each of its ranks. They use rank 0's random state, so all of
        them sample the same tokens.

        Raises:
            StateError: the model cannot generate, or the ranks of ``axis`` were given different inputs.
        """
        self._agree(args, kwargs)
        if callable(getattr(self.module, "make_cache", None)):
            return generate(self.module, *args, **kwargs)  # type: ignore[arg-type]
        own = getattr(self.module, "generate", None)
        if not callable(own):
            raise StateError(
                f"{type(self.module).__name__} has no method generate. Use a transformers model with a head for "
                "generation (AutoModelForCausalLM, AutoModelForSeq2SeqLM), or a network with make_cache()."
            )
        return own(*args, **kwargs)

    def describe(self) -> str:
        """Describe in a few lines what is sharded, quantized and offloaded."""
        lines = [self._sharded.describe()]
        lines += [part.describe() for part in (self.quantization, self.stream) if part is not None]
        lines += self.notes
        return "\n".join(lines)

    def close(self) -> None:
        """Release the threads, buffers and files of ``offload``. A model with ``offload`` cannot run afterwards."""
        if self.stream is not None:
            self.stream.close()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(super().__getattr__("module"), name)

    def _agree(self, args: Any, kwargs: Any) -> None:
        """Check that all ranks were given the same arguments, and set rank 0's random state on all of them."""
        axis = self.axis
        if axis.size == 1:
            return
        given = [*kwargs, *(_comparable(v) for v in (*args, *kwargs.values()) if isinstance(v, Tensor | list | int))]
        for rank, others in enumerate(axis.comm.exchange_objects(given)):
            if others != given:
                raise StateError(
                    f"generate was called with other arguments on rank {rank} of the {axis.size} tensor-parallel ranks "
                    "than on this one. Give all of them the same tokens and options: they compute one batch together."
                )
        share_random_state(axis, torch.device("cpu"))
        device = next((p.device for p in self.module.parameters() if p.device.type not in ("cpu", "meta")), None)
        if device is not None:
            share_random_state(axis, device)


def _comparable(value: Any) -> Any:
    """Return what ranks compare of an argument: of a tensor its shape and a position-weighted sum as a checksum."""
    if not isinstance(value, Tensor):
        return value
    flat = value.detach().reshape(-1).double()
    positions = torch.arange(1, flat.numel() + 1, device=flat.device, dtype=torch.float64)
    return tuple(value.shape), float((flat * positions.sqrt()).sum())


class _ShardedModel:
    """A model that is sharded over the ranks of one axis, or not sharded."""

    def __init__(self, axis: Axis, parallel: TensorParallel | None, biases_later: frozenset[int]) -> None:
        self.axis = axis
        self.parallel = parallel
        self.biases_later = biases_later  # ``id`` of the row layers whose bias is added after the sum over ranks
        self.hooks = Hooks()

    @classmethod
    def of(cls, model: nn.Module, plan: ResolvedPlan | None, size: int) -> _ShardedModel:
        """Shard the model in place. Collective."""
        if plan is None:
            return cls(Axis("tensor"), None, frozenset())
        world = make_comm()
        axis = make_mesh(MeshShape.of(world.world_size, tensor=size), world).tensor
        resolved = resolve(model, plan.styles, size)
        later = frozenset(
            id(layer.module)
            for layer in resolved.layers
            if isinstance(layer.style, Row) and layer.module.bias is not None
        )
        parallel = apply_tensor_parallel(model, plan.styles, axis, trains=False)
        result = cls(axis, parallel, later)
        result._gather_logits(model, resolved)
        return result

    def _gather_logits(self, model: nn.Module, resolved: Resolved) -> None:
        """Gather the logits of models that modify them in place, as transformers does; our sampling gathers itself."""
        if any(callable(getattr(m, "make_cache", None)) for m in model.modules()):
            return
        for layer in resolved.layers:
            if isinstance(layer.style, Vocab) and isinstance(layer.module, nn.Linear):
                self.hooks.after(layer.module, lambda _m, _args, logits: gather(logits))

    def describe(self) -> str:
        return "on one rank" if self.parallel is None else self.parallel.describe()


# --- steps of init_inference -----------------------------------------------------------------------------------------


def _check_options(
    size: int, dtype: torch.dtype | str | None, offload: str | None, nvme_path: Any
) -> torch.dtype | None:
    """Check the options against each other and the number of ranks, and return the dtype. Not collective.

    Raises:
        ConfigError: an option is invalid.
    """
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks % size:
        how = "" if ranks > 1 else " Start torchrun with that many, and call torch.distributed.init_process_group()."
        raise ConfigError(f"Got tensor_parallel_size={size}, which does not divide the {ranks} ranks of this run.{how}")
    if nvme_path is not None and offload != "nvme":
        raise ConfigError(
            f"Got nvme_path={nvme_path!r} with offload={offload!r}, but it needs offload='nvme'. Change one of the two."
        )
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            cure = " For integers set quantize='int8' or 'int4'." if "int" in dtype else ""
            raise ConfigError(f"Got dtype={dtype!r}. Give a torch.dtype, or one of {', '.join(DTYPES)}.{cure}")
        return DTYPES[dtype]
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(
            f"Got dtype={dtype}, but it must be a floating-point dtype. For integers set quantize='int8' or 'int4'."
        )
    return dtype


def _plan(model: nn.Module, given: Injection, size: int) -> ResolvedPlan | None:
    """Return how the model is sharded; None for one rank, on which a policy is still checked.

    Raises:
        PlanError: the model cannot be sharded in this way.
    """
    mapping: Mapping[Any, Any] | None = given if isinstance(given, Mapping) else None
    if size > 1:
        refuse_known(model)
    try:
        if mapping is not None and is_policy(model, mapping):
            mapping = styles_of_policy(model, mapping, size)
        if size == 1:
            return None
        plan = resolve_tensor_plan(model, "auto" if mapping is None else mapping, size)
    except PlanError as error:
        raise PlanError(
            f"{error} (In init_inference, parallel.tensor is tensor_parallel_size, and its plan is injection_policy.)"
        ) from error
    if plan.torch_styles:
        raise PlanError(
            "Got torch's ParallelStyle objects in injection_policy. Give names of this package's styles instead."
        )
    log.info(plan.describe())
    return plan


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters and saved buffers, but not what the model's author keeps in fp32.

    Tables that the model computes by itself keep their dtype.
    """
    kept = named_by_authors(model, dtype)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float32 if id(parameter) in kept else dtype)
    saved = persistent_buffer_names(model)
    for name, buffer in list(model.named_buffers()):
        if buffer.is_floating_point() and name in saved:
            owner, _, key = name.rpartition(".")
            # Not by setattr, which makes a parameter of a buffer that is an nn.Parameter.
            model.get_submodule(owner)._buffers[key] = buffer.detach().to(
                torch.float32 if id(buffer) in kept else dtype
            )


def _make_stream(
    model: nn.Module,
    sharded: _ShardedModel,
    quantizer: Quantizer | None,
    fill_from: str | os.PathLike[str] | None,
    offload: tuple[Tier | None, str | os.PathLike[str] | None],
) -> StreamedBlocks | None:
    """Fill meta tensors, quantize and offload. A model on meta is filled, quantized and offloaded block by block."""
    tier, path = offload
    parts = None if sharded.parallel is None else sharded.parallel.parts
    on_meta = needs_filling(model, fill_from)
    if quantizer is not None and not on_meta:
        quantizer.apply(model)
    stream = None
    if tier is not None:
        stream = stream_blocks(
            model,
            tier,
            None if path is None else Path(path),
            fill_from=fill_from,
            parts=parts if on_meta else None,
            prepare=(lambda _name, block: quantizer.apply(block)) if on_meta and quantizer is not None else None,
        )
    elif on_meta:
        _fill(model, Filler(model, fill_from, parts), quantizer)
    if quantizer is not None and on_meta:
        quantizer.apply(model)  # the output heads
    return stream


def _fill(model: nn.Module, filler: Filler, quantizer: Quantizer | None) -> None:
    device = device_of(model)
    names = {id(m): name for name, m in model.named_modules()}
    for root in (*(block for _, block in uniform_blocks(model)), model):
        for module in root.modules():
            if names.get(id(module)) is not None:
                filler.fill(names.pop(id(module)), module, device)
        if quantizer is not None and root is not model:
            quantizer.apply(root)
