"""Schedules, shortened batches, dropped tokens: against hand-written references, and in a plain Trainer."""

from __future__ import annotations

import copy
import pickle
import warnings
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from ls_strategy import ConfigError, PlanError, RandomTokenDropping, SequenceCurriculum, StateError
from ls_strategy.extras.data_efficiency.curriculum import shorten
from ls_strategy.extras.data_efficiency.schedule import Schedule
from ls_strategy.extras.data_efficiency.token_dropping import DroppingForward, draw_kept, keep_tokens, middle_blocks
from recipes.gpt.network import GPT, Block, GPTConfig, Rotary
from tests.dist.ranks import quiet

T = 16
CONFIG = GPTConfig(vocab_size=61, block_size=T, num_layers=4, num_heads=2, width=16)


# --- schedules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [8, 10, 64])
@pytest.mark.parametrize(("kind", "degree"), [("linear", 1.0), ("root", 2.0), ("root", 3.0)])
def test_ramps_are_those_of_deepspeed(kind, degree, first):
    scheduler = pytest.importorskip("deepspeed.runtime.data_pipeline.curriculum_scheduler")
    config = {
        "min_difficulty": first, "max_difficulty": 1024, "schedule_type": f"fixed_{kind}",
        "schedule_config": {"total_curriculum_step": 977, "difficulty_step": 16, "root_degree": degree},
    }  # fmt: skip
    theirs = scheduler.CurriculumScheduler(config)
    ours = Schedule(values=(first, 1024), until=(977,), kind=kind, multiple_of=16, root_degree=degree)
    assert [ours.value(at) for at in range(1200)] == [theirs.get_difficulty(at) for at in range(1200)]
    assert {ours.value(at) for at in range(1200)} <= set(ours.possible())


def test_stairs_are_those_of_deepspeed():
    scheduler = pytest.importorskip("deepspeed.runtime.data_pipeline.curriculum_scheduler")
    stairs = {"difficulty": [64, 128, 96, 256], "max_step": [5, 9, 40]}
    config = {
        "min_difficulty": 64, "max_difficulty": 256, "schedule_type": "fixed_discrete", "schedule_config": stairs,
    }  # fmt: skip
    theirs = scheduler.CurriculumScheduler(config)
    ours = Schedule(values=(64, 128, 96, 256), until=(5, 9, 40), kind="discrete")
    assert [ours.value(at) for at in range(60)] == [theirs.get_difficulty(at) for at in range(60)]


def test_kept_tokens_are_those_of_deepspeed():
    scheduler = pytest.importorskip("deepspeed.runtime.data_pipeline.data_routing.scheduler")
    ramp = {
        "min_value": 128, "max_value": 2048, "schedule_type": "fixed_linear",
        "schedule_config": {"seq_per_step": 16, "require_steps": 500},
    }  # fmt: skip
    config = {
        "total_layer_num": 24, "random_ltd_layer_num": 22, "random_ltd_schedule": ramp, "global_batch_size": 8,
        "layer_token_lr_schedule": {"enabled": False},
    }  # fmt: skip
    theirs = scheduler.RandomLTDScheduler(config)
    ours = Schedule(values=(128, 2048), until=(500,), multiple_of=16)
    assert [ours.value(at) for at in range(600)] == [theirs.get_value(at) for at in range(600)]


