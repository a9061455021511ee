"""The output layer of a model: its logits are deferred until a loss computes them in chunks.

The layer's own forward runs, and its matrix product returns `deferred.DeferredLogits`. What the forward does before and
after the product, and all hooks on the layer, stay as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode, handle_torch_function

from ls_strategy._torch import function_mode
from ls_strategy.checked import checked
from ls_strategy.errors import PlanError
from ls_strategy.losses.chunked import MIN_CHUNK_BYTES
from ls_strategy.losses.deferred import defer, expire
from ls_strategy.parallel.cross_entropy import Options, cross_entropy
from ls_strategy.parallel.logits import ShardedLogits
from ls_strategy.parallel.regions import untraced
from ls_strategy.parallel.tensor.vocabulary import output_heads
from ls_strategy.ranges import at_least, between
from ls_strategy.transient import Forward


class _Deferral(TorchFunctionMode):
    """Makes the matrix product with one weight return deferred logits."""

    def __init__(self, weight: Tensor, chunk_bytes: int | None, found: Callable[[Tensor], object]) -> None:
        super().__init__()
        self._weight, self._chunk_bytes, self._found = weight, chunk_bytes, found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not functional.linear or len(args) < 2 or args[1] is not self._weight:
            return func(*args, **kwargs)
        hidden, weight, bias = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("bias")
        limit = MIN_CHUNK_BYTES if self._chunk_bytes is None else self._chunk_bytes
        if 4 * hidden.shape[:-1].numel() * weight.shape[0] <= limit:  # one chunk
            return func(*args, **kwargs)
        logits = defer(hidden, weight, bias, chunk_bytes=self._chunk_bytes)
        self._found(logits)
        return logits


class _HeadForward(Forward):
    """The replacement of an output layer's forward."""

    def __init__(self, head: nn.Module, chunk_bytes: int | None, found: Callable[[Tensor], object]) -> None:
        super().__init__(head)
        self._chunk_bytes, self._found = chunk_bytes, found

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _Deferral(self._module.weight, self._chunk_bytes, self._found):
            return self.__wrapped__(*args, **kwargs)


class ChunkedHeads:
    """Output layers with deferred logits, until `remove`.

    Args:
        model: its output layers are found by ``get_output_embeddings()``, or by name and shape.
        name: of the only layer to use. None: all that are found.
        chunk_bytes: see `deferred.defer`.

    Raises:
        PlanError: No output layer was found.
    """

    def __init__(self, model: nn.Module, name: str | None = None, chunk_bytes: int | None = None) -> None:
        self.heads = _find(model, name)
        self._live: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self._forwards = [_HeadForward(head, chunk_bytes, self._live.add) for head in self.heads]
        self._hook = register_optimizer_step_post_hook(self._expire)
        names = {id(m): n for n, m in model.named_modules()}
        self._names = [names[id(head)] for head in self.heads]

    def describe(self) -> str:
        """Return one line for the log."""
        return f"logits of {', '.join(map(repr, self._names))} computed in chunks by the loss"

    def remove(self) -> None:
        """Restore the layers' forwards. Idempotent."""
        self._hook.remove()
        for forward in self._forwards:
            forward.remove()
        self._forwards.clear()

    def _expire(self, *_: Any) -> None:
        for logits in self._live:
            expire(logits)
        self._live.clear()


def _find(model: nn.Module, name: str | None) -> Sequence[nn.Module]:
    if name is not None:
        found = dict(model.named_modules()).get(name)
        if found is None or not isinstance(getattr(found, "weight", None), Tensor):
            raise PlanError(
                f"Got activations.loss.head={name!r}, but the model has no module of that name with a weight. Set the "
                "name of the layer that computes logits, as in model.named_modules()."
            )
        return [found]
    heads = output_heads(model)
    if not heads:
        raise PlanError(
            "activations.loss='chunked' requires the layer that computes logits, but none was found by "
            "get_output_embeddings() nor by its name and shape. Set activations.loss.head to its name, or call "
            "ls_strategy.linear_cross_entropy(hidden, head, targets) in training_step."
        )
    return heads


