"""Selective recompute: which operations of a recomputed module save their outputs.

These are operations that are expensive to compute, or to communicate, a second time. The others are inexpensive, and
their outputs are large (Korthikanti et al., arXiv:2205.05198, section 5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ls_strategy.errors import ConfigError

_MATMULS = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear", "_addmm_activation")
_MATMULS += ("_grouped_mm", "_scaled_mm", "_scaled_grouped_mm", "_int_mm")
_CONVOLUTIONS = ("convolution", "convolution_overrideable", "_convolution", "mkldnn_convolution", "cudnn_convolution")
_ATTENTION = ("_scaled_dot_product", "_flash_attention_forward", "_efficient_attention_forward", "flex_attention")
_ATTENTION += ("_varlen_attn",)
_COLLECTIVES = ("_c10d_functional", "c10d_functional", "_c10d_functional_autograd")


def _is_attention(namespace: str, name: str) -> bool:
    return name.startswith(_ATTENTION) and not name.endswith("_backward")


KINDS: dict[str, Callable[[str, str], bool]] = {
    "matmul": lambda namespace, name: namespace == "aten" and name in _MATMULS,
    "attention": _is_attention,
    "convolution": lambda namespace, name: namespace == "aten" and name in _CONVOLUTIONS,
    # Not `c10d`: its operations write into their inputs, which a saved output cannot replace.
    "collective": lambda namespace, name: namespace in _COLLECTIVES,
}
"""Kinds of operations: the name of each, and its predicate on namespace and name of an operation."""


class SelectivePolicy:
    """Decides for each operation in a recomputed module whether its output is saved."""

    def __init__(self, keep: Sequence[str]) -> None:
        """Resolve names of kinds and of operations.

        Args:
            keep: Keys of `KINDS`, or ``namespace.operation`` with or without its overload (``aten.gelu``).

        Raises:
            ConfigError: A name is neither.
        """
        self.keep = tuple(keep)
        for name in self.keep:
            if name not in KINDS and not _exists(name):
                raise ConfigError(
                    f"Got keep={list(self.keep)}, but {name!r} is neither a kind of operation "
                    f"({', '.join(sorted(KINDS))}) nor the name of a torch operation, such as 'aten.gelu' or "
                    "'aten.convolution.default'."
                )
        self._kinds = tuple(KINDS[name] for name in self.keep if name in KINDS)
        self._operations = frozenset(name for name in self.keep if name not in KINDS)

    def __call__(self, _context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        """Return torch's policy for one operation."""
        return CheckpointPolicy.MUST_SAVE if self.keeps(operation) else CheckpointPolicy.PREFER_RECOMPUTE

    def keeps(self, operation: Any) -> bool:
        """Return whether the output of ``operation`` (an ``OpOverload`` or a higher-order operation) is saved."""
        schema = getattr(operation, "_schema", None)
        if schema is not None and schema.is_mutable:
            return False  # it may write only part of a tensor (``mm.out`` into rows of a result)
        if self._operations and ({str(operation), str(operation).rpartition(".")[0]} & self._operations):
            return True
        # Higher-order operations have no overload.
        qualified = str(operation.name() if callable(operation.name) else operation.name)
        namespace, _, name = qualified.rpartition("::")
        names = namespace, name.split(".")[0]
        return any(is_of_kind(*names) for is_of_kind in self._kinds)

    def contexts(self) -> Callable[[], Any]:
        """Return the ``context_fn`` for ``torch.utils.checkpoint``."""
        return partial(create_selective_checkpoint_contexts, self.__call__)


def _exists(name: str) -> bool:
    found: Any = torch.ops
    parts = name.split(".")
    if len(parts) not in (2, 3):
        return False
    for part in parts:
        found = getattr(found, part, None)
        if found is None:
            return False
    return True
