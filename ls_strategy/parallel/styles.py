"""Styles of a tensor-parallel plan: how a module is sharded over the ranks.

A plan maps patterns of module names (`fnmatch`: ``*`` also matches dots) to styles, their names, or lists of these::

    {
        "blocks.*.attention": Divide(("heads", "kv_heads")),
        "blocks.*.attention.qkv": Column(sections=(64, 16, 16), granule=8),
        "blocks.*.attention.output": "row",
        "blocks.*.feed_forward.*up": "column",
        "blocks.*.feed_forward.down": "row",
        "embedding": "vocab",
    }

A pattern that matches no module may match parameters, for `Features`, `Vocab`, `PartialGradient` and `Replicate`.

Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3: a column layer, then a row layer, and one sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ls_strategy.errors import PlanError


def resolve_sections(sections: Sequence[int], length: int, what: str) -> tuple[int, ...]:
    """Return section lengths that add up to ``length``; each -1 becomes an equal share of the remainder.

    No sections mean one of full length. ``what`` names the layer and the dimension in errors.

    Raises:
        PlanError: The lengths cannot add up.

    >>> resolve_sections((4, -1, -1), 10, "rows"), resolve_sections((), 10, "rows")
    ((4, 3, 3), (10,))
    """
    if not sections:
        return (length,)
    shares = sum(s == -1 for s in sections)
    left = length - sum(s for s in sections if s != -1)
    if any(s < 1 and s != -1 for s in sections) or (left % shares if shares else left) or (shares and left <= 0):
        raise PlanError(
            f"{what}: sections={tuple(sections)} do not add up to {length}. Set the length of every fused part "
            "(-1: an equal share of the remainder)."
        )
    return tuple(left // shares if s == -1 else s for s in sections)


@dataclass(frozen=True)
class Column:
    """Column-parallel linear layer: output features (weight rows and bias) are sharded, the input is replicated."""

    sections: tuple[int, ...] = ()
    """Lengths of fused parts (query, key and value, say), each sharded separately; -1: an equal share of the
    remainder."""

    granule: int = 1
    """Number of output features that stay together: those of one head."""

    copies: int | tuple[int, ...] = 1
    """Number of adjacent ranks that hold the same shard, if there are fewer heads than ranks. One number per section
    is possible for inference only."""

    gather: bool = False
    """Whether every rank gets the full output."""


@dataclass(frozen=True)
class Row:
    """Row-parallel linear layer: input features are sharded, outputs are summed over the ranks, then the bias added."""

    sections: tuple[int, ...] = ()
    """As in `Column`, along the input features."""

    granule: int = 1
    """Number of input features that stay together."""

    split: bool = False
    """Whether the input is replicated, so that each rank takes its shard of it first."""


@dataclass(frozen=True)
class Vocab:
    """Vocabulary-parallel embedding, or linear output head; shards may differ by one token.

    The head returns `logits.ShardedLogits`, whose cross-entropy is computed from the shards.
    """


@dataclass(frozen=True)
class Features:
    """Embedding, or bare parameter, that is sharded along ``dim``: a table with one column per head, say."""

    dim: int = 1
    """The sharded dimension; always 1 for an embedding."""

    gather: bool = False
    """Whether every rank gets the full output of the embedding."""


@dataclass(frozen=True)
class Attributes:
    """Set integer attributes of the module, such as its local number of heads."""

    values: tuple[tuple[str, int], ...]
    """``(name, value)`` of every attribute."""


@dataclass(frozen=True)
class Divide:
    """Divide integer attributes of the module by the number of ranks; a divisor of that number becomes 1."""

    names: tuple[str, ...]
    """Names of the attributes."""

    def local(self, module_name: str, name: str, value: object, size: int) -> int:
        """Return the local value of one attribute.

        Raises:
            PlanError: It is not a positive integer, or neither a multiple nor a divisor of the number of ranks.
        """
        where = f"{module_name}.{name}={value!r}"
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise PlanError(
                f"{where} must be a positive integer, to be divided by the {size} tensor-parallel ranks. Name the "
                "attribute that holds the number of heads."
            )
        if value % size == 0:
            return value // size
        if size % value == 0:
            return 1
        raise PlanError(
            f"{where} is not divisible by the {size} tensor-parallel ranks. Use a number of ranks that divides "
            f"{value}, or a multiple of it with `copies` on the layers that compute these heads."
        )


@dataclass(frozen=True)
class ExpertFeatures:
    """Expert module of transformers: every rank holds some inner features of every expert.

    Its parameters are ``gate_up_proj``, ``(E, 2 * inner, D)``, and ``down_proj``, ``(E, D, inner)``. Its outputs are
    summed over the ranks. The router is replicated, so all ranks choose the same experts.
    """


@dataclass(frozen=True)
class Replicate:
    """Replicate the module on every rank. This is the default for modules that no pattern matches."""


@dataclass(frozen=True)
class PartialGradient:
    """Replicate the module, but sum the gradients of its parameters, since each rank sees some tokens or heads."""


Style: TypeAlias = Column | Row | Vocab | Features | ExpertFeatures | Attributes | Divide | Replicate | PartialGradient
Plan: TypeAlias = Mapping[str, "Style | str | Sequence[Style | str]"]

NAMES: dict[str, Style] = {
    "column": Column(),
    "column_gather": Column(gather=True),
    "row": Row(),
    "row_split": Row(split=True),
    "vocab": Vocab(),
    "features": Features(),
    "replicate": Replicate(),
    "partial_gradient": PartialGradient(),
    "experts": ExpertFeatures(),
    # Names of Hugging Face transformers (`base_model_tp_plan`) with the same meaning.
    "colwise": Column(),
    "colwise_rep": Column(gather=True),
    "colwise_gather_output": Column(gather=True),
    "packed_colwise": Column(sections=(-1, -1)),
    "rowwise": Row(),
    "rowwise_rep": Row(split=True),
    "rowwise_split_input": Row(split=True),
    "packed_rowwise": Row(sections=(-1, -1)),
    "embedding_rowwise": Vocab(),
    "embedding_colwise": Features(gather=True),
    "replicated_with_grad_allreduce": PartialGradient(),
    "moe_tp_experts": ExpertFeatures(),
}
"""Styles by name."""

REFUSED: dict[str, str] = {
    "sequence_parallel": "sequence parallelism applies to entire blocks: set sequence=True instead",
    "all_reduce": "its module sums partial outputs, which this package sums in the row layer",
    "mla_kv_a_proj": "its output is used both sharded and in full",
    "moe_identity_expert": "tensor parallelism does not shard these experts",
    "local_params": "parameters are plain local tensors, so there is nothing to unwrap",
    "ep_dispatch_experts": "tensor parallelism does not shard these experts",
    "ep_router": "tensor parallelism does not shard these experts",
    "grouped_gemm": "tensor parallelism does not shard these experts",
}
"""Hugging Face's names without an exact equivalent, and why."""


