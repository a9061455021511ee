"""How a module is divided over the ranks of the tensor-parallel axis: the words a plan is written in.

A plan maps patterns of module names (`fnmatch`, so that ``*`` crosses dots too) to styles, their names, or lists::

    {
        "blocks.*.attention": Divide(("heads", "kv_heads")),
        "blocks.*.attention.qkv": Column(sections=(64, 16, 16), granule=8),
        "blocks.*.attention.output": "row",
        "blocks.*.feed_forward.*up": "column",
        "blocks.*.feed_forward.down": "row",
        "embedding": "vocab",
    }

A pattern that matches no module may match parameters instead, for `Features`, `PartialGradient` and `Replicate`.

Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3: a column layer, then a row layer, and one sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ls_strategy.errors import PlanError


def resolve_sections(sections: Sequence[int], length: int, what: str) -> tuple[int, ...]:
    """Lengths that add up to ``length``; those given as -1 share equally what the others leave.

    Args:
        sections: as given in the style; none stands for one of full length.
        length: of the dimension.
        what: names the layer and the dimension in errors.

    Raises:
        PlanError: they cannot add up.

    >>> resolve_sections((4, -1, -1), 10, "rows"), resolve_sections((), 10, "rows")
    ((4, 3, 3), (10,))
    """
    if not sections:
        return (length,)
    shares = sum(s == -1 for s in sections)
    rest = length - sum(s for s in sections if s != -1)
    if any(s < 1 and s != -1 for s in sections) or (rest % shares if shares else rest) or (shares and rest <= 0):
        raise PlanError(
            f"{what}: sections={tuple(sections)} do not add up to {length}. Give the length of every fused part "
            "(-1: an equal share of what the others leave)."
        )
    return tuple(rest // shares if s == -1 else s for s in sections)


@dataclass(frozen=True)
class Column:
    """Linear layer, output features divided: rows of the weight, and the bias. The input is whole on every rank."""

    sections: tuple[int, ...] = ()
    """Lengths of fused parts (query, key and value, say), each divided by itself; -1: an equal share of the rest."""

    granule: int = 1
    """Output features that stay together: those of one head."""

    copies: int | tuple[int, ...] = 1
    """Ranks side by side that hold the same part, where there are fewer heads than ranks; or one number per section,
    which only inference takes: a parameter that is trained is divided or held by several ranks as one."""

    gather: bool = False
    """Whether every rank gets the whole output."""


@dataclass(frozen=True)
class Row:
    """Linear layer, input features divided; the ranks' outputs are summed, the bias is added once, after the sum."""

    sections: tuple[int, ...] = ()
    """As in `Column`, along the input features."""

    granule: int = 1
    """Input features that stay together."""

    split: bool = False
    """Whether the input is whole, and this rank's part of it is to be taken first."""


@dataclass(frozen=True)
class Vocab:
    """Embedding, or linear output head, divided by tokens of the vocabulary; parts may differ by one token.

    The head's output looks like whole logits; a cross-entropy of it is computed where the parts are.
    """


@dataclass(frozen=True)
class Features:
    """Embedding, or bare parameter, divided along ``dim``: a table of one column per head, say."""

    dim: int = 1
    """What is divided; always 1 for an embedding."""

    gather: bool = False
    """Whether every rank gets the whole output (embedding)."""


@dataclass(frozen=True)
class Attributes:
    """Sets integers on the module, its local number of heads, say."""

    values: tuple[tuple[str, int], ...]
    """``(name, value)``."""


