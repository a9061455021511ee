"""`RandomTokenDropping`: inner blocks of a model process a random subset of the tokens.

::

    x (B, T, D) ──┬── kept (B, K, D), drawn by every block, in their order ──► block ──┐
                  └── the others bypass the block ────────────────────────────────────► combined (B, T, D)

The first and the last block process all tokens. Yao et al., "Random-LTD", arXiv:2211.11586.

The module's ``forward`` is replaced, not the module: names in ``state_dict`` do not change, so checkpoints load with
and without the callback. Other wrappers around the forward (recomputation, sequence parallelism) run inside and see
only kept tokens.
"""

from __future__ import annotations

import inspect
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from ls_strategy._torch import uncompiled
from ls_strategy.blocks import repeated_blocks
from ls_strategy.checked import above, at_least, checked
from ls_strategy.device import generator_of
from ls_strategy.errors import PlanError, StateError
from ls_strategy.extras.data_efficiency.schedule import Schedule, ScheduledCallback
from ls_strategy.host.pytorch import pl, rank_zero_info
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.parallel.context.tokens import Call, hidden_states, map_tensors, token_dim
from ls_strategy.parallel.hooks import change_output
from ls_strategy.parallel.random import draw, hash64, set_state
from ls_strategy.parallel.regions import untraced
from ls_strategy.transient import Forward


