"""The best k: the same everywhere, the first among equals."""

import pytest
import torch

from ls_strategy.ops import topk
from ls_strategy.ops.extra_library import routing_library
from ls_strategy.ops.topk import stable_topk, topk_indices_reference
from tests.ops.conftest import limited

EXPERTS = (1, 2, 7, 8, 15, 16, 17, 64, 100, 257)


@pytest.fixture(params=[0, 1, 2, None], ids=["portable", "avx2", "avx512", "reference"])
def implementation(request, monkeypatch):
    if request.param is None:
        monkeypatch.setattr(topk, "_kernels", lambda device_type: False)
        yield
        return
    request.getfixturevalue("compiled")
    if not routing_library.available("cpu"):
        pytest.skip("no kernels of routing")
    yield from limited(routing_library, request.param)


def scores_of(rows, experts, dtype=torch.float32):
    """With ties, both zeros, both infinities and NaN."""
    g = torch.Generator().manual_seed(experts)
    x = torch.randn(rows, experts, generator=g).round(decimals=1)
    for value, share in ((0.0, 0.1), (-0.0, 0.1), (float("inf"), 0.03), (-float("inf"), 0.1), (float("nan"), 0.03)):
        x[torch.rand(rows, experts, generator=g) < share] = value
    return x.to(dtype)


@pytest.mark.usefixtures("implementation")
class TestEvery:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_is_a_stable_sort(self, dtype):
        for experts in EXPERTS:
            scores = scores_of(50, experts, dtype)
            sorted_, order = scores.float().sort(dim=1, descending=True, stable=True)
            for k in {1, min(2, experts), min(8, experts), experts}:
                values, indices = stable_topk(scores, k)
                assert torch.equal(indices, order[:, :k]), (experts, k)
                assert values.dtype == dtype
                torch.testing.assert_close(values.float(), sorted_[:, :k], rtol=0, atol=0, equal_nan=True)

    def test_all_equal(self):
        _, indices = stable_topk(torch.full((3, 40), -float("inf")), 40)
        assert torch.equal(indices, torch.arange(40).expand(3, 40))

    def test_a_nan_of_either_sign_comes_first(self):
        nan = torch.tensor([0x7FC00000, -0x400000], dtype=torch.int32).view(torch.float32)
        assert stable_topk(torch.cat([torch.tensor([float("inf")]), nan])[None], 3)[1].tolist() == [[1, 2, 0]]

    def test_no_rows(self):
        values, indices = stable_topk(torch.zeros(0, 8), 2)
        assert values.shape == indices.shape == (0, 2)

    def test_tensors_with_gaps(self):
        scores = scores_of(30, 20)
        _, indices = stable_topk(scores.t().contiguous().t(), 3)
        assert torch.equal(indices, topk_indices_reference(scores, 3))

    def test_gradient(self):
        scores = torch.randn(20, 9).requires_grad_()
        values, indices = stable_topk(scores, 3)
        grad = torch.randn(20, 3)
        values.backward(grad)
        assert torch.equal(scores.grad, torch.zeros(20, 9).scatter(1, indices, grad))

    def test_many_rows(self):
        scores = scores_of(20_000, 64)
        assert torch.equal(stable_topk(scores, 2)[1], topk_indices_reference(scores, 2))


def test_opcheck(compiled):
    if not topk._kernels("cpu"):
        pytest.skip("no kernels of routing")
    result = torch.library.opcheck(torch.ops.ls_strategy.topk_indices.default, (scores_of(9, 20), 3))
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("k", [0, 9])
def test_refuses_more_than_there_are(k):
    with pytest.raises(ValueError, match=f"k={k}, but it must be from 1 to the number of experts, 8"):
        stable_topk(torch.zeros(4, 8), k)


@pytest.mark.parametrize("scores", [torch.zeros(4), torch.zeros(4, 8).double(), torch.zeros(4, 8).int()])
def test_refuses_other_scores(scores):
    with pytest.raises(ValueError, match="they must be 2-d and fp32, bf16 or fp16"):
        stable_topk(scores, 1)