def test_a_schedule_by_hand():
    root = Schedule(values=(64, 1024), until=(100,), kind="root")
    assert [root.value(at) for at in (1, 4, 25, 100)] == [160, 256, 544, 1024]
    odd = Schedule(values=(10, 100), until=(10,), multiple_of=16)
    assert [odd.value(at) for at in (0, 1, 5, 9, 10, 11)] == [16, 16, 48, 80, 100, 100]
    assert set(odd.possible()) == {16, 32, 48, 64, 80, 96, 100}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lengths": [64], "until": [5]}, "the first and the last of lengths"),
        ({"lengths": [64, 32], "until": [5]}, "in ascending order"),
        ({"lengths": [64, 128], "until": [5, 6]}, "one number in until"),
        ({"lengths": [64, 128], "until": [5], "schedule": "discrete", "multiple_of": 0}, "at least 1"),
        ({"lengths": [64, 128], "until": [5, 6], "schedule": "discrete"}, "one number fewer"),
        ({"lengths": [64, 128, 256], "until": [6, 5], "schedule": "discrete"}, "ascend"),
        ({"lengths": [64, 128], "until": [5], "schedule": "cosine"}, "'linear', 'root' or 'discrete'"),
        ({"lengths": [64, 128], "until": [5], "unit": "samples"}, "'steps' or 'tokens'"),
    ],
)
def test_what_is_no_schedule(options, words):
    with pytest.raises(ConfigError, match=words):
        SequenceCurriculum(**options)


def test_options_of_token_dropping():
    with pytest.raises(ConfigError, match="kept="):
        RandomTokenDropping(kept=[8], until=[5])
    with pytest.raises(ConfigError, match="a list of texts"):
        RandomTokenDropping(kept=[8, 16], until=[5], classes="Block")  # type: ignore[arg-type]


# --- batches ---------------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    tokens: Tensor
    names: list[str]


def test_every_tensor_along_the_tokens_is_cut():
    tokens = torch.arange(2 * T).view(2, T)
    mask = torch.ones(2, T, T, dtype=torch.bool)
    batch = {
        "tokens": tokens,
        "nested": [(tokens + 1, torch.randn(2, T, 3)), Batch(tokens, ["a", "b"])],
        "mask": mask,
        "bias": torch.randn(2, 1, T, T),
        "padding": torch.randn(2, 1, 1, T),
        "label": torch.tensor([0, 1]),
        "one_hot": torch.zeros(2, 5),
    }
    short, count = shorten(batch, 6)
    assert count == 12
    assert torch.equal(short["tokens"], tokens[:, :6])
    assert short["tokens"].is_contiguous()
    assert torch.equal(short["nested"][0][0], tokens[:, :6] + 1)
    assert torch.equal(short["nested"][0][1], batch["nested"][0][1][:, :6])
    assert torch.equal(short["nested"][1].tokens, tokens[:, :6])
    assert short["nested"][1].names == ["a", "b"]
    assert short["mask"].shape == (2, 6, 6)
    assert torch.equal(short["bias"], batch["bias"][..., :6, :6])
    assert short["padding"].shape == (2, 1, 1, 6)
    assert short["label"] is batch["label"]
    assert short["one_hot"] is batch["one_hot"]
    assert tokens.shape == (2, T)


def test_sequences_that_are_short_already_stay():
    batch = (torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, 4, dtype=torch.int64))
    assert shorten(batch, 4) == (batch, 12)
    features = (torch.zeros(3, T, 2), torch.zeros(3))
    assert shorten(features, 8)[0][0].shape == (3, 8, 2)


def test_batches_that_cannot_be_cut():
    with pytest.raises(StateError, match=r"a tensor of integer tokens.*\(4,\) of torch.int64"):
        shorten((torch.zeros(4, dtype=torch.int64), "text"), 8)
    with pytest.raises(StateError, match="token dimensions are ambiguous"):
        shorten((torch.zeros(2, T, dtype=torch.int64), torch.zeros(2, T, T)), 8)


# --- a block ---------------------------------------------------------------------------------------------------------


def rotary_block(dtype: torch.dtype = torch.float64) -> tuple[Block, tuple[Tensor, Tensor]]:
    torch.manual_seed(3)
    block = Block(CONFIG).to(dtype)
    cos, sin = Rotary(T, CONFIG.head_width, 10000.0)(T)
    return block, (cos.to(dtype), sin.to(dtype))


def by_hand(block: Block, x: Tensor, rotation: tuple[Tensor, Tensor], index: Tensor) -> Tensor:
    """Sequence by sequence: the kept tokens with their own angles, as a batch of one; the others as they came."""
    rows = []
    for row, kept in zip(x, index, strict=True):
        part = block(row[kept][None], tuple(table[kept] for table in rotation))[0]
        rows.append(torch.stack([part[(kept == t).nonzero().item()] if t in kept else row[t] for t in range(len(row))]))
    return torch.stack(rows)


