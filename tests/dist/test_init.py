"""Where modules are built: in the script, under ``trainer.init_module()``, or on meta in ``configure_model``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ls_strategy.errors import PlanError
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.meta_init.deferred import Deferred
from tests.dist.ranks import (
    STAGES,
    WIDTH,
    Net,
    assert_close,
    assert_equal,
    batches,
    fit,
    on_ranks,
    trainer_of,
    weights,
)
from tests.marks import few_or_all, wide


class SeededLinear(nn.Linear):
    """Same values whenever and in whatever order it is filled."""

    def reset_parameters(self) -> None:
        generator = torch.Generator().manual_seed(self.out_features)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 4)


class SeededBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.narrow = SeededLinear(WIDTH, width), SeededLinear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(self.wide(x)))


class Seeded(Net):
    """Built at once."""

    def build(self) -> None:
        self.first = SeededLinear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([SeededBlock(30 + i) for i in range(6)])
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = SeededLinear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))

    def configure_optimizers(self) -> Any:
        """Torch's fused kernel by name, so that its rounding is the same in the trusted run."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01, fused=True)


class Late(Seeded):
    """Built in ``configure_model``."""

    def build(self) -> None:
        self.blocks: Any = None
        self.was_on_meta: bool | None = None

    def configure_model(self) -> None:
        if self.blocks is None:
            super().build()
            self.was_on_meta = all(p.is_meta for p in self.parameters()) and all(b.is_meta for b in self.buffers())


@pytest.mark.wide
@pytest.mark.parametrize("stages", few_or_all((3,), STAGES))
@on_ranks(2)
def test_init_module(rank: int, world_size: int, stages: tuple[int, ...]) -> None:
    """With and without ``empty_init``, which may leave weights without memory until fit."""
    plain = Seeded()
    fit("ddp", plain, max_epochs=1)
    for stage in stages:
        for empty_init in (None, False, True):
            trainer = trainer_of(stage, max_epochs=1)
            with trainer.init_module(empty_init=empty_init):
                module = Seeded()
            if empty_init and not module.last.weight.is_meta:
                for m in module.modules():  # an empty module has to be filled by its user
                    if isinstance(m, (SeededLinear, nn.BatchNorm1d)):
                        m.reset_parameters()
            trainer.fit(module, batches())
            assert_close(module.losses, plain.losses, f"stage {stage}, empty_init={empty_init}")
            assert_close(weights(module), weights(plain), f"stage {stage}, empty_init={empty_init}")


@pytest.mark.parametrize("stages", few_or_all((1, 3), STAGES))
@on_ranks(2)
def test_configure_model_is_on_meta_at_stage_3_only(rank: int, world_size: int, stages: tuple[int, ...]) -> None:
    plain = Seeded()
    fit("ddp", plain, max_epochs=1)
    for stage in stages:
        module = Late()
        trainer = fit(stage, module, max_epochs=1)
        assert module.was_on_meta is (stage == 3), f"stage {stage}"
        assert_close(module.losses, plain.losses, f"stage {stage}")
        assert_close(weights(module), weights(plain), f"stage {stage}")
        blocks = module.blocks
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, batches())
        assert module.blocks is blocks, "configure_model ran twice and rebuilt"
        assert len(module.losses) == 8
        trainer.test(module, batches(16), verbose=False)


@on_ranks(2)
def test_no_rank_ever_holds_the_whole_model_at_stage_3(rank: int, world_size: int) -> None:
    """While a unit gets its memory, all others are on meta or cut into shards."""
    module = Late()
    elements: list[int] = []
    plain = Deferred.make

    def make(self: Deferred, device: torch.device) -> Tensor:
        storages = {
            p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in module.parameters() if not p.is_meta
        }
        value = plain(self, device)
        assert value.untyped_storage().nbytes() == value.nbytes
        elements.append(sum(storages.values()) // 4 + value.numel())
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Deferred, "make", make)
        fit(3, module, max_epochs=1)
    total = sum(p.numel() for p in module.parameters())
    largest = max(sum(p.numel() for p in unit.parameters()) for unit in (*module.blocks, module.first))
    assert len(elements) >= 28, "every parameter was filled"
    # Released parameters keep one element each, so that they can be told apart.
    assert max(elements) <= largest + len(list(module.parameters())), f"{elements}: the whole model has {total}"


