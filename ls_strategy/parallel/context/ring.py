"""Ring attention: every rank keeps its queries, and keys and values pass from rank to rank.

::

    step 0   rank 0: k0 v0    rank 1: k1 v1    rank 2: k2 v2      each attends to what it has,
    step 1           k2 v2            k0 v0            k1 v1      while it sends that on,
    step 2           k1 v1            k2 v2            k0 v0      and merges by the sums of exponentials

With a causal mask, tokens are exchanged first so that all ranks have equal work (zig-zag): of ``2 size`` chunks of the
sequence, rank ``r`` gets the chunks ``r`` and ``2 size - 1 - r``, and in each step each rank computes about two pairs
of chunks. The result goes back the same way.

Exact: backward passes keys and values around again, together with their gradients. In 16 bit on a GPU,
torch's flash attention computes what a rank has at a time, and its backward uses the sums over all members. Elsewhere,
and with a mask or documents, scores exist for a few rows at a time, and in fp32 (fp64 for fp64).

Liu et al., "Ring Attention with Blockwise Transformers", arXiv:2310.01889; Brandon et al., "Striped Attention",
arXiv:2311.09431; the zig-zag order follows Grattafiori et al., "The Llama 3 Herd of Models", arXiv:2407.21783, section
3.3.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ls_strategy import device as dev
from ls_strategy._torch import flash_attention, flash_attention_backward, without_dispatch_modes
from ls_strategy.distributed.axis import Axis, PendingExchange
from ls_strategy.errors import PlanError

SCORE_BYTES = 64 << 20
"""Bytes of the scores that are computed at a time."""


class AxisPart:
    """Some ranks of an axis, in order, as an axis of its own without a process group of its own."""

    def __init__(self, axis: Axis, members: Sequence[int]) -> None:
        """``members``: ranks of ``axis``, among them this one."""
        self._axis = axis
        self._members = list(members)
        self.name = axis.name
        self.size = len(self._members)
        self.rank = self._members.index(axis.rank)

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]] | None = None) -> list[Tensor]:
        """Send ``parts[r]`` to member ``r``; see `Axis.all_to_all`."""
        sent, wanted = self._spread(parts), [p.shape for p in parts] if shapes is None else shapes
        at = {member: tuple(shape) for member, shape in zip(self._members, wanted, strict=True)}
        received = self._axis.all_to_all(sent, [at.get(r, (0,)) for r in range(self._axis.size)])
        return [received[member] for member in self._members]

    def start_shift(self, tensor: Tensor) -> tuple[PendingExchange, Tensor]:
        """Start sending ``tensor`` to the next member; return the exchange, and what it receives from the last one."""
        tensor = tensor.contiguous()
        nothing = tensor.new_empty(0)
        incoming = torch.empty_like(tensor)
        following, last = ((self.rank + step) % self.size for step in (1, -1))
        sent = self._spread([tensor if m == following else nothing for m in range(self.size)])
        received = self._spread([incoming if m == last else nothing for m in range(self.size)])
        return self._axis.start_all_to_all(sent, received, "ring"), incoming

    def _spread(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return one tensor per rank of the axis, empty for those that are not members."""
        nothing = parts[0].new_empty(0)
        by_rank = dict(zip(self._members, parts, strict=True))
        return [by_rank.get(rank, nothing) for rank in range(self._axis.size)]


def split_axis(axis: Axis, ring: int) -> tuple[AxisPart, AxisPart]:
    """Return the ranks that exchange heads, neighbours, and those that form a ring, ``axis.size / ring`` apart."""
    heads = axis.size // ring
    first, place = axis.rank // heads * heads, axis.rank % heads
    return AxisPart(axis, range(first, first + heads)), AxisPart(axis, range(place, axis.size, heads))