def test_a_block_on_kept_tokens_is_the_reference_with_all_gradients():
    block, rotation = rotary_block()
    x = torch.randn(3, T, CONFIG.width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)
    wrapped = DroppingForward(block)
    wrapped.kept = 6
    torch.manual_seed(5)
    out = block(x, rotation)
    (out * weight).sum().backward()
    actual = [x.grad, *(p.grad for p in block.parameters())]
    wrapped.remove()
    x.grad = None
    block.zero_grad()
    torch.manual_seed(5)
    index = draw_kept(3, T, 6, x.device, 0)
    expected = by_hand(block, x, rotation, index)
    (expected * weight).sum().backward()
    assert torch.allclose(out, expected, rtol=0, atol=1e-13)
    for ours, theirs in zip(actual, [x.grad, *(p.grad for p in block.parameters())], strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
    # The others went past the block, to the last bit.
    passed = torch.ones(3, T, dtype=torch.bool).scatter_(1, index, False)
    assert torch.equal(out[passed], x[passed])
    assert not torch.equal(out[~passed], x[~passed])


def test_all_tokens_kept_is_the_plain_block_bit_for_bit():
    block, rotation = rotary_block(torch.float32)
    x = torch.randn(2, T, CONFIG.width)
    torch.manual_seed(1)
    plain, after = block(x, rotation), torch.get_rng_state()
    wrapped = DroppingForward(block)
    for kept in (T, T + 1, None):
        wrapped.kept = kept
        torch.manual_seed(1)
        assert torch.equal(block(x, rotation), plain)
        assert torch.equal(torch.get_rng_state(), after)  # no random number was taken


def test_evaluation_sees_all_tokens():
    block, rotation = rotary_block(torch.float32)
    x = torch.randn(2, T, CONFIG.width)
    plain = block.eval()(x, rotation)
    wrapped = DroppingForward(block)
    wrapped.kept = 4
    assert torch.equal(block(x, rotation), plain)
    assert not torch.equal(block.train()(x, rotation), plain)


def test_kept_tokens_are_drawn_evenly_and_in_order():
    torch.manual_seed(0)
    index = torch.cat([draw_kept(50, 12, 5, torch.device("cpu"), 0) for _ in range(80)])
    assert (index.diff(dim=1) > 0).all()
    counts = index.flatten().bincount(minlength=12).double()
    expected = 4000 * 5 / 12
    # Each is binomial with a deviation of 31: five deviations.
    assert (counts - expected).abs().max() < 5 * (expected * 7 / 12) ** 0.5
    assert len({tuple(row) for row in index.tolist()}) > 0.9 * 792  # nearly all the sets there are


def test_kept_tokens_follow_from_the_generator_and_the_place():
    device = torch.device("cpu")
    torch.manual_seed(7)
    first, state = draw_kept(4, 64, 8, device, 0), torch.get_rng_state()
    torch.manual_seed(7)
    assert torch.equal(draw_kept(4, 64, 8, device, 0), first)
    torch.manual_seed(7)
    assert not torch.equal(draw_kept(2, 32, 8, device, 1), first[:2])
    assert torch.equal(torch.get_rng_state(), state)  # the same numbers were taken, whatever was drawn
    assert not torch.equal(draw_kept(4, 64, 8, device, 0), first)


@pytest.mark.gpu
def test_every_call_on_a_gpu_draws_other_tokens():
    device = torch.device("cuda", 0)
    torch.cuda.manual_seed(7)
    first, second = draw_kept(4, 64, 8, device, 0), draw_kept(4, 64, 8, device, 0)
    assert first.device == device
    assert not torch.equal(first, second)
    torch.cuda.manual_seed(7)
    assert torch.equal(draw_kept(4, 64, 8, device, 0), first)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_around_a_block_keeps_the_same_tokens(use_reentrant):
    block, rotation = rotary_block(torch.float32)
    x = torch.randn(2, T, CONFIG.width, requires_grad=True)
    wrapped = DroppingForward(block)
    wrapped.kept = 5
    gradients = []
    for run in (block, lambda *args: checkpoint(block, *args, use_reentrant=use_reentrant)):
        torch.manual_seed(2)
        x.grad = None
        block.zero_grad()
        run(x, rotation).square().sum().backward()
        gradients.append([x.grad, *(p.grad for p in block.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["before", "after"])
def test_compiled_blocks_drop_the_same_tokens(compiled):
    """Compiled before the forward is replaced, or after it."""
    plain, rotation = rotary_block(torch.float32)
    block = copy.deepcopy(plain)
    x = torch.randn(2, T, CONFIG.width)
    if compiled == "before":
        block.compile(backend="aot_eager")
    forwards = [DroppingForward(plain), DroppingForward(block)]
    if compiled == "after":
        block.compile(backend="aot_eager")
    for kept in (4, 8, 12, T):
        results = []
        for module, forward in zip((plain, block), forwards, strict=True):
            forward.kept = kept
            torch.manual_seed(1)
            results.append(module(x, rotation))
        assert torch.allclose(*results, rtol=0, atol=1e-6)


def test_names_copies_and_removal():
    model = GPT(CONFIG)
    names = list(model.state_dict())
    wrapped = [DroppingForward(block) for block in model.blocks[1:3]]
    for forward in wrapped:
        forward.kept = 4
    assert list(model.state_dict()) == names
    tokens = torch.randint(61, (2, T))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.load_state_dict(model.state_dict())
        assert torch.equal(twin(tokens), GPT.forward(twin, tokens))
        assert twin.blocks[1].forward.__self__ is twin.blocks[1]  # its own forward, and no other's parameters
        assert not torch.equal(twin(tokens), model(tokens))
    for forward in wrapped:
        forward.remove()
        forward.remove()
    assert all("forward" not in vars(block) for block in model.blocks)
    assert torch.equal(copy.deepcopy(model)(tokens), model(tokens))


def test_arguments_along_the_tokens_are_cut_by_sequence():
    index = torch.tensor([[0, 2], [1, 3]])
    x = torch.randn(2, 4, 3)
    table, ids = torch.randn(1, 4, 6), torch.arange(4)
    padding = torch.tensor([[True, True, False, False], [True, True, True, True]])
    mask = torch.randn(2, 1, 4, 4)
    shared = torch.randn(1, 1, 1, 4)
    named = {"rotary": (table, table + 1), "ids": ids, "padding": padding, "mask": mask, "more": [shared], "n": 4}
    args, kwargs = keep_tokens(((x,), named), index, takes_positions=False)
    for row, kept in enumerate(index):
        assert torch.equal(args[0][row], x[row, kept])
        assert torch.equal(kwargs["rotary"][1][row], table[0, kept] + 1)
        assert torch.equal(kwargs["ids"][row], kept)
        assert torch.equal(kwargs["padding"][row], padding[row, kept])
        assert torch.equal(kwargs["mask"][row, 0], mask[row, 0][kept][:, kept])
        assert torch.equal(kwargs["more"][0][row, 0, 0], shared[0, 0, 0, kept])
    assert kwargs["n"] == 4


def test_given_positions_are_looked_up():
    index = torch.tensor([[0, 2], [1, 3]])
    x, rotation = torch.randn(2, 4, 3), torch.randn(10, 6)
    for given in (torch.tensor([5, 6, 7, 8]), torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])):
        call = ((x, rotation), {"positions": given})
        args, kwargs = keep_tokens(call, index, takes_positions=True)
        assert args[1] is rotation
        assert torch.equal(kwargs["positions"], given.expand(2, 4).gather(1, index))


class Odd(nn.Module):
    """Returns what cannot be put back."""

    def forward(self, x: Tensor, table: Tensor | None = None) -> Tensor:
        return x.mean(1, keepdim=True)


def test_blocks_that_cannot_drop_tokens():
    block = Odd()
    wrapped = DroppingForward(block)
    wrapped.kept = 3
    with pytest.raises(StateError, match="must return the shape that they get"):
        block(torch.randn(2, 8, 4))
    with pytest.raises(StateError, match=r"shape \(8, 6\).*take `positions` by name"):
        block(torch.randn(2, 8, 4), torch.randn(8, 6))
    with pytest.raises(StateError, match="without a floating tensor"):
        block(torch.zeros(2, 8, dtype=torch.int64))


def test_which_blocks():
    model = GPT(CONFIG)
    assert list(middle_blocks(model)) == ["blocks.1", "blocks.2"]
    assert list(middle_blocks(model, ends=0)) == [f"blocks.{i}" for i in range(4)]
    assert list(middle_blocks(model, ("Attention",))) == ["blocks.1.attention", "blocks.2.attention"]
    with pytest.raises(PlanError, match="the model has 4 blocks that repeat"):
        middle_blocks(model, ends=2)
    with pytest.raises(PlanError, match="0 blocks of class Layer"):
        middle_blocks(model, ("Layer",))


def test_blocks_of_transformers():
    """Rotary tables with a batch dimension of one, and a mask over all tokens."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double().train()
    tokens = torch.randint(61, (2, T))
    (block,) = middle_blocks(model).values()
    seen: list[Any] = []
    block.register_forward_pre_hook(lambda m, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    outputs: list[Tensor] = []
    block.register_forward_hook(lambda m, args, out: outputs.append(out if isinstance(out, Tensor) else out[0]))
    wrapped = DroppingForward(block)
    wrapped.kept = 5
    torch.manual_seed(4)
    model(tokens, use_cache=False)
    wrapped.remove()
    torch.manual_seed(4)
    index = draw_kept(2, T, 5, tokens.device, 0)
    (x, *_), kwargs = seen[0]
    for row, kept in enumerate(index):
        tables = tuple(table[:, kept] for table in kwargs["position_embeddings"])
        alone = block(x[row : row + 1, kept], position_embeddings=tables, attention_mask=None)
        alone = alone if isinstance(alone, Tensor) else alone[0]
        assert torch.allclose(outputs[0][row, kept], alone[0], rtol=0, atol=1e-12)
    passed = torch.ones(2, T, dtype=torch.bool).scatter_(1, index, False)
    assert torch.equal(outputs[0][passed], x[passed])


# --- in a Trainer ----------------------------------------------------------------------------------------------------


class Module(pl.LightningModule):
    """Notes the shapes of what every step gets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = GPT(CONFIG)
        self.seen: list[tuple[int, ...]] = []
        self.validated: list[tuple[int, ...]] = []
        self.losses: list[float] = []

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(self.model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())

    def training_step(self, batch: dict[str, Tensor], i: int) -> Tensor:
        self.seen.append(tuple(batch["tokens"].shape))
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: dict[str, Tensor], i: int) -> None:
        self.validated.append(tuple(batch["tokens"].shape))
        self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def _data(self) -> DataLoader:
        text = torch.randint(61, (24, T + 1), generator=torch.Generator().manual_seed(1))
        return DataLoader([{"tokens": row[:-1], "targets": row[1:]} for row in text], batch_size=2)

    def train_dataloader(self) -> DataLoader:
        return self._data()

    def val_dataloader(self) -> DataLoader:
        return self._data()


