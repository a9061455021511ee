"""Around fit: other entry points, a second fit, reading and copying the module, buffers, averaging callbacks."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn

from ls_strategy.errors import PlanError, StateError
from ls_strategy.lightning.strategy import ZeROStrategy
from tests.dist.ranks import (
    STAGES,
    WIDTH,
    Block,
    Net,
    assert_close,
    assert_equal,
    batches,
    fit,
    on_ranks,
    samples,
    saved,
    trainer_of,
    weights,
)

pytestmark = pytest.mark.wide

# --- entry points -----------------------------------------------------------------------------------------------------


def numbers(results: list[Any]) -> list[float]:
    return [float(v) for result in results for v in result.values()]


@on_ranks(2)
def test_validate_test_and_predict_before_and_after_fit(rank: int, world_size: int) -> None:
    expected: dict[str, Any] = {}
    for strategy in ("ddp", *STAGES):
        module, data = Net(), batches(16, seed=2)
        trainer = trainer_of(strategy)
        result: dict[str, Any] = {
            "validated first": torch.tensor(numbers(trainer.validate(module, data, verbose=False)))
        }
        trainer.fit(module, batches(), data)
        result["validated"] = torch.tensor(numbers(trainer.validate(module, data, verbose=False)))
        result["tested"] = torch.tensor(numbers(trainer.test(module, data, verbose=False)))
        result["predicted"] = torch.cat(trainer.predict(module, data))
        result.update(weights(module))
        expected = expected or result
        assert_close(result, expected, f"stage {strategy}")


@on_ranks(2)
def test_evaluation_without_fit_in_every_stage(rank: int, world_size: int, tmp_path: Path) -> None:
    """With and without a checkpoint to read, and with another trainer than the one that trained."""
    fit("ddp", Net(), max_epochs=1).save_checkpoint(tmp_path / "ddp.ckpt")
    expected: list[float] = []
    for strategy in ("ddp", *STAGES):
        data = batches(16, seed=2)
        result = numbers(trainer_of(strategy).test(Net(), data, verbose=False))
        result += numbers(trainer_of(strategy).validate(Net(), data, ckpt_path=tmp_path / "ddp.ckpt", verbose=False))
        expected = expected or result
        assert_close(result, expected, f"stage {strategy}")


@on_ranks(2)
def test_fit_again_with_the_same_trainer(rank: int, world_size: int, tmp_path: Path) -> None:
    """Weights go on, the optimizer starts anew, as under DDP."""
    expected: dict[str, Tensor] = {}
    for strategy in ("ddp", *STAGES):
        module = Net()
        trainer = fit(strategy, module, max_epochs=1)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, batches())
        trainer.test(module, batches(16), verbose=False)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, batches())
        trainer.save_checkpoint(tmp_path / f"{strategy}.ckpt")
        assert len(module.losses) == 12
        result = {"losses": torch.tensor(module.losses), **weights(module)}
        expected = expected or result
        assert_close(result, expected, f"stage {strategy}")
        path = tmp_path / f"{strategy}.ckpt"
        kept = torch.load(path, weights_only=True) if path.is_file() else saved(path)
        assert_equal(kept["state_dict"], weights(module), f"stage {strategy}, file after the last fit")


@pytest.mark.parametrize("second", ["same", "other"])
@on_ranks(2)
def test_fit_again_with_a_new_trainer(rank: int, world_size: int, second: str) -> None:
    """A module that one strategy has trained is handed to a new one, at the same stage or another."""
    expected: dict[str, Tensor] = {}
    for strategy in ("ddp", *STAGES):
        module = Net()
        fit(strategy, module, max_epochs=1)
        following = {"ddp": "ddp", 0: 3, 1: 2, 2: 1, 3: 1}[strategy] if second == "other" else strategy
        fit(following, module, max_epochs=1)
        result = {"losses": torch.tensor(module.losses), **weights(module)}
        expected = expected or result
        assert_close(result, expected, f"stage {strategy}, then {following}")


@on_ranks(2)
def test_one_trainer_for_two_modules(rank: int, world_size: int) -> None:
    for stage in STAGES:
        first, other = Net(), Net()
        trainer = fit(stage, first, max_epochs=1)
        trainer.test(other, batches(16), verbose=False)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(other, batches())
        assert len(other.losses) == 4
        assert torch.tensor(other.losses).isfinite().all()


# --- the module after fit ---------------------------------------------------------------------------------------------


@on_ranks(2)
def test_state_dict_is_full_on_all_ranks(rank: int, world_size: int) -> None:
    reference = Net()
    fit("ddp", reference)
    for stage in STAGES:
        module = Net()
        fit(stage, module)
        whole = module.state_dict()
        assert_close(whole, reference.state_dict(), f"stage {stage}")
        for name in ("blocks", "blocks.1", "blocks.1.wide", "last"):
            part = {f"{name}.{k}": v for k, v in module.get_submodule(name).state_dict().items()}
            assert_equal(part, {k: v for k, v in whole.items() if k.startswith(f"{name}.")}, f"stage {stage}, {name}")
        plain = Net()
        plain.load_state_dict(whole)
        x = samples(4)[0]
        assert_close(plain(x), reference(x), f"stage {stage}, plain module")
        assert_close(module(x), reference(x), f"stage {stage}, the module itself")


@on_ranks(2)
def test_full_parameters_can_be_read_and_written_to_a_file(rank: int, world_size: int) -> None:
    for stage in STAGES:
        module = Net()
        trainer = fit(stage, module, max_epochs=1)
        with trainer.strategy.gathered_parameters():
            seen = {name: p.detach().clone() for name, p in module.named_parameters()}
        assert_equal(seen, weights(module), f"stage {stage}")


@on_ranks(2)
def test_copies_and_pickles_of_the_module(rank: int, world_size: int) -> None:
    x = samples(4)[0]
    for stage in STAGES:
        module = Net()
        trainer = fit(stage, module, max_epochs=1)
        module._trainer = None  # as Lightning's own users do: a Trainer cannot be pickled
        deep = copy.deepcopy(module)
        with trainer.strategy.gathered_parameters():  # a pickle may be one rank's alone, so it does not gather
            pickled = pickle.loads(pickle.dumps(module))
        for what, clone in (("deepcopy", deep), ("pickle", pickled)):
            assert_equal(weights(clone), weights(module), f"stage {stage}, {what}")
            assert all(type(p) is nn.Parameter for p in clone.parameters())
            with torch.no_grad():
                assert_equal(clone(x), module(x), f"stage {stage}, {what}")
                clone.first.weight.zero_()
            assert module.first.weight.any(), f"stage {stage}, {what} shares memory"
        buffer = io.BytesIO()
        torch.save(module.state_dict(), buffer)
        elements = sum(p.numel() for p in module.parameters())
        assert len(buffer.getvalue()) < 4 * elements + 20_000
        del trainer


# --- buffers ----------------------------------------------------------------------------------------------------------


# --- what a fit leaves on the module ----------------------------------------------------------------------------------


class PartlyStepped(Net):
    """Clipped, with a frozen parameter and one that is in no optimizer."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails
        self.blocks[0].norm.weight.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        stepped = [p for name, p in self.named_parameters() if p.requires_grad and name != "last.bias"]
        return torch.optim.AdamW(stepped, lr=1e-2, eps=1e-4)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.fails and self.trainer.global_step == 3:
            raise ZeroDivisionError("on all ranks")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("precision", "options"),
    [("32-true", {}), ("bf16-mixed", {"accumulate_grad_batches": 2}), ("bf16-true", {"max_steps": 1})],
)
@on_ranks(2)
def test_gradients_after_fit_are_those_of_ddp_or_none(
    rank: int, world_size: int, precision: str, options: dict[str, Any]
) -> None:
    options = {"gradient_clip_val": 0.1, "max_epochs": 1, "precision": precision, **options}
    expected: dict[str, Tensor] = {}
    for strategy in ("ddp", *STAGES):
        module = PartlyStepped()
        trainer = fit(strategy, module, **options)
        found = {name: p.grad for name, p in module.named_parameters()}
        if strategy == "ddp":
            expected = {name: grad.clone() for name, grad in found.items() if grad is not None}
            assert len(expected) == len(found) - 1
            continue
        assert all(p.grad_dtype == p.dtype for p in module.parameters())
        if strategy == 0:
            assert {name for name, grad in found.items() if grad is not None} == set(expected)
        else:
            assert set(found.values()) == {None}
        assert isinstance(trainer.strategy, ZeROStrategy)
        read = dict(trainer.strategy.full_gradients()) if strategy else found
        limit = 2e-2 if precision == "bf16-true" else 2e-6  # DDP sums in bf16
        for name, grad in expected.items():
            if strategy == 0 or name != "last.bias":
                assert_close(read[name].float(), grad.float(), f"{strategy} {name}", limit)