@checked(label_smoothing=between(0, 1), z_loss=at_least(0))
def linear_cross_entropy(
    hidden: Tensor,
    head: nn.Module | Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Return the cross-entropy of the logits ``head(hidden)``, which are computed in chunks and never held in full.

    Works in ``training_step`` at every ZeRO stage, with tied and frozen weights, and with vocabulary-parallel and
    context-parallel logits. With the option ``activations.loss="chunked"`` losses of most models need no such call.
    Loss and gradients are those of `torch.nn.functional.cross_entropy` up to rounding. Backward computes the logits
    again. Collective where the forward of ``head`` is.

    Args:
        hidden: ``(..., D)``, any floating dtype.
        head: the output layer, which must compute ``functional.linear(x, head.weight, ...)`` in its forward and may
            scale or cap its result; or a weight ``(V, D)``.
        target: ``(...)``, indices of classes.
        ignore_index: the target of tokens without a loss.
        reduction: ``mean`` over the tokens with a loss, ``sum``, or ``none``: one loss per token.
        label_smoothing: weight of the mean over all classes, from 0 to 1.
        z_loss: weight of the squared logarithm of the sum of exponentials, which keeps logits small (Chowdhery et al.,
            "PaLM", arXiv:2204.02311, section 5).

    Returns:
        The loss in fp32 (fp64 for fp64): a scalar, or with ``none`` the shape of ``target``.

    Raises:
        ConfigError: An option is out of range.
        PlanError: ``hidden`` and ``target`` do not fit together, or the targets are no indices.
    """
    if function_mode() is not None:  # of a pipeline: it counts the targets
        given: dict[str, Any] = {
            "ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing, "z_loss": z_loss,
        }  # fmt: skip
        return handle_torch_function(linear_cross_entropy, (), hidden, head, target, **given)  # type: ignore[no-any-return]
    logits = _deferred_logits(hidden, head)
    if tuple(logits.shape[:-1]) != tuple(target.shape) or target.is_floating_point():
        raise PlanError(
            f"Got targets {tuple(target.shape)} of {target.dtype} for logits {tuple(logits.shape)}, but every token "
            "needs the index of one class. Pass targets of the shape (batch, tokens), as integers."
        )
    rows = logits.flatten(0, -2) if logits.dim() > 2 else logits
    rows = rows if rows.dtype == torch.float64 else rows.float()
    options = Options(ignore_index, reduction, label_smoothing, z_loss=z_loss)
    local, shards = (rows.local, rows.shards) if isinstance(rows, ShardedLogits) else (rows, ())
    loss = cross_entropy(rows, local, shards, target.flatten(), None, options)
    if loss is NotImplemented:
        raise PlanError(
            f"linear_cross_entropy cannot use targets of type {type(target).__name__}. Pass a plain tensor of indices."
        )
    return loss.view(target.shape) if reduction == "none" else loss


def _deferred_logits(hidden: Tensor, head: nn.Module | Tensor) -> Any:
    weight = head if isinstance(head, Tensor) else getattr(head, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or hidden.dim() < 2:
        shape = tuple(weight.shape) if isinstance(weight, Tensor) else None
        raise PlanError(
            f"Got hidden states {tuple(hidden.shape)} and head={type(head).__name__} with a weight of shape {shape}, "
            "but linear_cross_entropy requires (..., width) and (classes, width). Pass the layer that computes logits, "
            "or its weight."
        )
    return defer(hidden, head) if isinstance(head, Tensor) else _deferred_output(head, hidden)


def _deferred_output(head: nn.Module, hidden: Tensor) -> Tensor:
    """Call an output layer, and return its logits deferred if its matrix product is that of its weight."""
    if isinstance(vars(head).get("forward"), _HeadForward):
        return head(hidden)  # type: ignore[no-any-return]
    forward = _HeadForward(head, None, lambda _: None)
    try:
        return head(hidden)  # type: ignore[no-any-return]
    finally:
        forward.remove()