def fit(callbacks: Any, module: Module | None = None, ckpt: Any = None, **options: Any) -> tuple[Any, Any]:
    quiet()
    module = module or Module()
    defaults: dict[str, Any] = {"max_epochs": 1, "limit_val_batches": 0, "enable_checkpointing": False}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, callbacks=callbacks, logger=False, enable_progress_bar=False,
        enable_model_summary=False, **{**defaults, **options},
    )  # fmt: skip
    trainer.fit(module, ckpt_path=ckpt)
    return trainer, module


def test_micro_batches_of_a_step_are_cut_alike_and_validation_is_not():
    callback = SequenceCurriculum(lengths=[4, 16], until=[4], multiple_of=4)
    trainer, module = fit(callback, accumulate_grad_batches=3, limit_val_batches=2, val_check_interval=6)
    assert module.seen == [(2, length) for length in (4, 8, 12, 16) for _ in range(3)]
    assert set(module.validated) == {(2, T)}
    assert trainer.callback_metrics["curriculum/length"] == 16
    assert "batch_to_device" not in vars(trainer.strategy)


def test_lengths_by_tokens():
    """After 2 sequences of 4 tokens in each of 3 steps, 24 tokens have been seen; then of 8, until 56."""
    callback = SequenceCurriculum(lengths=[4, 8, 16], until=[23, 55], schedule="discrete", unit="tokens")
    _, module = fit(callback)
    assert [length for _, length in module.seen] == [4] * 3 + [8] * 2 + [16] * 7
    assert callback.tokens == 2 * (3 * 4 + 2 * 8 + 7 * 16)