@on_ranks(2)
def test_gradients_that_are_narrowed_are_not_read_as_wide_ones(rank: int, world_size: int) -> None:
    module = PartlyStepped()
    trainer = fit(0, module, gradient_clip_val=0.1, max_epochs=1, precision="bf16-true")
    kept = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    assert isinstance(trainer.strategy, ZeROStrategy)
    with pytest.raises(StateError, match=r"Read p\.grad"):
        dict(trainer.strategy.full_gradients())
    assert all(torch.equal(grad, module.get_parameter(name).grad) for name, grad in kept.items())


@on_ranks(2)
def test_no_rank_keeps_its_own_gradients_after_an_error(rank: int, world_size: int) -> None:
    for stage in (0, 1, 3):
        module = PartlyStepped(fails=True)
        with pytest.raises(ZeroDivisionError):
            fit(stage, module)
        assert {p.grad for p in module.parameters()} == {None}


def _state_of(module: nn.Module) -> dict[str, Any]:
    """Attributes, hooks, classes and flags; without values."""
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        own = vars(part)
        found |= {f"{name}: {key}": len(value) if "hooks" in key else type(value) for key, value in own.items()}
        found[f"{name}: class"] = type(part), getattr(part.forward, "__func__", None)
    for name, p in module.named_parameters():
        hooks = bool(p._backward_hooks), bool(p._post_accumulate_grad_hooks)  # type: ignore[attr-defined]
        found[f"{name}: parameter"] = type(p), p.requires_grad, p.dtype, p.grad_dtype, dict(vars(p)), hooks
    for name, b in module.named_buffers():
        found[f"{name}: buffer"] = type(b), b.dtype, b.device
    return found


