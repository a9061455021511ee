"""Whether a block computes from its own tokens what it computes from all of them: asked once, before training.

A block that derives positions from the length of its input would take the first token of every rank for the first of
the sequence, and train on, badly.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ls_strategy._compat import without_dispatch_modes
from ls_strategy.distributed.axis import Axis
from ls_strategy.errors import LSError, PlanError
from ls_strategy.parallel.attention import attention_over, unfused
from ls_strategy.parallel.random import generator_of
from ls_strategy.parallel.tokens import Call, crop, hidden_states, map_tensors, narrow

CHECKED = 1024
"""Tokens that are compared at most: attention over all of them would take this one rank too long."""


def compare_with_whole(
    block: nn.Module, forward: Callable[..., Any], call: Call, tokens: int, axis: Axis, name: str
) -> None:
    """Run ``forward`` on all tokens and on this rank's, and compare. Collective.

    Without gradients and dropout; random numbers and buffers are afterwards as before.

    Args:
        block: whose forward it is; its parameters must be there.
        forward: what would run.
        call: its arguments, whole.
        tokens: of the call.
        axis: over which they are divided.
        name: of the block, for the error.

    Raises:
        PlanError: they differ on some rank. On all ranks.
    """
    limit = CHECKED - CHECKED % (2 * axis.size)
    length = min(tokens, max(limit, 2 * axis.size))
    share = length // axis.size
    short = crop(call, tokens, length)
    device = hidden_states(*call).device
    with _undisturbed(block, device):
        expected, around, bound = _expected(forward, short, device)
        try:
            with around(), attention_over(axis):
                actual = _run(forward, narrow(short, length, axis.rank * share, share))
        except LSError:
            raise
        except (RuntimeError, ValueError, IndexError, AssertionError) as error:
            raise _refusal(name, share, length, f"it failed: {error}") from error
    difference = _difference(actual, expected.narrow(1, axis.rank * share, share))
    worst = axis.all_gather(difference[None], 0).max().item()
    if not worst <= bound:
        raise _refusal(name, share, length, f"a relative difference of {worst:.2g}, where {bound:g} is allowed")


def _refusal(name: str, share: int, length: int, what: str) -> PlanError:
    return PlanError(
        f"sequence parallelism: block {name!r} computes something else from {share} of {length} tokens than from all "
        f"of them ({what}). It depends on how many tokens it gets, most likely by deriving positions from the length "
        "of its input: compute positions (rotary tables, position ids) before the blocks and pass them in as arguments "
        "of shape (tokens, ...) or (batch, tokens, ...). If it is random even in evaluation, switch this check off "
        "(check=False)."
    )


def _expected(
    forward: Callable[..., Any], call: Call, device: torch.device
) -> tuple[Tensor, Callable[[], AbstractContextManager[Any]], float]:
    """The result on all tokens, what to compare under, and the largest relative difference that rounding explains.

    In fp32, where even the small part that positions have in the first block of an untrained model stands out; as it
    is, if that cannot be.
    """
    try:
        # Products on GPUs may be rounded to TF32.
        bound = 1e-5 if device.type == "cpu" else 1e-4
        with InFloat32(device):
            return _run(forward, call), lambda: InFloat32(device), bound
    except LSError:
        raise
    except Exception:  # a kernel for 16 bit only, say; what is wrong with the model itself comes up again
        return _run(forward, call), nullcontext, 5e-3


class InFloat32(TorchFunctionMode):
    """Inside, functions of torch get fp32 for every 16-bit tensor, and nothing is cast to 16 bit by autocast."""

    def __init__(self, device: torch.device) -> None:
        """For tensors of one type of device."""
        super().__init__()
        self._autocast = torch.autocast(device.type, enabled=False)

    def __enter__(self) -> InFloat32:
        """Switch autocast off, too."""
        self._autocast.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """As before."""
        super().__exit__(*error)
        self._autocast.__exit__(*error)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Cast and call."""
        return func(*map_tensors(args, _float32), **map_tensors(kwargs or {}, _float32))


def _float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _run(forward: Callable[..., Any], call: Call) -> Tensor:
    """The first tensor of the result. A cache gets keys in a copy only."""
    args, kwargs = map_tensors(call, Tensor.detach, _copied)
    output = forward(*args, **kwargs)
    return next(v for v in ([output] if isinstance(output, Tensor) else output) if isinstance(v, Tensor))


def _copied(leaf: Any) -> Any:
    try:
        return copy.deepcopy(leaf)
    except Exception:  # what cannot be copied is rarely a cache
        return leaf


def _difference(actual: Tensor, expected: Tensor) -> Tensor:
    """Root mean square of the difference, relative to that of what is expected; a scalar, fp32."""
    if actual.shape != expected.shape:
        return torch.full((), torch.inf, device=actual.device)
    # Padded tokens may well be NaN, on both sides.
    mine, must = (torch.nan_to_num(t.float(), 0, 0, 0) for t in (actual, expected))
    return (mine - must).norm() / must.norm().clamp(min=torch.finfo(torch.float32).tiny)


@contextmanager
def _undisturbed(block: nn.Module, device: torch.device) -> Generator[None, None, None]:
    """Inside: evaluation, no gradients, nothing recorded. After: modes, buffers and random states as before."""
    modes = [(module, module.training) for module in block.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in block.buffers()]
    generators = [generator_of(d) for d in {torch.device("cpu"), device}]
    states = [generator.get_state() for generator in generators]
    caching = torch.is_autocast_cache_enabled()
    try:
        # What autocast caches without gradients would have none in the forward that follows, either.
        torch.set_autocast_cache_enabled(False)
        block.eval()
        with torch.no_grad(), without_dispatch_modes(), unfused():
            yield
    finally:
        torch.set_autocast_cache_enabled(caching)
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