@pytest.mark.parametrize("unit", ["steps", "tokens"])
def test_a_resumed_run_goes_on_in_the_middle_of_the_schedule(unit, tmp_path):
    def make():
        return SequenceCurriculum([4, 16], [8 if unit == "steps" else 160], unit=unit, multiple_of=4)

    saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    _, whole = fit([make(), saving], enable_checkpointing=True)
    _, second = fit(make(), ckpt=tmp_path / "step=5.ckpt")
    assert second.seen == whole.seen[5:]
    assert len({length for _, length in second.seen}) > 1


def test_another_schedule_after_a_resume_is_told():
    callback = SequenceCurriculum([8, 16], [100], multiple_of=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback.load_state_dict({"step": 5, "value": 8, "tokens": 0})
    with pytest.warns(UserWarning, match="was 12 at step 5 of the checkpoint's run, but this schedule gives 8"):
        callback.load_state_dict({"step": 5, "value": 12, "tokens": 0})


def test_steps_that_fetch_their_batches_are_refused():
    class Fetches(Module):
        def training_step(self, dataloader_iter: Any) -> Tensor:
            return self.loss(next(dataloader_iter)[0])

    with pytest.raises(PlanError, match="dataloader_iter"):
        fit(SequenceCurriculum([4, 16], [8]), Fetches())


def test_blocks_in_the_middle_drop_and_all_is_as_before_afterwards():
    module = Module()
    lengths: dict[int, list[int]] = {i: [] for i in range(4)}
    for i, block in enumerate(module.model.blocks):
        block.attention.register_forward_pre_hook(lambda m, args, i=i: lengths[i].append(args[0].shape[1]))
    callback = RandomTokenDropping(kept=[4, 16], until=[8], multiple_of=4)
    trainer, _ = fit(callback, module, limit_val_batches=1, val_check_interval=6)
    expected = [callback.schedule.value(step) for step in range(1, 13)]
    assert expected[0] < T
    assert expected[-1] == T
    validations = [0, 7, 14]  # a sanity check first, and one after every six steps
    for i in (1, 2):
        assert [n for at, n in enumerate(lengths[i]) if at not in validations] == expected
        assert all(lengths[i][at] == T for at in validations[:2])
    assert set(lengths[0]) == set(lengths[3]) == {T}
    assert all("forward" not in vars(block) for block in module.model.blocks)
    assert trainer.callback_metrics["random_ltd/kept_tokens"] == T


def test_a_failing_run_gives_the_forwards_back():
    class Fails(Module):
        def training_step(self, batch: Any, i: int) -> Tensor:
            raise RuntimeError("on purpose")

    module = Fails()
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(RandomTokenDropping(kept=[4, 16], until=[8]), module)
    assert all("forward" not in vars(block) for block in module.model.blocks)


def test_dropping_no_token_changes_no_bit():
    _, plain = fit(pl.Callback())
    _, kept = fit(RandomTokenDropping(kept=[T, T], until=[1]))
    assert plain.losses == kept.losses
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), kept.parameters(), strict=True))
