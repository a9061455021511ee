"""The key-value cache: each token's keys and values are computed once.

::

    slot            0   1   2   3   4   5   6   7       max_length slots per row, allocated at the first use
    row 0           -   -   a   b   c │ x   y           prompts end at one slot: padding is on the left
    row 1           p   q   r   s   t │ u   v           a row attends to its own tokens only; nothing attends to "-"
    position of x           0   1   2 │ 3   4

Batch size and padding change a row's results only through the order in which a kernel sums. With tensor parallelism
each rank caches the heads that it computes: the cache is as large as the keys that the attention passes in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


class LayerCache:
    """The keys and values of one layer of a `KVCache`."""

    def __init__(self, shared: KVCache) -> None:
        """Create an empty cache; memory is allocated at the first use."""
        self._shared = shared
        self._storage: Tensor | None = None
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append the new tokens' keys and values, and compute attention over all tokens so far.

        Args:
            query: ``(B, H, T, N)``, with positional encoding applied, as for ``key``.
            key: ``(B, K, T, N)``, where K divides H.
            value: same shape as ``key``.

        Returns:
            ``(B, H, T, N)``.
        """
        shared, (rows, heads, new, width) = self._shared, query.shape
        kept, end = key.shape[1], shared.length
        self._keep(key, value, end - new)
        mask, grouped = shared.mask, kept != heads
        if end == new and mask is None:  # the cache was empty: plain causal attention, as in training
            return functional.scaled_dot_product_attention(query, key, value, is_causal=new > 1, enable_gqa=grouped)
        assert self._keys is not None
        assert self._values is not None
        key, value = self._keys.narrow(2, 0, end), self._values.narrow(2, 0, end)
        if new == 1 and grouped:  # treat the query heads of one key head as tokens: keys need not be repeated
            query = query.reshape(rows, kept, heads // kept, width)
            return functional.scaled_dot_product_attention(query, key, value, mask).reshape(rows, heads, 1, width)
        return functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=grouped)

    def _keep(self, key: Tensor, value: Tensor, start: int) -> None:
        """Write the new tokens' keys and values from slot ``start`` on. Memory is reused across sequences."""
        mine, (rows, heads, new, width) = self._keys, key.shape
        if mine is None or mine.shape[:2] != (rows, heads) or mine.dtype != key.dtype or mine.device != key.device:
            self._make_room(key, (2, rows, heads, self._shared.max_length, width))
        assert self._keys is not None
        assert self._values is not None
        self._keys.narrow(2, start, new).copy_(key)
        self._values.narrow(2, start, new).copy_(value)

    def _make_room(self, like: Tensor, shape: tuple[int, ...]) -> None:
        """Use the first rows of the storage, or allocate new storage if it is too small."""
        there = self._storage
        fits = there is not None and there.shape[1] >= shape[1] and there.shape[2:] == shape[2:]
        if there is None or not fits or (there.dtype, there.device) != (like.dtype, like.device):
            # Outside of inference mode: tensors created inside could not be written to outside of it.
            with torch.inference_mode(mode=False):
                there = self._storage = torch.empty(shape, dtype=like.dtype, device=like.device)
        self._keys, self._values = there[0, : shape[1]], there[1, : shape[1]]

    @property
    def num_bytes(self) -> int:
        """Bytes allocated on this rank."""
        return 0 if self._storage is None else self._storage.nbytes


class KVCache:
    """The key-value cache of one network, reusable for one batch of sequences after another.

    A forward pass calls `open` once, and every attention layer calls `LayerCache.attend`.
    """

    def __init__(self, num_layers: int, max_length: int) -> None:
        """Create an empty cache for sequences of up to ``max_length`` tokens, including padding.

        The first forward allocates ``2 * num_layers * B * K * max_length * N`` elements.
        """
        if min(num_layers, max_length) < 1:
            raise ValueError(f"Got num_layers={num_layers} and max_length={max_length}, but both must be at least 1.")
        self.layers = [LayerCache(self) for _ in range(num_layers)]
        self.max_length = max_length
        self.length = 0  # slots that are filled, including padding
        # The current forward's mask, bool ``(B, 1, T, length)``; None: causal, with T equal to 1 or ``length``.
        self.mask: Tensor | None = None
        self._slots: Tensor | None = None
        self._padding: Tensor | None = None
        self._seen: Tensor | None = None

    def begin(self, padding: Sequence[int] | None = None, device: torch.device | str = "cpu") -> None:
        """Start new sequences. Memory is kept.

        Args:
            padding: for each row, the number of padding tokens on the left of the next tokens. None: no padding.
            device: device of the tokens.

        Raises:
            ValueError: there is more padding than room.
        """
        self.length, self.mask, self._padding, self._seen = 0, None, None, None
        if padding is None or not any(padding):
            return
        if min(padding) < 0 or max(padding) >= self.max_length:
            raise ValueError(
                f"Got padding={list(padding)}, but each must be at least 0 and below max_length={self.max_length}."
            )
        self._padding = torch.tensor(list(padding), device=device).unsqueeze(1)
        slots = torch.arange(self.max_length, device=device)
        self._seen = (slots >= self._padding)[:, None, None, :]

    def open(self, tokens: Tensor) -> Tensor:
        """Reserve slots for the tokens ``(B, T)`` of the next forward. Returns their positions, ``(T,)`` or ``(B, T)``.

        Raises:
            ValueError: the cache is full, or the batch size differs from that given to `begin`.
        """
        (rows, new), first = tokens.shape, self.length
        end = first + new
        if end > self.max_length:
            raise ValueError(
                f"Got {new} tokens after {first}, but they do not fit into a cache of max_length={self.max_length}. "
                "Call begin() and give fewer tokens, or make a longer cache."
            )
        if self._padding is not None and len(self._padding) != rows:
            raise ValueError(
                f"Got a batch of {rows} rows, but begin() was given the padding of {len(self._padding)} rows."
            )
        self.length = end
        if self._slots is None or self._slots.device != tokens.device:
            with torch.inference_mode(mode=False):
                self._slots = torch.arange(self.max_length, device=tokens.device)
        self.mask = self._visible(first, end, self._slots)
        slots = self._slots[first:end]
        return slots if self._padding is None else (slots - self._padding).clamp_(min=0)

    def _visible(self, first: int, end: int, slots: Tensor) -> Tensor | None:
        """Return the mask, bool ``(B or 1, 1, end - first, end)``, or None; see `mask`."""
        alone = end - first == 1
        if self._seen is None and (alone or not first):
            return None
        if alone:
            assert self._seen is not None
            return self._seen[..., :end]
        slots, own = slots[:end], slots[first:end].unsqueeze(1)
        causal = slots <= own
        if self._seen is None:
            return causal[None, None]
        # Padding attends to itself: the softmax over no tokens would be NaN.
        return (causal & self._seen[..., :end]) | (slots == own)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated on this rank."""
        return sum(layer.num_bytes for layer in self.layers)