@on_ranks(2)
def test_nothing_else_stays_on_the_module(rank: int, world_size: int) -> None:
    """At stage 3 the shards stay, and with them what gathers them."""
    for strategy in ("ddp", 0, 1, 2, "zero1_offload"):
        module = PartlyStepped()
        before = _state_of(module)
        fit(strategy, module, max_epochs=1, gradient_clip_val=0.1)
        after = _state_of(module)
        changed = {key for key in {*before, *after} if before.get(key) != after.get(key)}
        assert changed <= {": _trainer", ": _hparams", ": forward"}, (strategy, changed)  # Lightning's


class Normalised(Net):
    """Batch norms in a block and in the root, a buffer of integers, one that every rank changes by itself."""

    def build(self) -> None:
        super().build()
        self.blocks[1] = nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), Block())
        self.norm = nn.BatchNorm1d(WIDTH, momentum=0.3)
        self.register_buffer("mine", torch.zeros(2))
        for p in self.parameters():  # none starts at 0: errors are relative to a tensor's largest element
            nn.init.normal_(p, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))

    def training_step(self, batch: Any, i: int) -> Tensor:
        self.mine += self.global_rank + 1
        return super().training_step(batch, i)

    def configure_optimizers(self) -> Any:
        """Not Adam: the bias before a batch norm has no gradient but rounding, which Adam would blow up."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.parametrize("accumulate", [1, 3])
@on_ranks(2)
def test_buffers_behave_as_under_ddp(rank: int, world_size: int, accumulate: int) -> None:
    expected: dict[str, Tensor] = {}
    for strategy in ("ddp", *STAGES):
        module = Normalised()
        trainer = trainer_of(strategy, accumulate_grad_batches=accumulate)
        trainer.fit(module, batches(80), batches(16, seed=2))
        result = {"losses": torch.tensor(module.losses), **weights(module)}
        result["val"] = trainer.callback_metrics["val_loss"]
        expected = expected or result
        assert_close(result, expected, f"stage {strategy}")


class NormalisedByHand(Normalised):
    """Where a module optimizes by hand, DDP leaves the buffers of training on their ranks."""

    manual = True


@on_ranks(2)
def test_an_evaluation_begins_with_the_buffers_of_rank_0(rank: int, world_size: int) -> None:
    expected: list[Any] = []
    for strategy in ("ddp", 1, 3):
        module = NormalisedByHand()
        trainer = fit(strategy, module, batches(80), max_epochs=1)
        found = [trainer.test(module, batches(16, seed=2), verbose=False)[0]["test_loss"], *module.buffers()]
        expected = expected or found
        for ours, theirs in zip(found, expected, strict=True):
            assert_close(ours, theirs, f"stage {strategy}")


@on_ranks(2)
def test_synchronised_batch_norm_on_the_cpu_is_refused(rank: int, world_size: int) -> None:
    for stage in STAGES:
        with pytest.raises(PlanError, match=r"sync_batchnorm=True.*no CPU implementation.*sync_batchnorm=False"):
            fit(stage, Normalised(), sync_batchnorm=True)


# --- averaging and fine-tuning callbacks ------------------------------------------------------------------------------


class EveryStep(WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx % 2 == 0


@on_ranks(2)
def test_weight_averaging_equals_ddp(rank: int, world_size: int, tmp_path: Path) -> None:
    for make in (EveryStep, lambda: EMAWeightAveraging(decay=0.7)):
        expected: dict[str, Tensor] = {}
        for strategy in ("ddp", 0, 1, 2, 3):
            module = Normalised()
            trainer = trainer_of(strategy, callbacks=[make()])
            trainer.fit(module, batches(), batches(16, seed=2))
            result = {"val": trainer.callback_metrics["val_loss"], **weights(module)}
            expected = expected or result
            assert_close(result, expected, f"stage {strategy}")
            trainer.save_checkpoint(tmp_path / f"{strategy}.ckpt")
        assert_equal(expected["last.weight"].isfinite().all().item(), True, "finite")


@on_ranks(2)
def test_weight_averaging_changes_no_training_loss(rank: int, world_size: int) -> None:
    plain, averaged = Net(), Net()
    fit(1, plain)
    fit(1, averaged, callbacks=[EMAWeightAveraging(decay=0.7)])
    assert_equal(averaged.losses, plain.losses, "losses")


@on_ranks(2)
def test_callbacks_that_cannot_work_are_refused(rank: int, world_size: int) -> None:
    with pytest.raises(PlanError, match=r"EMAWeightAveraging.*bf16-true.*ShardedEMA"):
        fit(1, Net(), callbacks=[EMAWeightAveraging()], precision="bf16-true")
    for callback in (EMAWeightAveraging(), StochasticWeightAveraging(1e-2)):
        with pytest.raises(PlanError, match=rf"{type(callback).__name__} copies .* tensor parallelism.*ShardedEMA"):
            fit(ZeROStrategy(1, parallel={"tensor": 2}), Net(), callbacks=[callback])