@dataclass(frozen=True)
class _Setting:
    """Arguments of ring attention that are the same for all pairs of chunks."""

    axis: AxisPart
    causal: bool
    scale: float
    mask: Tensor | None
    """Broadcasts to ``(B, H, T, T)``; bool, or added to the scores."""

    documents: Tensor | None = None
    """Numbers ``(B, T)``, ascending: tokens attend to those of the same number."""

    linked: list[list[bool]] | None = None
    """Whether a chunk, the first index, has a document in common with an earlier one, the second."""

    def chunks(self, member: int) -> tuple[int, int]:
        """Return the two chunks of the sequence that a member has, in order."""
        return (member, 2 * self.axis.size - 1 - member) if self.causal else (2 * member, 2 * member + 1)


def ring_attention(
    axis: AxisPart, inputs: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, causal: bool, scale: float | None,
    documents: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute attention of this rank's queries to the keys of all members. Collective over them.

    Args:
        axis: the members; member ``r`` has the ``r``-th part of the tokens.
        inputs: query ``(B, H, t, N)``, key ``(B, K, t, N)`` and value ``(B, K, t, M)``, for ``t`` tokens of this rank;
            ``H`` is a multiple of ``K``.
        mask: for all tokens, broadcasts to ``(B, H, T, T)``: bool (True attends) or added to the scores. No gradient.
        causal: whether a token attends to itself and its predecessors only.
        scale: of the scores. None: ``N ** -0.5``.
        documents: numbers ``(B, T)`` for all tokens, ascending in every row; with ``causal``, tokens attend to those of
            the same number. The host waits for the device. None: to all.

    Returns:
        ``(B, H, t, M)`` in the dtype of the query.

    Traffic:
        With ``n`` members, per element of key and value: ``n - 1`` shifts forward, and backward ``n - 1`` in their
        dtype and ``n`` in fp32. With ``causal`` also one exchange of query, key, value and result, forward and
        backward, of which a chunk that stays on its rank is not sent.

    Raises:
        PlanError: The tokens do not divide into two chunks per member; or the mask needs a gradient.
    """
    query, key, value = inputs
    if query.shape[2] % 2:
        raise PlanError(
            f"ring attention splits the {query.shape[2]} tokens of a rank into two chunks of equal length. Pad the "
            f"batch to a multiple of {2 * axis.size} tokens."
        )
    if query.shape[1] % key.shape[1]:
        raise PlanError(
            f"ring attention got {query.shape[1]} query heads and {key.shape[1]} key heads, which must divide them."
        )
    if mask is not None and mask.requires_grad:
        raise PlanError(
            "ring attention got a mask that requires a gradient, which it does not compute. Set parallel.ring=1."
        )
    linked = None if documents is None else _linked(documents, 2 * axis.size)
    setting = _Setting(axis, causal, query.shape[-1] ** -0.5 if scale is None else scale, mask, documents, linked)
    if causal:
        query, key, value = (_Relayout.apply(x, axis, True) for x in (query, key, value))
    ring = _FlashRing if mask is None and documents is None and can_flash(query, key, value) else _Ring
    result = ring.apply(query, key, value, setting)
    return _Relayout.apply(result, axis, False) if causal else result  # type: ignore[return-value]


def can_flash(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether to let torch's flash attention compute: in 16 bit, on NVIDIA GPUs from sm_80 on.

    Torch's own switch, ``torch.nn.attention.sdpa_kernel``, counts too. On a CPU it would be slower (measured in bf16 on
    two cores without instructions for it: by a factor of 2.8).
    """
    width, dtype = query.shape[-1], query.dtype
    if query.device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    if value.shape[-1] != width or {key.dtype, value.dtype} != {dtype}:
        return False
    if torch.version.hip is not None or not torch.backends.cuda.is_flash_attention_available():
        return False
    capability = dev.compute_capability(query.device)
    widest = 256 if capability in ((8, 0), (9, 0), (10, 0)) else 192  # the backward needs that much shared memory
    fits = capability >= (8, 0) and width % 8 == 0 and width <= widest
    return fits and torch.backends.cuda.flash_sdp_enabled()


def _linked(documents: Tensor, chunks: int) -> list[list[bool]]:
    """Return `_Setting.linked`: in ascending numbers, the last one of the earlier chunk begins the later one."""
    by_chunk = documents.unflatten(1, (chunks, -1))
    return (by_chunk[:, :, None, 0] == by_chunk[:, None, :, -1]).any(0).tolist()


class _Relayout(torch.autograd.Function):
    """Exchange chunks of tokens between consecutive and zig-zag order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: AxisPart, ahead: bool) -> Tensor:
        ctx.axis, ctx.ahead = axis, ahead
        return _relayout(x, axis, ahead)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _Relayout.apply(grad, ctx.axis, not ctx.ahead), None, None  # type: ignore[return-value]


def _relayout(x: Tensor, axis: AxisPart, ahead: bool) -> Tensor:
    def consecutive(member: int) -> tuple[int, int]:
        return 2 * member, 2 * member + 1

    def zigzag(member: int) -> tuple[int, int]:
        return member, 2 * axis.size - 1 - member

    before, after = (consecutive, zigzag) if ahead else (zigzag, consecutive)
    mine = dict(zip(before(axis.rank), x.chunk(2, 2), strict=True))
    sends, arrives = [], []
    for member in range(axis.size):
        sends.append([c for c in before(axis.rank) if c in after(member)])
        arrives.append([c for c in before(member) if c in after(axis.rank)])
    length = x.shape[2] // 2
    nothing = x.narrow(2, 0, 0)
    parts = [torch.cat([mine[c] for c in chunks], 2) if chunks else nothing for chunks in sends]
    shapes = [(*x.shape[:2], length * len(chunks), *x.shape[3:]) for chunks in arrives]
    received: dict[int, Tensor] = {}
    for chunks, part in zip(arrives, axis.all_to_all(parts, shapes), strict=True):
        received |= dict(zip(chunks, part.split(length, 2), strict=False))
    return torch.cat([received[c] for c in after(axis.rank)], 2)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, setting: _Setting) -> Tensor:
        # Selective recompute must not see the products: it would keep all scores, which change in place below.
        with without_dispatch_modes():
            result, log_sum = _attend(query, key, value, setting)
        ctx.save_for_backward(query, key, value, result, log_sum)
        ctx.setting = setting
        return result.flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, result, log_sum = ctx.saved_tensors
        setting: _Setting = ctx.setting
        dtype = log_sum.dtype
        q, g = _grouped(query, key.shape[1]), _grouped(grad, key.shape[1]).to(dtype)
        delta = (g * result.to(dtype)).sum(-1)
        grad_q = torch.zeros_like(q, dtype=dtype)
        width = key.shape[-1]
        sums = torch.zeros((*key.shape[:-1], width + value.shape[-1]), dtype=dtype, device=key.device)
        pending: tuple[PendingExchange, Tensor] | None = None
        for owner, k_v in _around(setting.axis, torch.cat((key, value), -1)):
            here = torch.zeros_like(sums)
            for rows, k_rows, scores in _pairs(setting, owner, q, k_v[..., :width], dtype):
                k, v = (x.unsqueeze(2).to(dtype) for x in k_v[..., k_rows, :].split((width, value.shape[-1]), -1))
                p = scores.sub_(log_sum[..., rows, None]).exp_()
                here[..., k_rows, width:] += (p.mT @ g[..., rows, :]).sum(2)
                p *= (g[..., rows, :] @ v.mT).sub_(delta[..., rows, None]).mul_(setting.scale)
                grad_q[..., rows, :] += p @ k
                here[..., k_rows, :width] += (p.mT @ q[..., rows, :].to(dtype)).sum(2)
            if pending is not None:
                sums = _arrived(pending)
            pending = setting.axis.start_shift(sums + here)
        assert pending is not None
        sums = _arrived(pending)
        grad_k, grad_v = sums[..., :width].to(key.dtype), sums[..., width:].to(value.dtype)
        return grad_q.flatten(1, 2).to(query.dtype), grad_k, grad_v, None


class _FlashRing(torch.autograd.Function):
    """One call of torch's flash attention for each member, without scores in memory."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, setting: _Setting) -> Tensor:
        query = query.contiguous()  # CUDA's kernel wants rows of adjacent numbers; the others have been put together
        total = query.new_zeros(query.shape, dtype=torch.float32)
        log_sum = query.new_full(query.shape[:-1], -torch.inf, dtype=torch.float32)
        with without_dispatch_modes():  # as in `_Ring`
            for owner, k_v in _around(setting.axis, torch.cat((key, value), -1)):
                rows, k_rows, causal = _block(setting, owner, query.shape[2])
                k, v = k_v[..., k_rows, :].chunk(2, -1)
                part, sums = flash_attention(query[..., rows, :], k, v, causal=causal, scale=setting.scale)
                old, new = log_sum[..., rows], torch.logaddexp(log_sum[..., rows], sums)
                here = total[..., rows, :]
                here.mul_((old - new).exp_()[..., None]).addcmul_(part.float(), (sums - new).exp_()[..., None])
                old.copy_(new)
        result = total.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, log_sum)
        ctx.setting = setting
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, result, log_sum = ctx.saved_tensors
        setting: _Setting = ctx.setting
        width = key.shape[-1]
        grad_q = torch.zeros_like(query, dtype=torch.float32)
        sums = torch.zeros((*key.shape[:-1], 2 * width), dtype=torch.float32, device=key.device)
        pending: tuple[PendingExchange, Tensor] | None = None
        for owner, k_v in _around(setting.axis, torch.cat((key, value), -1)):
            rows, k_rows, causal = _block(setting, owner, query.shape[2])
            k, v = k_v[..., k_rows, :].chunk(2, -1)
            of_rows = [x[..., rows, :] for x in (grad, query, result)]
            grads = flash_attention_backward(
                of_rows[0],
                (of_rows[1], k, v),
                of_rows[2],
                log_sum[..., rows],
                causal=causal,
                scale=setting.scale,
            )
            grad_q[..., rows, :] += grads[0]
            here = torch.zeros_like(sums)
            here[..., k_rows, :width] = grads[1]
            here[..., k_rows, width:] = grads[2]
            if pending is not None:
                sums = _arrived(pending)
            pending = setting.axis.start_shift(sums + here)
        assert pending is not None
        sums = _arrived(pending)
        return grad_q.to(query.dtype), sums[..., :width].to(key.dtype), sums[..., width:].to(value.dtype), None