@pytest.mark.wide
@pytest.mark.parametrize(
    ("sources", "stages"), [(("ddp.ckpt",), (3,)), wide(("ddp.ckpt", "zero.ckpt"), (1, 3))], ids=["few", "all"]
)
@on_ranks(2)
def test_resume_into_a_meta_module(
    rank: int, world_size: int, sources: tuple[str, ...], stages: tuple[int, ...], tmp_path: Path
) -> None:
    """From a checkpoint of DDP and of stage 3, at every stage; the values of the module's own init must not matter."""
    whole = Late()
    fit("ddp", whole)
    fit("ddp", Late(), max_epochs=1).save_checkpoint(tmp_path / "ddp.ckpt")
    if "zero.ckpt" in sources:
        fit(3, Late(), max_epochs=1).save_checkpoint(tmp_path / "zero.ckpt")
    for source in sources:
        for stage in stages:
            module = Late()
            fit(stage, module, ckpt=tmp_path / source)
            assert_close(module.losses, whole.losses[4:], f"{source}, stage {stage}")
            assert_close(weights(module), weights(whole), f"{source}, stage {stage}")
    tested = [
        trainer_of(strategy).test(Late(), batches(16), ckpt_path=tmp_path / "ddp.ckpt", verbose=False)[0]["test_loss"]
        for strategy in ("ddp", 3)
    ]
    assert_close(tested[1], tested[0], "test from a checkpoint on meta")


class Bare(nn.Module):
    """Has no ``reset_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("table", torch.arange(float(WIDTH)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.table


class Unset(Bare):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(WIDTH))


class WithoutValues(Late):
    def configure_model(self) -> None:
        super().configure_model()
        self.blocks.append(Unset())


class WithBuffer(Late):
    def configure_model(self) -> None:
        super().configure_model()
        self.norm.extra = nn.Module()
        self.norm.extra.register_buffer("table", torch.empty(4))


PRETRAINED = {"weight": torch.ones(WIDTH, WIDTH), "bias": torch.ones(WIDTH)}


class LoadsIntoMeta(Late):
    def configure_model(self) -> None:
        super().configure_model()
        self.last.load_state_dict(PRETRAINED)


class OnCpu(Late):
    """The cure both errors name."""

    def configure_model(self) -> None:
        with torch.device("cpu"):
            super().configure_model()
            self.blocks.append(Bare())
            self.last.load_state_dict(PRETRAINED)


@pytest.mark.wide
@on_ranks(2)
def test_what_cannot_be_filled_is_named(rank: int, world_size: int) -> None:
    for make, name in ((WithoutValues, r"blocks\.6"), (WithBuffer, r"norm\.extra")):
        with pytest.raises(PlanError, match=rf"'{name}'.*meta device.*reset_parameters\(\).*torch\.device\('cpu'\)"):
            fit(3, make())
        fit(2, make(), max_epochs=1)


class Changed(Late):
    """On one rank, a tensor changes after a weight was computed from it."""

    def configure_model(self) -> None:
        if self.blocks is None:
            super().configure_model()
            table = torch.ones(1 << 14, WIDTH, device="cpu")
            self.extra = nn.Embedding(1 << 14, WIDTH)
            self.extra.weight.data.copy_(table)
            if self.global_rank == 1:
                table.zero_()


@on_ranks(2)
def test_what_one_rank_cannot_do_again_is_an_error_on_all_ranks(rank: int, world_size: int) -> None:
    with pytest.raises(PlanError, match=r"'extra\.weight'.*changed afterwards.*torch\.device\('cpu'\)"):
        fit(3, Changed())


@on_ranks(2)
def test_weights_loaded_into_a_meta_module_are_refused(rank: int, world_size: int) -> None:
    with pytest.raises(PlanError, match=r"configure_model loads weights.*meta.*ckpt_path.*torch\.device\('cpu'\)"):
        fit(3, LoadsIntoMeta())
    fit(2, LoadsIntoMeta(), max_epochs=1)
    module = OnCpu()
    fit(3, module, max_epochs=1)
    assert module.was_on_meta is False
    assert torch.tensor(module.losses).isfinite().all()


class Random(Late):
    """Every rank would fill it differently."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor | None = None

    def configure_model(self) -> None:
        torch.manual_seed(self.global_rank)
        if self.blocks is None:
            Net.build(self)
            self.norm = nn.Identity()

    def training_step(self, batch: Any, i: int) -> Tensor:
        if self.seen is None:
            self.seen = self.last.weight.detach().clone()
        return super().training_step(batch, i)