@dataclass(frozen=True)
class Divide:
    """Divides integer attributes of the module by the ranks; one that is smaller and shards their number becomes 1."""

    names: tuple[str, ...]
    """Of the attributes."""

    def local(self, module_name: str, name: str, value: object, size: int) -> int:
        """What becomes of one attribute.

        Raises:
            PlanError: it is no positive integer, or does not divide.
        """
        where = f"{module_name}.{name}={value!r}"
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise PlanError(
                f"{where} is to be divided over {size} tensor-parallel ranks, but is no positive integer. Name the "
                "attribute that holds the number of heads."
            )
        if value % size == 0:
            return value // size
        if size % value == 0:
            return 1
        raise PlanError(
            f"{where} does not divide by the {size} tensor-parallel ranks. Use a number of ranks that shards "
            f"{value} (or one that {value} shards, with `copies` on the layers that make them)."
        )


@dataclass(frozen=True)
class Experts:
    """Module of experts of transformers: of every expert some rows of gate and up, and columns of down, on each rank.

    Its parameters are ``gate_up_proj`` of ``(E, 2 * inner, D)`` and ``down_proj`` of ``(E, D, inner)``; its outputs are
    summed. All ranks choose the same experts, since the router is whole on each.
    """


@dataclass(frozen=True)
class Replicate:
    """Whole on every rank: what a module that no pattern names is anyway."""


@dataclass(frozen=True)
class PartialGradient:
    """Whole on every rank, but each sees only some tokens or heads: gradients of its parameters are summed."""


Style: TypeAlias = Column | Row | Vocab | Features | Experts | Attributes | Divide | Replicate | PartialGradient
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
    "experts": Experts(),
    # Those of Hugging Face transformers (`base_model_tp_plan`), where they say the same.
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
    "moe_tp_experts": Experts(),
}
"""Styles by name."""

REFUSED: dict[str, str] = {
    "sequence_parallel": "the whole block is divided along the tokens, or none of it: set sequence=True instead",
    "all_reduce": "its module sums partial outputs that this package sums in the row layer",
    "mla_kv_a_proj": "its output is used whole and in parts at once",
    "moe_identity_expert": "experts are not divided by tensor parallelism here",
    "local_params": "parameters are plain local tensors here, so there is nothing to unwrap",
    "ep_dispatch_experts": "experts are not divided by tensor parallelism here",
    "ep_router": "experts are not divided by tensor parallelism here",
    "grouped_gemm": "experts are not divided by tensor parallelism here",
}
"""Hugging Face's names that have no exact counterpart, and why."""


def parse(text: str) -> Style:
    """The style of a name; ``"divide:heads,kv_heads"`` is a `Divide`.

    Raises:
        PlanError: the name is unknown, or one of Hugging Face's without an exact counterpart.

    >>> parse("colwise"), parse("divide:heads, kv_heads")
    (Column(sections=(), granule=1, copies=1, gather=False), Divide(names=('heads', 'kv_heads')))
    """
    name, colon, rest = text.partition(":")
    names = tuple(part.strip() for part in rest.split(",") if part.strip())
    if colon and name.strip() == "divide" and names:
        return Divide(names)
    if text in NAMES:
        return NAMES[text]
    if text in REFUSED:
        raise PlanError(
            f"tensor-parallel style {text!r} of Hugging Face is not supported: {REFUSED[text]}. Leave its entries out "
            "of the plan (their modules stay whole on every rank), or name another style."
        )
    raise PlanError(
        f"unknown tensor-parallel style {text!r}. Known are {', '.join(NAMES)}, and 'divide:<attribute>,...'."
    )


def parse_all(value: Style | str | Sequence[Style | str]) -> tuple[Style, ...]:
    """What a plan may hold for one pattern, as styles.

    Raises:
        PlanError: see `parse`; or it is neither a style nor a name.
    """
    if isinstance(value, str):
        return (parse(value),)
    if isinstance(value, Sequence):
        return tuple(style for entry in value for style in parse_all(entry))
    if not isinstance(value, Style):
        raise PlanError(
            f"{value!r} ({type(value).__name__}) is no tensor-parallel style. Give one of ls_strategy.parallel.styles, "
            f"or its name: {', '.join(NAMES)}."
        )
    return (value,)
