"""The memory of one buffer's gathers when its parameters are not sent as they are.

::

    own      | b | c  |                 this rank's shard, in the dtype of the parameters
    values   a | b | c      |....|      all ranks' encoded shards, only while they are gathered
    full     | a | b | c      |....|    decoded

A buffer without a `Wire` is gathered in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ls_strategy.distributed.buffer_pool import BufferPool
from ls_strategy.distributed.wire_format import WireFormat
from ls_strategy.layout import FlatLayout


class Wire:
    """The memory of one buffer's gathers in another format."""

    keeps = False
    """Whether what has arrived is read as it is. Otherwise it is decoded into ``full``."""

    def __init__(
        self,
        form: WireFormat,
        layout: FlatLayout,
        shard: tuple[int, int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        pool: BufferPool,
        encodes: bool,
    ) -> None:
        """Describe the wire; it has no memory yet.

        Args:
            form: the format.
            layout: of the buffer.
            shard: this rank's range of it.
            dtype: of the parameters.
            device: of the buffer.
            pool: lends the memory of ``own``.
            encodes: whether shards are encoded before they are sent. If not, they are stored in this format.
        """
        self.form = form
        self.values = torch.empty(form.numel(layout.numel), dtype=form.dtype, device=device)
        self.values.untyped_storage().resize_(0)
        self.sizes = None if layout.sizes is None else tuple(form.numel(n) for n in layout.sizes)
        self.exact = False
        """Whether the parameters are gathered as they are, for user code outside of the unit's own forward."""

        self.encodes = encodes
        self._shard, self._shard_dtype, self._pool = shard, dtype, pool
        self._own: Tensor | None = None

    def place(self, start: int, stop: int) -> slice:
        """Return where elements ``[start, stop)`` of the buffer are in ``values``."""
        return slice(self.form.numel(start), self.form.numel(stop))

    def own_part(self) -> Tensor:
        """Return where this rank's shard goes before a gather: in ``values``, or in memory from which it is encoded."""
        if not self.encodes:
            self._pool.allocate(self.values)
            return self.values[self.place(*self._shard)]
        if self._own is None:
            start, stop = self._shard
            self._own = self._pool.take(stop - start, self._shard_dtype, self.values.device)
        return self._own

    def encode_own_part(self) -> None:
        """Bring `own_part` into ``values``, if it is not there."""
        if self._own is not None:
            self._pool.allocate(self.values)
            self.form.encode(self._own, self.values[self.place(*self._shard)])
            self._give_own()

    def decode(self, full: Tensor) -> None:
        """Write what has arrived to ``full``, ``(numel,)``, and free the wire's memory."""
        self._pool.allocate(full)
        self.form.decode(self.values, full)
        self.free()

    def encoded(self, full: Tensor) -> Tensor:
        """Return what would be sent for ``full``, in new memory."""
        out = torch.empty(self.values.numel(), dtype=self.values.dtype, device=full.device)
        self.form.encode(full, out)
        return out

    def release(self) -> None:
        """Free all memory; the next gather is in the format again."""
        self._give_own()
        self.free()
        self.exact = False

    def free(self) -> None:
        """Free the memory of ``values``."""
        self.values.untyped_storage().resize_(0)

    def _give_own(self) -> None:
        if self._own is not None:
            self._pool.give([self._own])
            self._own = None