def _block(setting: _Setting, owner: int, tokens: int) -> tuple[slice, slice, bool]:
    """Return the rows of this rank's queries that attend to the owner's keys, the rows of these, and whether causally.

    In zig-zag order each pair of members is one block: of an earlier owner all queries see the first chunk, of a later
    one the second chunk of queries sees all, and one's own chunks are in order.
    """
    everything, half = slice(0, tokens), tokens // 2
    if not setting.causal or owner == setting.axis.rank:
        return everything, everything, setting.causal
    if owner < setting.axis.rank:
        return everything, slice(0, half), False
    return slice(half, tokens), everything, False


def _attend(query: Tensor, key: Tensor, value: Tensor, setting: _Setting) -> tuple[Tensor, Tensor]:
    """Return the result ``(B, K, H / K, t, M)`` and the logarithm of the sum of exponentials of every row."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    q = _grouped(query, key.shape[1])
    shape = q.shape[:-1]
    total = q.new_zeros((*shape, value.shape[-1]), dtype=dtype)
    highest = q.new_full(shape, -torch.inf, dtype=dtype)
    exponentials = q.new_zeros(shape, dtype=dtype)
    width = key.shape[-1]
    for owner, k_v in _around(setting.axis, torch.cat((key, value), -1)):
        for rows, k_rows, scores in _pairs(setting, owner, q, k_v[..., :width], dtype):
            old, new = highest[..., rows], torch.maximum(highest[..., rows], scores.amax(-1))
            finite = new.masked_fill(new == -torch.inf, 0)  # all masked so far
            scores = scores.sub_(finite[..., None]).exp_()
            factor = (old - finite).exp()
            exponentials[..., rows] = exponentials[..., rows] * factor + scores.sum(-1)
            part = scores @ k_v[..., k_rows, width:].unsqueeze(2).to(dtype)
            total[..., rows, :] = total[..., rows, :] * factor[..., None] + part
            highest[..., rows] = new
    empty = exponentials == 0  # rows that attend to nothing are zero, as in torch
    result = (total / exponentials.masked_fill(empty, 1)[..., None]).to(query.dtype)
    log_sum = (highest + exponentials.log()).masked_fill(empty, 0)
    return result, log_sum


def _grouped(x: Tensor, key_heads: int) -> Tensor:
    """Return ``(B, H, t, N)`` as ``(B, K, H / K, t, N)``."""
    return x.unflatten(1, (key_heads, -1))


def _arrived(pending: tuple[PendingExchange, Tensor]) -> Tensor:
    pending[0].wait()
    return pending[1]


def _around(axis: AxisPart, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield every member and its tensor, this rank's first, while the next one arrives."""
    current = mine.contiguous()
    for step in range(axis.size):
        pending = axis.start_shift(current) if step + 1 < axis.size else None
        yield (axis.rank - step) % axis.size, current
        if pending is not None:
            current = _arrived(pending)


