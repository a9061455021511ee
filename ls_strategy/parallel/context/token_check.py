"""Check once, before training, that a block computes the same from this rank's tokens as from all of them.

A block that derives positions from the length of its input would take the first token of every rank for the first of
the sequence. It would still train, but compute something else.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ls_strategy._torch import without_dispatch_modes
from ls_strategy.blocks import counters_of
from ls_strategy.device import generator_of
from ls_strategy.distributed.axis import Axis
from ls_strategy.errors import LSError, PlanError
from ls_strategy.parallel.context.attention import attention_over, unfused
from ls_strategy.parallel.context.tokens import Call, crop, hidden_states, map_tensors, narrow

CHECKED = 1024
"""Maximum number of tokens to compare: a single rank would take long for attention over all of them."""


def compare_with_full(
    block: nn.Module, forward: Callable[..., Any], call: Call, axis: Axis, name: str, ring: int = 1, inner: int = 1
) -> None:
    """Run ``forward``, that of ``block``, on all tokens of ``call`` and on this rank's, and compare. Collective.

    ``inner`` divides every number of tokens that ``forward`` takes.

    The block's parameters must be unsharded. This runs without gradients and dropout, and restores random states and
    buffers.

    Raises:
        PlanError: The results differ on some rank. Raised on all ranks.
    """
    tokens, least = hidden_states(*call).shape[1], 2 * axis.size * inner
    length = min(tokens, max(CHECKED - CHECKED % least, least))
    share = length // axis.size
    short = crop(call, tokens, length)
    device = hidden_states(*call).device
    with _undisturbed(block, device):
        expected, around, bound = _expected(forward, short, device)
        try:
            with around(), attention_over(axis, ring) as region:
                actual = _run(forward, narrow(short, length, axis.rank * share, share))
        except LSError:
            raise
        except (RuntimeError, ValueError, IndexError, AssertionError) as error:
            raise _refusal(name, share, length, f"it failed: {error}") from error
    if not region.calls:
        return  # the caller refuses a block without attention, and names the cure
    difference = _difference(actual, expected.narrow(1, axis.rank * share, share))
    worst = axis.all_gather(difference[None], 0).max().item()
    if not worst <= bound:
        raise _refusal(name, share, length, f"a relative difference of {worst:.2g}, where {bound:g} is allowed")


def _refusal(name: str, share: int, length: int, what: str) -> PlanError:
    return PlanError(
        f"sequence parallelism: block {name!r} gives another result for {share} of {length} tokens than for all of "
        f"them ({what}). It depends on the number of its tokens, most likely because it derives positions from the "
        "length of its input. Compute positions (rotary tables, position ids) before the blocks and pass them in as "
        "arguments of shape (tokens, ...) or (batch, tokens, ...). If the block is random even in evaluation, disable "
        "this check (check=False)."
    )


def _expected(
    forward: Callable[..., Any], call: Call, device: torch.device
) -> tuple[Tensor, Callable[[], AbstractContextManager[Any]], float]:
    """Return the result on all tokens, the context for the comparison, and the bound of the relative difference.

    The comparison runs in fp32, which shows even the small effect of positions in the first block of an untrained
    model. If that fails, it runs in the block's dtype.
    """
    try:
        # GPUs may round products to TF32.
        bound = 1e-5 if device.type == "cpu" else 1e-4
        with _InFloat32(device):
            return _run(forward, call), lambda: _InFloat32(device), bound
    except LSError:
        raise
    except Exception:  # a kernel that only supports 16 bit, for example; errors of the model itself are raised again
        return _run(forward, call), nullcontext, 5e-3


class _InFloat32(TorchFunctionMode):
    """Pass fp32 instead of 16-bit tensors to torch's functions, and disable autocast."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._autocast = torch.autocast(device.type, enabled=False)

    def __enter__(self) -> _InFloat32:
        self._autocast.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:

        super().__exit__(*error)
        self._autocast.__exit__(*error)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:

        return func(*map_tensors(args, _float32), **map_tensors(kwargs or {}, _float32))


def _float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _run(forward: Callable[..., Any], call: Call) -> Tensor:
    """Run ``forward`` on copies of its caches, and return the first tensor of the result."""
    args, kwargs = map_tensors(call, Tensor.detach, _copied)
    output = forward(*args, **kwargs)
    return next(v for v in ([output] if isinstance(output, Tensor) else output) if isinstance(v, Tensor))


def _copied(leaf: Any) -> Any:
    try:
        return copy.deepcopy(leaf)
    except Exception:  # an object that cannot be copied is rarely a cache
        return leaf


def _difference(actual: Tensor, expected: Tensor) -> Tensor:
    """Return the norm of the difference relative to that of ``expected``: a scalar, fp32."""
    if actual.shape != expected.shape:
        return torch.full((), torch.inf, device=actual.device)
    # Padded tokens may be NaN in both.
    actual, expected = (torch.nan_to_num(t.float(), 0, 0, 0) for t in (actual, expected))
    return (actual - expected).norm() / expected.norm().clamp(min=torch.finfo(torch.float32).tiny)


@contextmanager
def _undisturbed(block: nn.Module, device: torch.device) -> Generator[None, None, None]:
    """Run in evaluation mode, without gradients and dispatch modes; restore modes, counters, buffers, random states."""
    modes = [(module, module.training) for module in block.modules()]
    restore_counters = counters_of(block)
    buffers = [(buffer, buffer.clone()) for buffer in block.buffers()]
    generators = [generator_of(d) for d in {torch.device("cpu"), device}]
    states = [generator.get_state() for generator in generators]
    caching = torch.is_autocast_cache_enabled()
    try:
        # Weights that autocast caches without gradients would have none in the next forward either.
        torch.set_autocast_cache_enabled(False)
        block.eval()
        with torch.no_grad(), without_dispatch_modes(), unfused():
            yield
    finally:
        torch.set_autocast_cache_enabled(caching)
        restore_counters()
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
