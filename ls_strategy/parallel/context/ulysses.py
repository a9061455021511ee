"""Context parallelism by Ulysses: every rank runs the blocks with full parameters on its own tokens.

::

    tokens (B, T) ─► embedding, positions, masks ─► (B, T, D)        the same on every rank
                        blocks: slice on entry   ─► (B, T/size, D)   attention exchanges tokens for heads
                        final norm, head         ─► (B, T/size, V)   token by token
                        logits with the shape       (B, T, V)        see `logits`

Every rank computes ``size`` times the gradient of its tokens. Data parallelism averages gradients over the ranks, which
gives the gradient of the full batch. Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509.

Megatron's sequence parallelism (`sequence`) may slice a rank's tokens again between its tensor-parallel layers. Then it
works inside: the first block's tokens are sliced here first, and every hidden state between blocks has
``T/size/inner`` tokens.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ls_strategy._torch import current_backward_pass
from ls_strategy.device import generator_of
from ls_strategy.distributed.axis import Axis
from ls_strategy.errors import PlanError
from ls_strategy.parallel.context.attention import Interception, attention_over, leave, reenter
from ls_strategy.parallel.context.token_check import compare_with_full
from ls_strategy.parallel.context.tokens import Call, hidden_states, narrow
from ls_strategy.parallel.dim_shard import DimShard, unshard
from ls_strategy.parallel.hooks import Hooks, change_first, change_output
from ls_strategy.parallel.logits import wrap_sequence
from ls_strategy.parallel.random import draw, has_drawn, hash64, position, set_state
from ls_strategy.parallel.regions import gather_from, scatter_to
from ls_strategy.parallel.tensor.sequence import NAMES
from ls_strategy.transient import Forward

_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache")
_MARK = "_ls_strategy_tokens"
"""Attribute of sharded hidden states: the number of tokens on all ranks."""


class SequenceParallel:
    """Blocks that run on this rank's tokens until `remove`. Built by `apply_sequence_parallel`."""

    def __init__(
        self, model: nn.Module, axis: Axis, blocks: Sequence[nn.Module], head: nn.Module | None, *, ring: int = 1,
        check: bool, inner: Axis | None = None,
    ) -> None:  # fmt: skip
        self.axis = axis
        self.ring = ring
        self.inner = Axis("tensor") if inner is None else inner
        self.blocks = list(blocks)
        self.head = head
        names = {id(module): name for name, module in model.named_modules()}
        self._names = {id(module): names.get(id(module), type(module).__name__) for module in (*blocks, head)}
        self._tokens: int | None = None
        """Number of tokens, on all ranks, of the present sequence; None before the first block."""
        self._sharded = False
        """Whether the present sequence is sharded."""
        self._unchecked: Call | None = None
        self._check = check
        self._stream = ExitStack()
        """The random numbers of a block that tensor-parallel ranks slice again."""
        self._inside: dict[int, nn.Module] = {}
        self._hooks = Hooks()
        if axis.size > 1:
            self._attach(model)

    def describe(self) -> str:
        """Return one line for the log."""
        kinds = ", ".join(sorted({type(block).__name__ for block in self.blocks}))
        head = "after the last" if self.head is None else f"in the loss of {self._names[id(self.head)]!r}"
        rings = f" (rings of {self.ring})" if self.ring > 1 else ""
        return (
            f"tokens sharded over {self.axis.size} ranks{rings} in {len(self.blocks)} blocks ({kinds}), gathered {head}"
        )

    def remove(self) -> None:
        """Restore blocks, head and torch's attention. Idempotent."""
        self._hooks.remove()

    def _attach(self, model: nn.Module) -> None:
        for module in model.modules():
            inside = any(m is self.blocks[0] for m in module.modules())
            if inside and module is not self.blocks[0]:
                self._hooks.before(module, self._begin)
        nested = self.inner.size > 1
        for block in self.blocks:
            self._hooks.before(block, self._enter, first=nested)
            self._hooks.after(block, self._leave)
            if nested:
                self._hooks.after(block, self._end_stream, always=True)
            self._hooks.on_remove(_BlockForward(self, block).remove)
            for module in block.modules():
                if module is not block and _may_attend(module):
                    self._inside[id(module)] = module
                    self._hooks.before(module, self._resume)
                    self._hooks.after(module, self._pause, always=True)
        if self.head is not None:
            self._hooks.after(self.head, self._wrap)
        self._hooks.on_remove(Interception().remove)

    def receive(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Continue a sequence in the next stage of a pipeline, where no block has run before.

        Args:
            pairs: what the stage's first block would get if nothing was sharded, of which only the shapes are known,
                and what the previous stage sent.
        """
        self._tokens, self._sharded = None, False
        for expected, received in pairs:
            if received.dim() < 3 or not received.is_floating_point():
                continue
            setattr(received, _MARK, expected.shape[1])
            if received.shape[1] != expected.shape[1]:
                self._tokens, self._sharded = expected.shape[1], True

    # hooks -----------------------------------------------------------------------------------------------------------

    def _begin(self, _module: nn.Module, _args: Any, _kwargs: Any) -> None:
        """Start a new, unsharded sequence when a module that contains the blocks is called."""
        self._tokens = None

    def _enter(self, block: nn.Module, args: Any, kwargs: Any) -> Call | None:
        """Slice the arguments of a block."""
        if not self._is_block(block):
            return None
        hidden = hidden_states(args, kwargs)
        tokens = self._tokens = self._count(block, hidden)
        self._sharded = self._should_shard(tokens, kwargs)
        if not self._sharded:
            return None
        if self.inner.size > 1 and block.training:  # outside of the streams of tensor-parallel ranks
            self._stream.enter_context(_own_stream(self.axis, hidden.device))
        if self._check and block.training and hidden.shape[1] == tokens:
            self._unchecked = (args, kwargs)
        share = tokens // self.axis.size
        return narrow((args, kwargs), tokens, self.axis.rank * share, share)

    def _leave(self, block: nn.Module, _args: Any, output: Any) -> Any:
        """Keep the output of a block sharded, or gather it after the last block of a model without a head."""
        if not self._sharded or not self._is_block(block):
            return None
        return change_output(output, lambda hidden: self._block_output(block, hidden))

    def _end_stream(self, _block: nn.Module, _args: Any, _output: Any) -> None:
        self._stream.close()

    def _block_output(self, block: nn.Module, hidden: Tensor) -> Tensor:
        assert self._tokens is not None
        share = self._tokens // self.axis.size
        if block is not self.blocks[-1]:  # after the last block they are gathered
            share //= self.inner.size
        if hidden.dim() < 3 or hidden.shape[1] != share:
            raise PlanError(
                f"block {self._names[id(block)]!r} got {share} of {self._tokens} tokens and returned a tensor of shape "
                f"{tuple(hidden.shape)}. A block must return (batch, tokens, width) with as many tokens as it got."
            )
        if self.head is None and block is self.blocks[-1]:
            return unshard(hidden, [DimShard(self.axis, 1, (share,) * self.axis.size, averaged=True)])
        setattr(hidden, _MARK, self._tokens)
        return hidden

    def _wrap(self, head: nn.Module, _args: Any, output: Any) -> Any:
        if not self._sharded or self._tokens is None or head is not self.head:
            return None
        share = self._tokens // self.axis.size
        if not isinstance(output, Tensor) or output.dim() < 3 or output.shape[1] != share:
            got = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
            raise PlanError(
                f"head {self._names[id(head)]!r} returned {got}, but each of {self.axis.size} ranks has {share} of "
                f"{self._tokens} tokens. The head must get all of them, (batch, tokens, width). Remove code that "
                "selects tokens before it (logits_to_keep, hidden[:, -1]), or pass head=None, which gathers the tokens "
                "after the last block."
            )
        return wrap_sequence(output, self.axis, self._tokens)

    def _resume(self, module: nn.Module, _args: Any, _kwargs: Any) -> None:
        """Reenter the region where backward recomputes a module inside a block without calling the block."""
        if current_backward_pass() != -1 and self._inside.get(id(module)) is module:
            reenter(self.axis, module, self.ring)

    def _pause(self, module: nn.Module, _args: Any, _output: Any) -> None:
        leave(module)

    def _is_block(self, block: nn.Module) -> bool:
        """Return whether this is one of the blocks, not a deep copy, which has the hooks too but runs unsharded."""
        return any(block is b for b in self.blocks)

    def _count(self, block: nn.Module, hidden: Tensor) -> int:
        """Return the number of tokens on all ranks."""
        known, length = getattr(hidden, _MARK, self._tokens), hidden.shape[1]
        may_begin = block is self.blocks[0] and not hasattr(hidden, _MARK)
        if not may_begin:
            length *= self.inner.size
        if known is None or (may_begin and length * self.axis.size != known):
            return length
        if length != known and length * self.axis.size != known:
            raise PlanError(
                f"block {self._names[id(block)]!r} got {length} tokens, but the sequence has {known}, of which each of "
                f"{self.axis.size} ranks holds {known // self.axis.size}. Blocks must return all tokens that they get."
            )
        if may_begin:
            raise PlanError(
                f"the first block, {self._names[id(block)]!r}, got {length} tokens after a sequence of {known}. They "
                "may be a shard of it or another sequence. Call the blocks inside the forward of a module."
            )
        return known

    def _should_shard(self, tokens: int, kwargs: dict[str, Any]) -> bool:
        """Return whether to shard a sequence.

        Without gradients, generation with a cache and lengths that cannot be sharded run unsharded on every rank.

        Raises:
            PlanError: In training, the number of tokens does not permit it.
        """
        ranks = self.axis.size * self.inner.size
        multiple = math.lcm(ranks, 2 * self.ring if self.ring > 1 else 1)
        fits = tokens % multiple == 0 and tokens >= 2 * ranks
        if not torch.is_grad_enabled():
            return fits and all(kwargs.get(name) is None for name in _CACHES)
        if not fits:
            raise PlanError(
                f"{tokens} tokens cannot be sharded over the {self.axis.size} ranks of the {self.axis.name!r} axis"
                f"{f' and the {self.inner.size} of tensor parallelism' if self.inner.size > 1 else ''}, with at least "
                f"two on each. Pad the batch to a multiple of {multiple} tokens, or change the size."
            )
        return True

    # forward of a block ----------------------------------------------------------------------------------------------

    def run(self, block: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run a block's forward on this rank's tokens. Recomputation in backward runs it again."""
        if not (torch.is_grad_enabled() or self._sharded):
            return forward(*args, **kwargs)
        name, unchecked = self._names[id(block)], self._unchecked
        if unchecked is not None:
            self._check, self._unchecked = False, None
            whole = self._on_all_tokens(forward)
            compare_with_full(block, whole, unchecked, self.axis, name, self.ring, self.inner.size)
        device = hidden_states(args, kwargs).device
        with (
            _own_stream(self.axis, device) if block.training and self.inner.size == 1 else nullcontext(),
            attention_over(self.axis, self.ring) as region,
        ):
            output = forward(*args, **kwargs)
        if not region.calls:
            raise PlanError(
                f"block {name!r} is sharded along the tokens, but never called torch.nn.functional."
                "scaled_dot_product_attention by that name, so tokens of different ranks would not attend to each "
                'other. Use it for the attention (in transformers: attn_implementation="sdpa"; in '
                "nn.MultiheadAttention: need_weights=False; instead of flex_attention and its block mask: attn_mask, "
                "for documents ls_strategy.document_attention), or remove modules without attention from the blocks."
            )
        return output

    def _on_all_tokens(self, forward: Any) -> Any:
        """Return a block's forward that takes and returns the tokens of all tensor-parallel ranks."""
        if self.inner.size == 1:
            return forward

        def on_all_tokens(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = change_first(args, kwargs, lambda x: scatter_to(x, self.inner, 1), NAMES)
            return change_output(forward(*args, **kwargs), lambda x: gather_from(x, self.inner, 1))

        return on_all_tokens


@contextmanager
def _own_stream(axis: Axis, device: torch.device) -> Generator[None, None, None]:
    """Draw different numbers on every rank inside, and the same ones afterwards.

    The numbers depend on the generator's state alone, so that recomputation in backward draws the same. If none was
    drawn inside, the state stays as it was.
    """
    generator = generator_of(device)
    before = position(generator)
    number, after = draw(generator)
    # `random.forked` recognises no seed of 32 bits, so regions inside work as usual.
    generator.manual_seed(hash64(number << 16 | axis.rank) >> 32)
    own = position(generator)
    try:
        yield
    finally:
        set_state(generator, after if has_drawn(generator, own) else before)


class _BlockForward(Forward):
    def __init__(self, owner: SequenceParallel, block: nn.Module) -> None:
        super().__init__(block)
        self._owner = owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._owner.run(self._module, self.__wrapped__, args, kwargs)


def _may_attend(module: nn.Module) -> bool:
    """Return whether the module's forward may call attention: torch's layers without children never do."""
    elementary = type(module).__module__.startswith("torch.nn.modules")
    return not elementary or any(True for _ in module.children())


def apply_sequence_parallel(
    model: nn.Module,
    axis: Axis,
    *,
    blocks: Sequence[nn.Module],
    head: nn.Module | None,
    ring: int = 1,
    check: bool = True,
    inner: Axis | None = None,
) -> SequenceParallel:
    """Shard the tokens over the ranks of ``axis`` between the first block's input and the loss. Not collective.

    All ranks of the axis must get the same batches, and their gradients must be averaged. Arguments of the blocks are
    sliced as in `tokens`. Attention must be `torch.nn.functional.scaled_dot_product_attention`, with a number of heads
    that the axis size, divided by ``ring``, divides. Modules after the blocks must work token by token.
    Dropout in the blocks draws different numbers on every rank; everywhere else all ranks draw the same.

    The first training forward compares a block on this rank's tokens with the same block on all tokens.

    Args:
        model: its parameters may be sharded later.
        axis: the ranks.
        blocks: the transformer blocks, in the order of their calls.
        head: computes logits ``(B, T, V)``, which become `logits.ShardedLogits`. None gathers the tokens after the last
            block.
        ring: ranks among which keys and values pass in a ring; a divisor of the axis size. The other ranks exchange
            tokens for heads.
        check: whether to compare. Without it, a block that derives positions from the length of its input is not found.
        inner: the ranks over which `apply_tensor_parallel` with ``sequence`` has sharded the tokens of these blocks.

    Raises:
        PlanError: There are no blocks, or their attention is known not to call torch's function. In a later forward:
            heads or tokens cannot be sharded over the ranks, or the comparison failed.
    """
    if not blocks:
        raise PlanError(
            "sequence parallelism needs the transformer blocks of the model, but none were given. Name them."
        )
    for block in blocks:
        for module in block.modules():
            kind = getattr(getattr(module, "config", None), "_attn_implementation", None)
            if axis.size > 1 and isinstance(kind, str) and kind != "sdpa":
                raise PlanError(
                    f"sequence parallelism shards torch.nn.functional.scaled_dot_product_attention, but "
                    f"{type(module).__name__} is set to attn_implementation={kind!r}. Load the model with "
                    'attn_implementation="sdpa".'
                )
    return SequenceParallel(model, axis, blocks, head, ring=ring, check=check, inner=inner)