def _pairs(
    setting: _Setting, owner: int, q: Tensor, key: Tensor, dtype: torch.dtype
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield rows of this rank's queries, rows of the owner's keys, and their masked scores."""
    length = key.shape[2] // 2
    for a, q_chunk in enumerate(setting.chunks(setting.axis.rank)):
        for b, k_chunk in enumerate(setting.chunks(owner)):
            if setting.causal and k_chunk > q_chunk:
                continue
            if setting.linked is not None and k_chunk < q_chunk and not setting.linked[q_chunk][k_chunk]:
                continue
            k_rows = slice(b * length, (b + 1) * length)
            k = key[..., k_rows, :].unsqueeze(2).to(dtype)
            step = max(SCORE_BYTES // max(4 * q.shape[:3].numel() * length, 1), 1)
            for first in range(0, length, step):
                rows = slice(a * length + first, a * length + min(first + step, length))
                scores = (q[..., rows, :].to(dtype) @ k.mT).mul_(setting.scale)
                count = rows.stop - rows.start
                if setting.causal and k_chunk == q_chunk:
                    later = torch.ones((count, length), dtype=torch.bool, device=q.device).triu_(first + 1)
                    scores.masked_fill_(later, -torch.inf)
                tokens = slice(q_chunk * length + first, q_chunk * length + first + count)
                k_tokens = slice(k_chunk * length, (k_chunk + 1) * length)
                if setting.mask is not None:
                    scores = _masked(scores, setting.mask, tokens, k_tokens)
                if setting.documents is not None:
                    own, others = setting.documents[:, tokens, None], setting.documents[:, None, k_tokens]
                    scores.masked_fill_((own != others)[:, None, None], -torch.inf)
                yield rows, k_rows, scores


def _masked(scores: Tensor, mask: Tensor, rows: slice, columns: slice) -> Tensor:
    part = mask[..., rows if mask.shape[-2] > 1 else slice(None), columns if mask.shape[-1] > 1 else slice(None)]
    while part.dim() < 4:
        part = part[None]
    heads = scores.shape[1:3]
    part = part.unflatten(1, heads) if part.shape[1] > 1 else part.unsqueeze(1)
    return scores.masked_fill_(~part, -torch.inf) if part.dtype == torch.bool else scores.add_(part)
