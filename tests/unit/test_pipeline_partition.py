"""Partitioning of a model: balance, the stack of blocks, other parameters, and what a rank keeps."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ls_strategy.errors import PlanError
from ls_strategy.parallel.pipeline.balance import balance
from ls_strategy.parallel.pipeline.partition import find_row, keep_own, make_cut
from ls_strategy.parallel.pipeline.sample import sample_batch
from ls_strategy.parallel.pipeline.schedules import place
from ls_strategy.parallel.pipeline.trace import observe, stand_in
from recipes.gpt.network import GPT, GPTConfig

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_inductor_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # or torch.utils.flop_counter sets it, for good


# --- balance ----------------------------------------------------------------------------------------------------------


def test_balance_is_the_best_of_all_divisions() -> None:
    generator = random.Random(0)
    for _ in range(60):
        weights = [generator.choice([0, 1, 2, 5, 0.5, 11]) for _ in range(generator.randint(1, 9))]
        parts = generator.randint(1, len(weights))
        found = balance(weights, parts)
        best = None
        for inner in itertools.combinations(range(1, len(weights)), parts - 1):
            bounds = (0, *inner, len(weights))
            sums = [sum(weights[a:b]) for a, b in itertools.pairwise(bounds)]
            key = (max(sums), sum(s * s for s in sums))
            best = key if best is None else min(best, key)
        sums = [sum(weights[a:b]) for a, b in itertools.pairwise(found)]
        assert len(sums) == parts
        assert all(a < b for a, b in itertools.pairwise(found))
        assert (max(sums), sum(s * s for s in sums)) == best


def test_balance_of_many_blocks_and_of_too_few() -> None:
    assert balance([1] * 10, 4) in ((0, 3, 6, 8, 10), (0, 2, 4, 7, 10), (0, 2, 5, 8, 10), (0, 3, 5, 7, 10))
    assert len(balance([0.1] * 200, 64)) == 65
    with pytest.raises(PlanError, match="Got 3 blocks for 4 stages"):
        balance([1, 1, 1], 4)


# --- the stack --------------------------------------------------------------------------------------------------------


def gpt(tied: bool = True, layers: int = 6, positions: str = "learned") -> GPT:
    config = GPTConfig(
        vocab_size=32,
        block_size=8,
        num_layers=layers,
        num_heads=2,
        width=8,
        positions=positions,  # type: ignore[arg-type]
        tied_embeddings=tied,
    )
    return GPT(config)


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def test_the_stack_is_the_longest_row_that_is_not_inside_another() -> None:
    assert list(find_row(Wrapper(gpt()), 2)) == [f"model.blocks.{i}" for i in range(6)]
    model = nn.Sequential(*(nn.Sequential(*(nn.Linear(1, 1) for _ in range(9))) for _ in range(3)))
    assert list(find_row(model, 3)) == ["0", "1", "2"]
    with pytest.raises(
        PlanError, match=r"'0' and '1' have 9 modules each. Choose the one to partition \(parallel.pipeline.blocks"
    ):
        find_row(model, 4)
    assert next(iter(find_row(model, 4, "1"))) == "1.0"


def test_layers_of_the_model_come_first() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Sequential(*(nn.Linear(1, 1) for _ in range(5)))
            self.b = nn.Linear(1, 1)

        def to_layers(self) -> list[Any]:
            return [*self.a[:2], torch.tanh, self.b, *self.a[2:]]

    assert list(find_row(Wrapper(Net()), 2)) == [
        "model.a.0",
        "model.a.1",
        "model.b",
        "model.a.2",
        "model.a.3",
        "model.a.4",
    ]


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"Linear has no ModuleList or Sequential of 2 modules or more.*to_layers"):
        find_row(nn.Linear(1, 1), 2)
    with pytest.raises(PlanError, match=r"parallel.pipeline.blocks='blocs'.*Choose one of: 'blocks'"):
        find_row(gpt(), 2, "blocs")
    with pytest.raises(PlanError, match="6 blocks are too few for 8 stages"):
        find_row(gpt(), 8, "blocks")
    shared = nn.Linear(1, 1)
    with pytest.raises(PlanError, match="'0' and '2' are one module"):
        find_row(nn.Sequential(shared, nn.Tanh(), shared), 2)
    with pytest.raises(PlanError, match="Got method='size', but it must be uniform"):
        make_cut(gpt(), (0, 1), method="size")
    with pytest.raises(PlanError, match="matches no class of the blocks: Block"):
        make_cut(gpt(), (0, 1), method="type:Decoder")
    with pytest.raises(PlanError, match="flops' requires a dry run"):
        make_cut(gpt(), (0, 1), method="flops")


# --- division ---------------------------------------------------------------------------------------------------------


def step_of(model: GPT) -> Any:
    def step(tokens: Tensor) -> Tensor:
        return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    return step


def test_methods() -> None:
    model = gpt(layers=8)
    assert make_cut(model, (0, 1, 2), method="uniform").bounds in ((0, 3, 6, 8), (0, 3, 5, 8), (0, 2, 5, 8))
    big = nn.Sequential(nn.Linear(64, 64), *(nn.Linear(8, 8) for _ in range(5)))
    assert make_cut(big, (0, 1), method="parameters").bounds == (0, 1, 6)
    net = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU(), nn.Conv2d(1, 1, 1), nn.ReLU(), nn.Conv2d(1, 1, 1), nn.Flatten())
    weights = make_cut(net, (0, 1, 2), method="type:conv").weights
    assert weights == (1, 0, 1, 0, 1, 0)
    bounds = make_cut(net, (0, 1, 2), method="type:conv").bounds
    assert [sum(weights[a:b]) for a, b in itertools.pairwise(bounds)] == [1, 1, 1]


def test_a_dry_run_counts_flops_and_sees_what_is_used_where() -> None:
    """The head of a model with many words is as much work as a block; a dry run on meta finds that."""
    for positions in ("rotary", "learned"):
        model = gpt(tied=False, layers=4, positions=positions)
        blocks = find_row(model, 2)
        before = torch.random.get_rng_state()
        usage = observe(model, blocks, step_of(model), torch.zeros(2, 8, dtype=torch.int64), CPU)
        assert torch.equal(torch.random.get_rng_state(), before)
        names = {"token_embedding.weight"} | ({"position_embedding.weight"} if positions == "learned" else set())
        assert usage.before == names
        assert usage.after == {"norm.weight", "head.weight"}
        assert len(set(usage.flops)) == 1
        c = model.config
        matrices = sum(p.numel() for p in model.blocks[0].parameters() if p.dim() == 2)
        attention = 2 * 2 * 8 * 8 * c.width  # per sample: scores, and what they weigh
        assert usage.flops[0] == 2 * (2 * 8 * matrices + attention)
        assert usage.flops_after == 2 * 2 * 8 * c.width * c.vocab_size
        assert usage.flops_before == 0
        assert make_cut(model, (0, 1), method="flops", usage=usage).weights[-1] > usage.flops[0]


def test_a_dry_run_knows_better_than_the_order_of_registration() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 1)
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
            self.stem = nn.Linear(2, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    model = Net()
    wrong = make_cut(model, (0, 1))
    assert wrong.stages_of["head.weight"] == (0,)
    usage = observe(model, find_row(model, 2), lambda x: model(x).sum().item(), torch.zeros(3, 2), CPU)
    right = make_cut(model, (0, 1), usage=usage)
    assert right.stages_of["head.weight"] == right.stages_of["head.bias"] == (1,)
    assert right.stages_of["stem.weight"] == (0,)


class Beside(nn.Module):
    """Its own parameters are the first ones, although they are assigned last."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.inner.token = nn.Parameter(torch.ones(4))
        self.scale = nn.Parameter(torch.ones(4))
        self.both = nn.Parameter(torch.ones(4))
        self.never = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.inner.token * self.both
        for block in self.inner.blocks:
            x = block(x)
        return self.head(x * self.scale + self.both)


