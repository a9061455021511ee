"""`RandomTokenDropping`: blocks in the middle work on some of the tokens, other ones each.

::

    x (B, T, D) ──┬── kept (B, K, D), drawn anew by every block, in their order ──► block ──┐
                  └── the others go past the block ────────────────────────────────────────► put together (B, T, D)

The first and the last block see all tokens. Yao et al., "Random-LTD", arXiv:2211.11586.

The module's ``forward`` is replaced, not the module: names in ``state_dict`` stay, checkpoints load with and without.
What other parts have put around the forward (recomputation, divided sequences) lies inside, and sees kept tokens only.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from ls_strategy._compat import uncompiled
from ls_strategy.blocks import repeated_blocks
from ls_strategy.checked import above, at_least, checked
from ls_strategy.data_efficiency.schedule import Schedule
from ls_strategy.data_efficiency.scheduled import ScheduledCallback
from ls_strategy.errors import PlanError, StateError
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.parallel.hooks import change_output
from ls_strategy.parallel.random import draw, generator_of, hash64, set_state
from ls_strategy.parallel.regions import untraced
from ls_strategy.parallel.tokens import Call, hidden_states, map_tensors, token_dim


class RandomTokenDropping(ScheduledCallback):
    """Lets blocks in the middle of a model train on a random part of the tokens, a part that grows.

    Every block and every sequence draws its own tokens, anew in each forward; random numbers come from torch's
    generator of the device, so that checkpoint folders resume them and recomputation repeats them. Ranks with other
    tokens draw others, tensor-parallel ranks the same. Evaluation runs whole blocks. Logs ``random_ltd/kept_tokens``.

    Where ranks divide the tokens of every sequence (``sequence_parallel_size``), each keeps the same number of its own.

    A block's first floating argument ``(B, T, D)`` is cut, and so are masks, position ids and rotary tables that have a
    batch dimension. Tables ``(T, N)`` have none: a block that takes such must take ``positions`` by name, ``(B, K)``,
    and look them up, as those of the GPT recipe do.
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
        """Choose how many tokens, and which blocks.

        Args:
            kept: tokens that a block works on: the first and the last number; with ``schedule="discrete"`` each in its
                turn. As many as a sequence has, or more, leave the block as it is.
            until: the optimizer step from which on it is the last number; with ``discrete`` up to which it is the
                first, the second, and so on.
            schedule: ``linear``, ``root`` (faster at first), or ``discrete``.
            multiple_of: numbers in between are multiples of this.
            root_degree: with ``root``: 2 for a square root.
            classes: class names of the blocks. None: the children of every ModuleList and Sequential that look alike.
            whole_ends: blocks at either end that see all tokens.

        Raises:
            ConfigError: these make no schedule.
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
        self._dividers = 1
        """Ranks that divide the tokens of a sequence; each keeps as many of its own."""

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Replace the forwards.

        Raises:
            PlanError: there are no blocks in the middle, or tokens are divided in a way that does not allow it.
        """
        self._stop()
        blocks = middle_blocks(pl_module, self.classes, self.whole_ends)
        place, self._dividers = _place(trainer, self.schedule)
        self._forwards = [DroppingForward(block, place) for block in blocks.values()]
        rank_zero_info(f"RandomTokenDropping: {len(blocks)} blocks, from {next(iter(blocks))} to {list(blocks)[-1]}")

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the number for this batch."""
        kept = self.current(trainer)
        for forward in self._forwards:
            forward.kept = kept // self._dividers
        self.log_value(pl_module)

    @override
    def _stop(self) -> None:
        for forward in self._forwards:
            forward.remove()
        self._forwards = []


def _place(trainer: pl.Trainer, schedule: Schedule) -> tuple[int, int]:
    """A number that tells ranks with other tokens apart, and over how many ranks a sequence is divided."""
    strategy = trainer.strategy
    if not isinstance(strategy, ZeROStrategy):
        return trainer.global_rank, 1
    config = strategy.parallel.config
    if config.tensor_parallel_sequence:
        raise PlanError(
            "RandomTokenDropping with tensor_parallel_sequence: ranks hold different tokens between layers and join "
            "them inside of blocks, where they would have to know the others' choice. Leave one of them out."
        )
    size = config.sequence_parallel_size
    bad = [kept for kept in schedule.possible() if kept % size]
    if bad:
        raise PlanError(
            f"RandomTokenDropping keeps {bad[0]} tokens, and sequence_parallel_size={size} ranks keep a part each: let "
            f"multiple_of and all numbers be multiples of {size}."
        )
    return strategy.require_engine().mesh.zero.rank, size


def middle_blocks(model: nn.Module, classes: tuple[str, ...] = (), ends: int = 1) -> dict[str, nn.Module]:
    """Blocks, but ``ends`` at either end of every stack, by their names.

    Args:
        model: the model.
        classes: class names; all of these are one stack. Empty: the repeated blocks of the model.
        ends: how many to leave out.

    Raises:
        PlanError: none is left.
    """
    names = {id(module): name for name, module in model.named_modules()}
    stacks = list(repeated_blocks(model).values())
    if classes:
        stacks = [[m for m in model.modules() if type(uncompiled(m)).__name__ in classes and m is uncompiled(m)]]
    found = [block for stack in stacks for block in stack[ends : len(stack) - ends]]
    if not found:
        sizes = ", ".join(str(len(stack)) for stack in stacks) or "no"
        wanted = f"of class {', '.join(classes)}" if classes else "that look alike (children of a ModuleList)"
        raise PlanError(
            f"RandomTokenDropping leaves {ends} blocks at either end whole, and the model has {sizes} blocks {wanted}. "
            "Name the blocks by classes=[...], lower whole_ends, or leave the callback out."
        )
    return {names[id(block)]: block for block in found}


# --- a block ---------------------------------------------------------------------------------------------------------


class DroppingForward:
    """Stands in for ``module.forward``. Copies of the module compute without."""

    def __init__(self, module: nn.Module, place: int = 0) -> None:
        """Replace the forward.

        Args:
            module: a block.
            place: mixed into the random numbers.
        """
        module = uncompiled(module)
        self.kept: int | None = None
        """Tokens to work on; None: all."""
        self.__wrapped__ = module.forward  # where `inspect.signature` looks
        self._module = module
        self._had_own = "forward" in vars(module)
        self._place = place
        self._takes_positions = "positions" in inspect.signature(module.forward).parameters
        module.forward = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce__(self) -> Any:
        return getattr, (self._module, "forward")

    def remove(self) -> None:
        """Give the module its own forward back. Idempotent."""
        if vars(self._module).get("forward") is not self:
            return
        if self._had_own:
            self._module.forward = self.__wrapped__
        else:
            del self._module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block on kept tokens, the others as they came."""
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
            "RandomTokenDropping: a block was called without a floating tensor (batch, tokens, width) among its "
            "arguments. Name blocks that take one by classes=[...]."
        ) from None