class RandomTokenDropping(ScheduledCallback):
    """Trains the inner blocks of a model on a random part of the tokens, which grows.

    Every block draws new tokens for each sequence in each forward. The randomness comes from the device's default
    generator, so that checkpoint folders resume it and recomputation repeats it. Ranks with different data draw
    different tokens; tensor-parallel ranks draw the same. Evaluation uses all tokens. Logs ``random_ltd/kept_tokens``.

    If ranks shard the tokens of a sequence (``parallel.context``), each keeps the same number of its own.

    The block's first floating argument ``(B, T, D)`` is reduced, and so are masks, position ids and rotary tables that
    have a batch dimension. Tables ``(T, N)`` have none. A block that takes them must accept ``positions`` by name,
    ``(B, K)``, and index them, as the GPT recipe's blocks do.
    """

    tag = "random_ltd/kept_tokens"

    @checked(kept=at_least(1), until=at_least(1), multiple_of=at_least(1), root_degree=above(0), whole_ends=at_least(0))
    def __init__(
        self,
        kept: list[int],
        until: list[int],
        schedule: Literal["linear", "root", "discrete"] = "linear",
        multiple_of: int = 8,
        root_degree: float = 2.0,
        classes: list[str] | None = None,
        whole_ends: int = 1,
    ) -> None:
        """Choose the number of tokens and the blocks.

        Args:
            kept: Tokens that a block processes: the first and the last number; with ``schedule="discrete"`` all numbers
                in order. The length of a sequence or more disables dropping.
            until: The optimizer step at which the last number is reached. With ``discrete``, the last step of each
                number but the last.
            schedule: ``linear``, ``root`` (faster at first), or ``discrete``.
            multiple_of: Numbers in between are multiples of this.
            root_degree: With ``root``: 2 is the square root.
            classes: Class names of the blocks. None: repeated children of every ModuleList and Sequential.
            whole_ends: Blocks at either end that process all tokens.

        Raises:
            ConfigError: The values make no valid schedule.
        """
        super().__init__(
            Schedule(
                values=tuple(kept),
                until=tuple(until),
                kind=schedule,
                multiple_of=multiple_of,
                root_degree=root_degree,
                name="kept",
            )
        )
        self.classes = tuple(classes or ())
        self.whole_ends = whole_ends
        self._forwards: list[DroppingForward] = []
        self._sequence_ranks = 1  # ranks that shard the tokens of a sequence. Each keeps the same number.

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Replace the forwards.

        Raises:
            PlanError: There are no inner blocks, or tokens are sharded in an unsupported way.
        """
        self._stop()
        blocks = middle_blocks(pl_module, self.classes, self.whole_ends)
        place, self._sequence_ranks = _place(trainer, self.schedule)
        self._forwards = [DroppingForward(block, place) for block in blocks.values()]
        rank_zero_info(f"RandomTokenDropping: {len(blocks)} blocks, from {next(iter(blocks))} to {list(blocks)[-1]}")

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        kept = self.current(trainer)
        for forward in self._forwards:
            forward.kept = kept // self._sequence_ranks
        self.log_value(pl_module)

    @override
    def _stop(self) -> None:
        for forward in self._forwards:
            forward.remove()
        self._forwards = []


def _place(trainer: pl.Trainer, schedule: Schedule) -> tuple[int, int]:
    """Return an id that differs between ranks with different tokens, and the number of ranks that shard a sequence."""
    strategy = trainer.strategy
    if not isinstance(strategy, ZeROStrategy):
        return trainer.global_rank, 1
    config = strategy.parallel.config
    if config.tp.sequence_parallel:
        raise PlanError(
            "RandomTokenDropping does not support parallel.tensor.sequence_parallel: ranks hold different tokens "
            "between layers and gather them inside blocks, after each rank has chosen its own. Disable one of them."
        )
    size = config.context
    bad = [kept for kept in schedule.possible() if kept % size]
    if bad:
        raise PlanError(
            f"RandomTokenDropping keeps {bad[0]} tokens, but parallel.context={size} ranks each keep the same number. "
            f"Set multiple_of and all numbers to multiples of {size}."
        )
    return strategy.require_engine().mesh.zero.rank, size


def middle_blocks(model: nn.Module, classes: tuple[str, ...] = (), ends: int = 1) -> dict[str, nn.Module]:
    """Return blocks by name, without ``ends`` blocks at either end of every stack.

    All blocks of the given ``classes`` form one stack. By default the repeated blocks of the model form the stacks.

    Raises:
        PlanError: No block is left.
    """
    names = {id(module): name for name, module in model.named_modules()}
    stacks = list(repeated_blocks(model).values())
    if classes:
        stacks = [[m for m in model.modules() if type(uncompiled(m)).__name__ in classes and m is uncompiled(m)]]
    found = [block for stack in stacks for block in stack[ends : len(stack) - ends]]
    if not found:
        sizes = ", ".join(str(len(stack)) for stack in stacks) or "no"
        wanted = f"of class {', '.join(classes)}" if classes else "that repeat (children of a ModuleList)"
        raise PlanError(
            f"RandomTokenDropping keeps all tokens in {ends} blocks at either end, but the model has {sizes} blocks "
            f"{wanted}. Name the blocks with classes=[...], lower whole_ends, or remove the callback."
        )
    return {names[id(block)]: block for block in found}


# --- a block ---------------------------------------------------------------------------------------------------------


class DroppingForward(Forward):
    """Runs ``module.forward`` on a part of the tokens."""

    def __init__(self, module: nn.Module, place: int = 0) -> None:
        """Replace the block's forward. ``place`` is mixed into the random numbers."""
        module = uncompiled(module)
        self.kept: int | None = None  # tokens to process; None: all
        self._place = place
        self._takes_positions = "positions" in inspect.signature(module.forward).parameters
        super().__init__(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block on the kept tokens and return the others unchanged."""
        if self.kept is None or not self._module.training:
            return self.__wrapped__(*args, **kwargs)
        hidden = _hidden_of((args, kwargs))
        rows, tokens = hidden.shape[:2]
        if self.kept >= tokens:
            return self.__wrapped__(*args, **kwargs)
        index = draw_kept(rows, tokens, self.kept, hidden.device, self._place)
        args, kwargs = keep_tokens((args, kwargs), index, takes_positions=self._takes_positions)
        output = self.__wrapped__(*args, **kwargs)
        return change_output(output, lambda part: put_back(hidden, part, index))


def _hidden_of(call: Call) -> Tensor:
    try:
        return hidden_states(*call)
    except PlanError:
        raise StateError(
            "RandomTokenDropping: a block was called without a floating tensor (batch, tokens, width). Name blocks "
            "that take one with classes=[...]."
        ) from None


@untraced
def draw_kept(rows: int, tokens: int, kept: int, device: torch.device, place: int) -> Tensor:
    """Draw the tokens that every sequence keeps: ``(rows, kept)`` int64, ascending, all sets equally likely.

    Takes one number from the device's default generator, whatever the shape. Ranks that pass another ``place`` draw
    other tokens from the same number.
    """
    stream = generator_of(device)
    number, after = draw(stream)
    set_state(stream, after)
    generator = torch.Generator(device).manual_seed(hash64(number << 20 | place) >> 1)
    scores = torch.rand(rows, tokens, dtype=torch.float64, device=device, generator=generator)
    return scores.topk(kept, dim=1, sorted=False).indices.sort(dim=1).values


def keep_tokens(call: Call, index: Tensor, *, takes_positions: bool) -> Call:
    """Reduce a block's arguments to the tokens in ``index``, ``(B, K)`` int64.

    With ``takes_positions`` the block takes ``positions`` by name and indexes tables by them.

    Raises:
        StateError: An argument along the tokens has no batch dimension.
    """
    args, kwargs = call
    hidden = _hidden_of(call)
    rows, tokens = hidden.shape[:2]
    given: Any = None
    if takes_positions:
        given, kwargs = kwargs.get("positions"), {k: v for k, v in kwargs.items() if k != "positions"}

    def part(tensor: Tensor) -> Tensor:
        if tensor is hidden:
            flat = tensor.reshape(rows * tokens, *tensor.shape[2:]).index_select(0, _flat(index, tokens))
            return flat.view(*index.shape, *tensor.shape[2:])
        return _part_of(tensor, index, tokens, takes_positions=takes_positions)

    args, kwargs = map_tensors(args, part), map_tensors(kwargs, part)
    if takes_positions:
        kwargs["positions"] = index if given is None else _along(given, index, given.dim() - 1)
    return args, kwargs


def put_back(hidden: Tensor, part: Tensor, index: Tensor) -> Tensor:
    """Return ``hidden`` ``(B, T, ...)`` with the block's output ``part`` ``(B, K, ...)`` at the tokens in ``index``.

    Raises:
        StateError: The block returned another shape.
    """
    rows, tokens = hidden.shape[:2]
    if part.shape != (*index.shape, *hidden.shape[2:]):
        raise StateError(
            f"RandomTokenDropping: a block got {index.shape[1]} of {tokens} tokens, {tuple(index.shape)} x "
            f"{tuple(hidden.shape[2:])}, and returned {tuple(part.shape)}. Blocks must return the shape that they get, "
            "(batch, tokens, width). Name such blocks with classes=[...]."
        )
    flat = hidden.to(part.dtype).reshape(rows * tokens, *hidden.shape[2:])
    return flat.index_copy(0, _flat(index, tokens), part.flatten(0, 1)).view(hidden.shape)


def _flat(index: Tensor, tokens: int) -> Tensor:
    """Return the positions in ``(B * T, ...)``: ``(B * K,)``."""
    row = torch.arange(index.shape[0], device=index.device)[:, None]
    return (index + row * tokens).flatten()


def _part_of(tensor: Tensor, index: Tensor, tokens: int, *, takes_positions: bool) -> Tensor:
    """Reduce an argument other than the hidden states."""
    dim = token_dim(tensor, tokens)
    if dim is None:
        return _mask_of(tensor, index, tokens)
    if tensor.dim() == 1:  # position ids shared by all sequences
        return tensor[index]
    if dim == 0:
        if takes_positions:
            return tensor
        raise _without_batch(tensor, tokens)
    return _along(tensor, index, dim)


def _mask_of(tensor: Tensor, index: Tensor, tokens: int) -> Tensor:
    """Reduce masks ``(B, T)`` and ``(B, ..., T or 1, T)``. Other tensors are unchanged."""
    if not tensor.dim() or tensor.shape[-1] != tokens:
        return tensor
    if tensor.dim() == 2 and tensor.shape[0] not in (1, index.shape[0]):
        raise _without_batch(tensor, tokens)
    result = _along(tensor, index, tensor.dim() - 1)
    return _along(result, index, tensor.dim() - 2) if tensor.dim() > 2 and tensor.shape[-2] == tokens else result


def _along(tensor: Tensor, index: Tensor, dim: int) -> Tensor:
    """Index dimension ``dim`` per sequence. A batch dimension of one is broadcast."""
    if dim == 0:
        return tensor[index]
    if tensor.shape[0] not in (1, index.shape[0]):
        raise _without_batch(tensor, tensor.shape[dim])
    tensor = tensor.expand(index.shape[0], *tensor.shape[1:])
    shape = [1] * tensor.dim()
    shape[0], shape[dim] = index.shape
    return torch.take_along_dim(tensor, index.view(shape), dim)


def _without_batch(tensor: Tensor, tokens: int) -> StateError:
    return StateError(
        f"RandomTokenDropping: a block takes a tensor of {tensor.dtype} and shape {tuple(tensor.shape)} along its "
        f"{tokens} tokens without a batch dimension, but every sequence keeps different tokens. Add the dimension, (1, "
        "tokens, ...), or let the block take `positions` by name, (batch, kept tokens), and index its tables by them."
    )