def test_parameters_beside_the_blocks_are_on_both_ends() -> None:
    cut = make_cut(Beside(), (0, 1, 2))
    names = ("scale", "both", "never", "inner.token")
    assert {n: cut.stages_of[n] for n in names} == dict.fromkeys(names, (0, 2))
    assert [(t.names, t.ranks) for t in cut.tied] == [((n,), (0, 2)) for n in names]
    assert cut.stages_of["head.weight"] == (2,)
    assert sum(cut.numel) == sum(p.numel() for p in Beside().parameters()) + 16


def test_a_dry_run_says_on_which_end_they_are_used() -> None:
    model = Beside()
    usage = observe(model, find_row(model, 2), model, torch.zeros(3, 4), CPU)
    cut = make_cut(model, (0, 1), usage=usage)
    assert cut.stages_of["inner.token"] == (0,)
    assert cut.stages_of["scale"] == (1,)
    assert cut.stages_of["both"] == cut.stages_of["never"] == (0, 1)


def test_a_stand_in_is_observed_and_the_model_stays_as_it_is() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
            self.norm = nn.BatchNorm1d(4)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.norm(self.blocks(x)).sum()

    model = Counting()
    on_meta = stand_in(model)
    assert all(p.is_meta for p in on_meta.parameters())
    assert not any(p.is_meta for p in model.parameters())
    observe(on_meta, find_row(on_meta, 2), on_meta, torch.ones(3, 4), CPU)
    assert (model.calls, on_meta.calls) == (0, 1)
    assert model.norm.num_batches_tracked == 0
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(PlanError, match=r"Counting cannot be copied.*lock"):
        stand_in(model)