@untraced
def draw_kept(rows: int, tokens: int, kept: int, device: torch.device, place: int) -> Tensor:
    """Which tokens every sequence keeps: ``(rows, kept)`` int64, ascending, each set equally likely.

    One number is taken from the device's default generator, whatever the shape; it decides all.

    Args:
        rows: sequences.
        tokens: of each.
        kept: of these.
        device: of the result.
        place: the same number gives other tokens elsewhere.
    """
    stream = generator_of(device)
    number, after = draw(stream)
    set_state(stream, after)
    generator = torch.Generator(device).manual_seed(hash64(number << 20 | place) >> 1)
    scores = torch.rand(rows, tokens, dtype=torch.float64, device=device, generator=generator)
    return scores.topk(kept, dim=1, sorted=False).indices.sort(dim=1).values


def keep_tokens(call: Call, index: Tensor, *, takes_positions: bool) -> Call:
    """A block's arguments with kept tokens alone.

    Args:
        call: positional and named arguments.
        index: ``(B, K)`` int64, see `draw_kept`.
        takes_positions: the block takes ``positions``, and looks tables up by them.

    Raises:
        StateError: an argument along the tokens has no batch dimension.
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
    """All tokens: ``hidden`` with ``part`` in the places that ``index`` names.

    Args:
        hidden: ``(B, T, ...)``.
        part: ``(B, K, ...)``, what the block made.
        index: ``(B, K)`` int64.

    Raises:
        StateError: the block returned another shape.
    """
    rows, tokens = hidden.shape[:2]
    if part.shape != (*index.shape, *hidden.shape[2:]):
        raise StateError(
            f"RandomTokenDropping: a block got {index.shape[1]} of {tokens} tokens as {tuple(index.shape)} x "
            f"{tuple(hidden.shape[2:])} and returned {tuple(part.shape)}, which cannot be put among the others. Blocks "
            "must return (batch, tokens, width) as they get it; name such by classes=[...]."
        )
    flat = hidden.to(part.dtype).reshape(rows * tokens, *hidden.shape[2:])
    return flat.index_copy(0, _flat(index, tokens), part.flatten(0, 1)).view(hidden.shape)


def _flat(index: Tensor, tokens: int) -> Tensor:
    """``(B * K,)``: places in ``(B * T, ...)``."""
    row = torch.arange(index.shape[0], device=index.device)[:, None]
    return (index + row * tokens).flatten()


def _part_of(tensor: Tensor, index: Tensor, tokens: int, *, takes_positions: bool) -> Tensor:
    """Of another argument than the hidden states."""
    dim = token_dim(tensor, tokens)
    if dim is None:
        return _mask_of(tensor, index, tokens)
    if tensor.dim() == 1:  # position ids of all sequences
        return tensor[index]
    if dim == 0:
        if takes_positions:
            return tensor
        raise _without_batch(tensor, tokens)
    return _along(tensor, index, dim)


def _mask_of(tensor: Tensor, index: Tensor, tokens: int) -> Tensor:
    """Masks ``(B, T)``, ``(B, ..., T or 1, T)``; what does not run along the tokens stays."""
    if not tensor.dim() or tensor.shape[-1] != tokens:
        return tensor
    if tensor.dim() == 2 and tensor.shape[0] not in (1, index.shape[0]):
        raise _without_batch(tensor, tokens)
    result = _along(tensor, index, tensor.dim() - 1)
    return _along(result, index, tensor.dim() - 2) if tensor.dim() > 2 and tensor.shape[-2] == tokens else result


def _along(tensor: Tensor, index: Tensor, dim: int) -> Tensor:
    """``tensor`` with ``index`` of its dimension ``dim``, by sequences; a batch dimension of one is broadcast."""
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
        f"{tokens} tokens, without a batch dimension, and every sequence keeps other tokens. Give it one, (1, tokens, "
        "...), or let the block take `positions` by name, (batch, kept tokens), and look its tables up by them."
    )
