"""The compiled kernels, driven directly: ``python -m tests.gpu.kernels [DEVICE]`` runs each of them a little.

That is what the tools of CUDA watch: they find accesses out of bounds and races that leave the numbers right.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from ls_strategy.ops import native, permute, topk
from ls_strategy.ops.moments import BLOCK, Moment
from ls_strategy.ops.norm import sum_of_squares
from tests.ops.cases import CASES, DTYPES, FORMATS, Buffers, assert_same_bits, make, run
from tests.ops.test_permute import Routed
from tests.ops.test_topk import scores_of

BOUNDARY = 1 << 31
"""Elements that a 32-bit index cannot count."""

# more elements than an int counts -------------------------------------------------------------------------------------


def large_sum(device: torch.device, n: int, dtype: torch.dtype) -> Tensor:
    """Return sum of squares and number of non-finite elements of ``n - 2`` ones, 3 and 5: the sum is ``n + 32``."""
    grad = torch.ones(n, dtype=dtype, device=device)
    grad[-2:] = torch.tensor([3.0, 5.0], dtype=dtype, device=device)
    return sum_of_squares(grad).cpu()


def large_sum_bytes(n: int) -> int:
    """Return the device memory that `large_sum` needs in 16 bit, with that for sums of blocks."""
    return 2 * n + n // 16 + (1 << 28)


UPDATED = "adamw"
WINDOW = 8 * BLOCK


def large_update(device: torch.device, n: int, boundary: int) -> list[str]:
    """Update ``n`` elements with 8-bit moments, and windows of them alone: at both ends, and around ``boundary``.

    Returns:
        where the two differ.
    """
    buffers = _large(n, device)
    starts = {0, boundary - WINDOW // 2, boundary, n // 2 // BLOCK * BLOCK, (n - WINDOW // 2) // BLOCK * BLOCK}
    windows = {start: buffers.narrow(start, min(start + WINDOW, n)).clone() for start in sorted(starts)}
    run(CASES[UPDATED], buffers, clip=_clip(device))
    differ = []
    for start, expected in windows.items():
        grad = buffers.grad[start : start + WINDOW]
        alone = Buffers(expected.param, expected.moments, grad, expected.out)
        run(CASES[UPDATED], alone, clip=_clip(device), offset=start)
        try:
            assert_same_bits(buffers.narrow(start, min(start + WINDOW, n)), alone)
        except AssertionError as difference:
            differ.append(f"from element {start}: {difference}")
    return differ


def large_update_bytes(n: int) -> int:
    """Return the device memory that `large_update` needs: parameter, two moments, gradient and copy in 16 bit."""
    return (4 + 2 + 2 + 2) * n + 2 * 4 * (n // BLOCK) + (1 << 28)


def _large(n: int, device: torch.device) -> Buffers:
    """Return random buffers, made on the device in place."""
    generator = torch.Generator(device=device).manual_seed(1)

    def normal(dtype: torch.dtype) -> Tensor:
        return torch.empty(n, dtype=dtype, device=device).normal_(generator=generator)

    stored = []
    for signed in CASES[UPDATED].signed:
        codes = torch.empty(n, dtype=torch.uint8, device=device).random_(0, 256, generator=generator)
        scales = torch.full((-(-n // BLOCK),), 2.0**-4, device=device)
        stored.append(Moment(codes, scales, signed))
    return Buffers(
        normal(torch.float32), stored, normal(torch.bfloat16), torch.zeros(n, dtype=torch.bfloat16, device=device)
    )


def _clip(device: torch.device) -> Tensor:
    return torch.tensor(0.37, device=device)


# a little of everything ----------------------------------------------------------------------------------------------

SIZES = (1, 15, 257, 5000)
"""Below a vector, below a warp's worth, over a block of 8-bit moments, and over a block of sums."""


def updates(device: torch.device) -> None:
    """Run every update with every format, at aligned and at odd offsets."""
    for case in CASES.values():
        for moment_format in FORMATS:
            for n in SIZES:
                for grad_dtype, out_dtype in zip(DTYPES, (*DTYPES[1:], None), strict=True):
                    buffers = make(case, n, moment_format, grad_dtype, out_dtype, device=str(device))
                    run(case, buffers, clip=_clip(device))
                    if moment_format != "int8" and n > 3:
                        run(case, buffers.narrow(3, n), clip=_clip(device), offset=3)


def norms(device: torch.device) -> None:
    """Run the sums of squares, over more than one group of blocks."""
    for dtype in DTYPES:
        for n in (*SIZES, 4096 * 257 + 5):
            sum_of_squares(torch.randn(n).to(dtype).to(device), unscale=0.3)
            sum_of_squares(torch.randn(n + 1).to(dtype).to(device)[1:], unscale=0.3)


def routing(device: torch.device) -> None:
    """Run the kernels that sort, permute and combine the tokens of experts, and the choice of experts."""
    for dtype in DTYPES:
        for shape in ((1, 1, 1, 1), (40, 3, 64, 127), (300, 2, 16, 512), (3000, 2, 300, 130)):
            routed = Routed(shape, dtype, 0.3)
            kept = None if routed.kept is None else routed.kept.to(device)
            order, _ = permute.sort_by_expert(routed.indices.to(device), kept, routed.experts)
            x, y = routed.x.to(device), routed.y.to(device)
            for weights in (None, routed.weights.to(device)):
                permute.permute(x, order, routed.k, weights)
                permute.sum_pairs(y, order, weights, len(x), routed.k)
            permute.pair_dots(x, y, order, routed.k)
    for experts in (1, 17, 257):
        topk.stable_topk(scores_of(50, experts).to(device), min(8, experts))


def all_kernels(device: torch.device) -> None:
    """Run everything."""
    assert native.available(device.type), "no compiled kernels"
    for part in (updates, norms, routing):
        part(device)
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Run everything on the device that the command names."""
    all_kernels(torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda"))
    print("all kernels have run")


if __name__ == "__main__":
    main()