@on_ranks(2)
def test_all_ranks_start_from_the_values_of_rank_0(rank: int, world_size: int) -> None:
    for stage in (1, 3):
        module = Random()
        fit(stage, module, max_epochs=1)
        assert module.seen is not None
        other = module.seen.clone()
        dist.broadcast(other, 0)
        assert_equal(module.seen, other, f"stage {stage}")


class Drawn(Net):
    """Built in ``configure_model`` from the global random numbers, with a layer that shares an earlier one's weight."""

    def build(self) -> None:
        self.blocks: Any = None

    def configure_model(self) -> None:
        if self.blocks is None:
            super().build()
            self.last.weight = self.first.weight


@pytest.mark.wide
@on_ranks(2)
def test_every_stage_starts_from_the_weights_the_constructor_draws(rank: int, world_size: int) -> None:
    """As under DDP with the same seed, also where stage 3 fills the modules one by one; so do later random numbers."""
    drawn: dict[str | int, tuple[list[float], Tensor]] = {}
    for strategy in ("ddp", *STAGES):
        module = Drawn()
        torch.manual_seed(3)
        fit(strategy, module, max_steps=1)
        drawn[strategy] = (module.losses, torch.randn(4))
    for stage in STAGES:
        assert drawn[stage][0] == drawn["ddp"][0]
        assert torch.equal(drawn[stage][1], drawn["ddp"][1])


class Initialized(Net):
    """Initialized by user code in ``configure_model``, which draws random numbers of its own too."""

    def build(self) -> None:
        self.blocks: Any = None

    def configure_model(self) -> None:
        if self.blocks is None:
            super().build()
            self.blocks.insert(1, Bare())
            self.apply(self.initialize)
            self.rates = torch.rand(2, device="cpu").tolist()
            with torch.no_grad():
                self.last.weight.copy_(self.first.weight.t() * 2)
                self.last.weight[:, 0] = torch.randn(WIDTH)

    @staticmethod
    def initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.3)
            module.bias.data.normal_(0, 0.02)
        elif isinstance(module, nn.LayerNorm):
            nn.init.constant_(module.weight, 0.9)

    def on_fit_start(self) -> None:
        self.at_start = weights(self)


OFFLOADED = "stage 3, offloaded"


@pytest.mark.parametrize("layouts", few_or_all((OFFLOADED,), (*STAGES, OFFLOADED)))
@on_ranks(2)
def test_what_configure_model_does_to_weights_is_what_every_stage_starts_from(
    rank: int, world_size: int, layouts: tuple[Any, ...]
) -> None:
    """Bit for bit as under DDP, although stage 3 builds without memory."""
    trusted: Initialized | None = None
    after: Tensor | None = None
    for layout in ("ddp", *layouts):
        offload: Any = {"parameters": "cpu", "optimizer": "cpu"}
        strategy = ZeROStrategy(3, offload=offload) if layout == OFFLOADED else layout
        module = Initialized()
        torch.manual_seed(3)
        fit(strategy, module, max_steps=2)
        if trusted is None or after is None:
            trusted, after = module, torch.randn(4)
            continue
        assert_equal(module.at_start, trusted.at_start, f"{layout}, at the start")
        assert_equal(module.losses, trusted.losses, f"{layout}, losses")
        assert module.rates == trusted.rates
        assert torch.equal(torch.randn(4), after)