def test_what_is_compiled_with_its_blocks_is_refused() -> None:
    model = Wrapper(gpt())
    model.model.compile(backend="eager")
    with pytest.raises(PlanError, match=r"'model' is compiled together with its blocks.*block.compile\(\)"):
        make_cut(model, (0, 1))
    inner = torch.compile(nn.Sequential(*(nn.Linear(1, 1) for _ in range(4))), backend="eager")
    with pytest.raises(PlanError, match="'model' is compiled together with its blocks"):
        make_cut(Wrapper(inner), (0, 1))  # type: ignore[arg-type]
    blocks = gpt()
    for block in blocks.blocks:
        block.compile(backend="eager")
    assert make_cut(blocks, (0, 1)).blocks == make_cut(gpt(), (0, 1)).blocks


# --- a batch to observe with ------------------------------------------------------------------------------------------


class Rows(Dataset):
    def __init__(self, at_once: bool) -> None:
        if at_once:
            self.__getitems__ = lambda indices: [(i, i) for i in indices]

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index


class Stream(IterableDataset):
    def __init__(self, once: bool) -> None:
        self.begun = iter(range(9)) if once else None

    def __iter__(self) -> Iterator[int]:
        return self if self.begun else iter(range(9))  # type: ignore[return-value]

    def __next__(self) -> int:
        assert self.begun is not None
        return next(self.begun)


def test_a_sample_batch_is_the_first_and_takes_nothing_away() -> None:
    for at_once in (False, True):
        loader = DataLoader(Rows(at_once), batch_size=3, shuffle=True, num_workers=2)
        states = torch.random.get_rng_state()
        assert [t.tolist() for t in sample_batch(loader)] == [[0, 1, 2]] * 2
        assert torch.equal(torch.random.get_rng_state(), states)
    assert sample_batch(DataLoader(Rows(False), batch_size=9))[0].tolist() == [0, 1, 2, 3, 4]
    assert sample_batch(DataLoader(Rows(False), batch_sampler=[[4, 2], [1]]))[0].tolist() == [4, 2]  # type: ignore[arg-type]
    assert sample_batch(DataLoader(Rows(False), batch_size=None)) == [0, 0]
    loader = DataLoader(Stream(once=False), batch_size=4)
    for _ in range(2):
        assert sample_batch(loader).tolist() == next(iter(loader)).tolist() == [0, 1, 2, 3]
    assert sample_batch([7, 8]) == 7


@pytest.mark.parametrize("source", [DataLoader(Stream(once=True), batch_size=4), iter([1, 2]), []])
def test_what_would_be_missing_later_is_not_taken(source: Any) -> None:
    with pytest.raises(PlanError, match=r"gives every batch once|has no batch"):
        sample_batch(source)


def test_tied_parameters_are_named_with_their_stages() -> None:
    cut = make_cut(gpt(), place(2, 2, "loop"), method="uniform")
    (tied,) = cut.tied
    assert set(tied.names) == {"token_embedding.weight", "head.weight"}
    assert (tied.stages, tied.ranks) == ((0, 3), (0, 1))
    (tied,) = make_cut(gpt(), place(2, 2, "v"), method="uniform").tied
    assert (tied.stages, tied.ranks) == ((0, 3), (0,))
    assert make_cut(gpt(tied=False), (0, 1)).tied == ()


def test_the_table_names_blocks_and_shares() -> None:
    model = gpt()
    cut = make_cut(model, (0, 1), method="uniform")
    lines = cut.table().splitlines()
    assert "blocks.0 .. blocks.2" in lines[1]
    assert "blocks.3 .. blocks.5" in lines[2]
    assert f"{cut.numel[0]:,d}" in lines[1]
    assert "on stages 0, 1" in lines[3]
    assert lines[0].endswith("balanced: uniform")
    assert lines[1].endswith("50.0%")
    tied = model.head.weight.numel()
    assert sum(cut.numel) == sum(p.numel() for p in model.parameters()) + tied


def test_a_rank_keeps_its_own_parameters() -> None:
    for rank_of in ((0, 1), place(2, 2, "loop"), place(2, 2, "v")):
        full = {name: p.numel() for name, p in gpt(tied=False).named_parameters()}
        kept: list[str] = []
        for rank in (0, 1):
            model = gpt(tied=False)
            before = dict(model.named_parameters())
            cut = make_cut(model, rank_of, method="uniform")
            keep_own(model, cut, rank)
            after = dict(model.named_parameters())
            assert list(after) == list(before)
            here = [name for name, p in after.items() if not p.is_meta]
            assert set(here) == cut.names_of(rank)
            assert all(after[name] is before[name] for name in here)
            assert all(after[name].shape == before[name].shape for name in after)
            kept += here
        assert sorted(kept) == sorted(full)


def test_what_is_shared_stays_shared() -> None:
    for rank in (0, 1, 2):
        model = gpt(layers=6)
        keep_own(model, make_cut(model, (0, 1, 2), method="uniform"), rank)
        assert model.head.weight is model.token_embedding.weight
        assert model.head.weight.is_meta == (rank == 1)
