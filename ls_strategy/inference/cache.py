"""Keys and values of tokens that a network has read, so that each new token is computed once.

::

    slot            0   1   2   3   4   5   6   7       max_length slots per row of the batch, made at the first use
    row 0           -   -   a   b   c │ x   y           prompts end at one slot: shorter ones are padded on the left
    row 1           p   q   r   s   t │ u   v           a row sees its own tokens alone; "-" is seen by nobody
    position of x           0   1   2 │ 3   4

Batch and padding change no row's numbers but by the order in which a kernel sums. With tensor parallelism a rank keeps
its own heads: what is kept is as large as the keys that the attention hands over.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


class LayerCache:
    """One layer's part of a `KVCache`."""

    def __init__(self, shared: KVCache) -> None:
        """Without memory yet."""
        self._shared = shared
        self._storage: Tensor | None = None
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Keep the new tokens' keys and values, and let their queries see all that came before, and themselves.

        Args:
            query: ``(B, H, T, N)``, positions already in it, as in ``key``.
            key: ``(B, K, T, N)``, where K shards H.
            value: as ``key``.

        Returns:
            ``(B, H, T, N)``.
        """
        shared, (rows, heads, new, width) = self._shared, query.shape
        kept, end = key.shape[1], shared.length
        self._keep(key, value, end - new)
        mask, grouped = shared.mask, kept != heads
        if end == new and mask is None:  # nothing came before: as in training
            return functional.scaled_dot_product_attention(query, key, value, is_causal=new > 1, enable_gqa=grouped)
        assert self._keys is not None
        assert self._values is not None
        key, value = self._keys.narrow(2, 0, end), self._values.narrow(2, 0, end)
        if new == 1 and grouped:  # query heads of one key are like tokens that see the same: nothing is repeated
            query = query.reshape(rows, kept, heads // kept, width)
            return functional.scaled_dot_product_attention(query, key, value, mask).reshape(rows, heads, 1, width)
        return functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=grouped)

    def _keep(self, key: Tensor, value: Tensor, start: int) -> None:
        """Write new tokens' keys and values from slot ``start`` on, in memory that is used again over sequences."""
        mine, (rows, heads, new, width) = self._keys, key.shape
        if mine is None or mine.shape[:2] != (rows, heads) or mine.dtype != key.dtype or mine.device != key.device:
            self._make_room(key, (2, rows, heads, self._shared.max_length, width))
        assert self._keys is not None
        assert self._values is not None
        self._keys.narrow(2, start, new).copy_(key)
        self._values.narrow(2, start, new).copy_(value)

    def _make_room(self, like: Tensor, shape: tuple[int, ...]) -> None:
        """The first rows of what there is, or new memory."""
        there = self._storage
        fits = there is not None and there.shape[1] >= shape[1] and there.shape[2:] == shape[2:]
        if there is None or not fits or (there.dtype, there.device) != (like.dtype, like.device):
            # Outside of inference mode, which would keep others from writing to it.
            with torch.inference_mode(mode=False):
                there = self._storage = torch.empty(shape, dtype=like.dtype, device=like.device)
        self._keys, self._values = there[0, : shape[1]], there[1, : shape[1]]

    @property
    def num_bytes(self) -> int:
        """Memory that is taken on this rank."""
        return 0 if self._storage is None else self._storage.nbytes


class KVCache:
    """Of one network, for one batch of sequences after another.

    A forward calls `open` once, and every attention `LayerCache.attend`.
    """

    def __init__(self, num_layers: int, max_length: int) -> None:
        """Takes memory at the first forward: ``2 * num_layers * B * K * max_length * N`` elements.

        Args:
            num_layers: layers with attention.
            max_length: tokens of a sequence, padding included.
        """
        if min(num_layers, max_length) < 1:
            raise ValueError(f"num_layers={num_layers}, max_length={max_length}: both must be at least 1.")
        self.layers = [LayerCache(self) for _ in range(num_layers)]
        self.max_length = max_length
        self.length = 0
        """Slots that are filled, padding included."""

        self.mask: Tensor | None = None
        """Of the forward under way: which slots each of its tokens sees, bool ``(B, 1, T, length)``. None: all up to
        its own where T is 1 or nothing came before."""

        self._slots: Tensor | None = None
        self._padding: Tensor | None = None
        self._seen: Tensor | None = None

    def begin(self, padding: Sequence[int] | None = None, device: torch.device | str = "cpu") -> None:
        """Forget everything: sequences begin anew. Memory stays.

        Args:
            padding: for each row of the batch, how many tokens on the left of what comes first are none. None: all are.
            device: of the tokens to come.

        Raises:
            ValueError: there is more padding than room.
        """
        self.length, self.mask, self._padding, self._seen = 0, None, None, None
        if padding is None or not any(padding):
            return
        if min(padding) < 0 or max(padding) >= self.max_length:
            raise ValueError(f"padding={list(padding)}: must be between 0 and max_length={self.max_length}, exclusive.")
        self._padding = torch.tensor(list(padding), device=device).unsqueeze(1)
        slots = torch.arange(self.max_length, device=device)
        self._seen = (slots >= self._padding)[:, None, None, :]

    def open(self, tokens: Tensor) -> Tensor:
        """Make room for tokens ``(B, T)``, which a network reads next. Returns their positions, ``(T,)`` or ``(B, T)``.

        Raises:
            ValueError: there is no room, or the batch is not the one that `begin` was told of.
        """
        (rows, new), first = tokens.shape, self.length
        end = first + new
        if end > self.max_length:
            raise ValueError(
                f"{new} tokens after {first} do not fit into a cache of max_length={self.max_length}: begin() anew "
                "with fewer, or make a longer one."
            )
        if self._padding is not None and len(self._padding) != rows:
            raise ValueError(f"a batch of {rows} rows, but begin() was told the padding of {len(self._padding)}.")
        self.length = end
        if self._slots is None or self._slots.device != tokens.device:
            with torch.inference_mode(mode=False):
                self._slots = torch.arange(self.max_length, device=tokens.device)
        self.mask = self._visible(first, end, self._slots)
        slots = self._slots[first:end]
        return slots if self._padding is None else (slots - self._padding).clamp_(min=0)

    def _visible(self, first: int, end: int, slots: Tensor) -> Tensor | None:
        """Bool ``(B or 1, 1, end - first, end)``, or None, see `mask`."""
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
        # Padding sees itself: a token that saw nothing would be the softmax of nothing.
        return (causal & self._seen[..., :end]) | (slots == own)

    @property
    def num_bytes(self) -> int:
        """Memory that is taken on this rank."""
        return sum(layer.num_bytes for layer in self.layers)