def parse(text: str) -> Style:
    """Return the style of a name; ``"divide:heads,kv_heads"`` is a `Divide`.

    Raises:
        PlanError: The name is unknown, or one of Hugging Face's without an exact equivalent.

    >>> parse("colwise"), parse("divide:heads, kv_heads")
    (Column(sections=(), granule=1, copies=1, gather=False), Divide(names=('heads', 'kv_heads')))
    """
    name, colon, attributes = text.partition(":")
    names = tuple(part.strip() for part in attributes.split(",") if part.strip())
    if colon and name.strip() == "divide" and names:
        return Divide(names)
    if text in NAMES:
        return NAMES[text]
    if text in REFUSED:
        raise PlanError(
            f"tensor-parallel style {text!r} of Hugging Face is not supported: {REFUSED[text]}. Remove its entries "
            "from the plan, so that their modules are replicated, or use another style."
        )
    raise PlanError(
        f"unknown tensor-parallel style {text!r}. Use one of {', '.join(NAMES)}, or 'divide:<attribute>,...'."
    )


def parse_all(value: Style | str | Sequence[Style | str]) -> tuple[Style, ...]:
    """Return the styles of one entry of a plan.

    Raises:
        PlanError: See `parse`; or the value is neither a style nor a name.
    """
    if isinstance(value, str):
        return (parse(value),)
    if isinstance(value, Sequence):
        return tuple(style for entry in value for style in parse_all(entry))
    if not isinstance(value, Style):
        raise PlanError(
            f"Got {value!r} ({type(value).__name__}) as a tensor-parallel style. Use a style of "
            f"ls_strategy.parallel.styles, or its name: {', '.join(NAMES)}."
        )
    return (value,)
