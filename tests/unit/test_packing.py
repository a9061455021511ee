"""Packed documents: every target once, none across documents, few padding tokens."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from ls_strategy import PackedDocuments, document_mask
from ls_strategy.errors import ConfigError
from recipes.gpt.network import GPT, GPTConfig


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 99), max_size=30), min_size=1), st.integers(1, 12))
def test_every_pair_of_neighbours_is_a_target_once(documents, length):
    expected = Counter(pair for d in documents for pair in pairwise(d))
    if not expected:
        with pytest.raises(ConfigError, match="two tokens"):
            PackedDocuments(documents, length)
        return
    packed = PackedDocuments(documents, length)
    found: Counter[tuple[int, int]] = Counter()
    for sample in (packed[i] for i in range(len(packed))):
        assert all(t.shape == (length,) and t.dtype == torch.long for t in sample.values())
        real = sample["targets"] != -100
        assert torch.equal(real, sample["documents"] >= 0)
        found.update(zip(sample["tokens"][real].tolist(), sample["targets"][real].tolist(), strict=True))
        for number in sample["documents"][real].unique():
            inside = sample["documents"] == number
            assert torch.equal(sample["positions"][inside], torch.arange(inside.sum()))
            assert torch.equal(sample["tokens"][inside][1:], sample["targets"][inside][:-1])
    assert found == expected
    assert packed.fill == pytest.approx(sum(expected.values()) / (len(packed) * length))


def test_almost_nothing_is_padding():
    random.seed(0)
    documents = [torch.zeros(random.randint(2, 1025), dtype=torch.int32) for _ in range(500)]
    assert PackedDocuments(documents, 1024).fill > 0.97


def model() -> tuple[GPT, PackedDocuments]:
    torch.manual_seed(0)
    documents = [torch.randint(1, 40, (n,)) for n in (6, 9, 4, 12, 5, 7)]
    return GPT(GPTConfig(vocab_size=40, block_size=16, num_layers=2, width=32)).double(), PackedDocuments(documents, 16)


def test_the_loss_is_that_of_documents_alone():
    network, packed = model()
    for sample in (packed[i] for i in range(len(packed))):
        row = {k: v[None] for k, v in sample.items()}
        logits = network(row["tokens"], positions=row["positions"], documents=row["documents"])
        for number in range(int(sample["documents"].max()) + 1):
            inside = sample["documents"] == number
            alone = network(sample["tokens"][inside][None])
            loss = functional.cross_entropy(logits[0, inside], sample["targets"][inside])
            expected = functional.cross_entropy(alone[0], sample["targets"][inside])
            torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


def test_no_bit_of_a_document_depends_on_another():
    network, packed = model()
    row = {k: v[None] for k, v in packed[0].items()}
    call = {"positions": row["positions"], "documents": row["documents"]}
    before = network(row["tokens"], **call)
    masked = network(row["tokens"], positions=row["positions"], mask=document_mask(row["documents"]))
    torch.testing.assert_close(before, masked, rtol=1e-12, atol=1e-12)
    first = row["documents"] == 0
    after = network(torch.where(first, (row["tokens"] + 1) % 40, row["tokens"]), **call)
    assert torch.equal(before[~first], after[~first])
    assert not torch.equal(before[first], after[first])
    assert (~first).any()


def test_what_is_no_document_is_refused():
    for documents in ("text", [[0.5, 1.5]], [["a"]], 3, [torch.ones(2, 2)], [None]):
        with pytest.raises(ConfigError):
            PackedDocuments(documents, 4)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="numbers"):
        document_mask(torch.ones(2, 2))
