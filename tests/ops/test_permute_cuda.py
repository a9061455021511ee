"""The CUDA kernels of routing are the references, on a GPU."""

import pytest
import torch

from ls_strategy.ops import _build, permute, topk
from ls_strategy.ops.extra_library import routing_library
from ls_strategy.ops.permute import combine_reference, pair_dots_reference, permute_reference
from tests.ops.test_permute import DTYPES, SHAPES, Routed, assert_same_bits
from tests.ops.test_topk import EXPERTS, scores_of


@pytest.mark.gpu
@pytest.mark.parametrize("dropped", [0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_is_the_reference(dtype, dropped):
    assert routing_library.available("cuda"), _build.status()
    for shape in [*SHAPES, (3000, 2, 300, 130)]:
        r = Routed(shape, dtype, dropped)
        kept = None if r.kept is None else r.kept.cuda()
        order, counts = permute.sort_by_expert(r.indices.cuda(), kept, r.experts)
        assert torch.equal(order.cpu(), r.order)
        assert torch.equal(counts.cpu(), r.counts)
        x, y = r.x.cuda(), r.y.cuda()
        for weights in (None, r.weights):
            w = None if weights is None else weights.cuda()
            result = permute.permute(x, order, r.k, w).cpu()
            assert_same_bits(result, permute_reference(r.x, r.order, weights, r.k))
            result = permute.sum_pairs(y, order, w, len(x), r.k).cpu()
            assert_same_bits(result, combine_reference(r.y, r.order, weights, len(x), r.k))
        dots = permute.pair_dots(x, y, order, r.k).cpu()
        assert_same_bits(dots, pair_dots_reference(r.x, r.y, r.order, r.k))


@pytest.mark.gpu
def test_topk_is_the_reference():
    assert routing_library.available("cuda"), _build.status()
    for experts in EXPERTS:
        scores = scores_of(200, experts)
        for k in {1, min(8, experts), experts}:
            expected = topk.topk_indices_reference(scores, k)
            assert torch.equal(topk.stable_topk(scores.cuda(), k)[1].cpu(), expected)
