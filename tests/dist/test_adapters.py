"""Adapters of PEFT: made in ``configure_model`` as without a strategy, and trained as under DDP or one process."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from docs.examples.adapters import save as save_adapters
from docs.examples.adapters import save_merged
from ls_strategy.checkpoint.consolidate import consolidate
from ls_strategy.lightning.strategy import ZeROStrategy
from tests.dist.ranks import assert_close, assert_equal, fit, mean_over_ranks, on_ranks, weights
from tests.dist.test_pretrained import LENGTH, VOCABULARY, Pretrained, save, tokens
from tests.marks import slow

pytestmark = [
    pytest.mark.wide,
    *(
        pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs {name}")
        for name in ("peft", "transformers")
    ),
]

LORA = {"peft_type": "LORA", "target_modules": ["q_proj", "v_proj"]}
KINDS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "gaussian": {**LORA, "init_lora_weights": "gaussian"},
    "orthogonal": {**LORA, "init_lora_weights": "orthogonal"},
    "dora": {**LORA, "use_dora": True},
    "pissa": {**LORA, "init_lora_weights": "pissa"},
    "modules_to_save": {**LORA, "modules_to_save": ["lm_head"]},
    "tokens": {**LORA, "trainable_token_indices": [1, 2, 5], "bias": "all"},
    "ranks": {**LORA, "target_modules": "all-linear", "task_type": "CAUSAL_LM", "rank_pattern": {"q_proj": 3}},
    "embedding": {**LORA, "target_modules": ["embed_tokens", "q_proj"]},
    "vera": {"peft_type": "VERA", "target_modules": ["q_proj", "o_proj"], "r": 8},
    "ia3": {"peft_type": "IA3", "target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "oft": {"peft_type": "OFT", "target_modules": ["q_proj"], "r": 0, "oft_block_size": 8},
    "loha": {"peft_type": "LOHA", "target_modules": ["q_proj"], "r": 4},
    "lokr": {"peft_type": "LOKR", "target_modules": ["q_proj"], "r": 4},
    "adalora": {
        "peft_type": "ADALORA",
        "target_modules": ["q_proj"],
        "init_r": 6,
        "target_r": 3,
        "tinit": 1,
        "tfinal": 2,
        "deltaT": 1,
        "total_step": 8,
        "orth_reg_weight": 0.0,
    },
    "prompt": {"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 3},
}


class Adapted(Pretrained):
    """With adapters of one kind."""

    def __init__(self, folder: Path, kind: str = "lora", lr: float = 0.05) -> None:
        self.kind, self.rate = kind, lr
        super().__init__(folder)

    def load(self) -> Any:
        import peft

        model = super().load()
        adapted = peft.get_peft_model(model, peft.get_peft_config(dict(KINDS[self.kind])))
        self.further(adapted)
        return adapted

    def further(self, model: Any) -> None:
        """Change the model with adapters."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.rate, eps=1e-4, fused=True)


class Switching(Adapted):
    """Two adapters by turns; the first one starts from other values than PEFT gives it."""

    def further(self, model: Any) -> None:
        import peft

        model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"]))
        for name, param in model.named_parameters():
            if "lora_B.default" in name:
                nn.init.normal_(param, std=0.1)
            param.requires_grad_("lora_" in name)

    def training_step(self, batch: Any, i: int) -> Any:
        self.model.set_adapter("default" if i % 2 else "other")
        return super().training_step(batch, i)


class Everything(Adapted):
    """The optimizer gets all parameters."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.rate, eps=1e-4, fused=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.kind == "adalora":
            self.model.base_model.update_and_allocate(self.global_step)


OTHERS = ("tokens", "ranks", "embedding", "vera", "ia3", "oft", "loha", "lokr", "adalora")


@on_ranks(2, timeout_s=150)
def _as_ddp(rank: int, world_size: int, folder: str, kinds: list[str]) -> None:
    for kind in kinds:
        make: Any = Switching if kind == "switching" else Everything if kind in OTHERS else Adapted
        runs = []
        for strategy in (3, "ddp_find_unused_parameters_true"):
            module = make(Path(folder) / "llama", kind="lora" if kind == "switching" else kind)
            fit(strategy, module, tokens(), max_steps=4)
            runs.append(module)
        ours, trusted = runs
        assert ours.was_on_meta
        assert_equal(ours.at_start, trusted.at_start, f"{kind}, at the start")
        same: Any = assert_close if kind == "adalora" else assert_equal  # it computes with averaged gradients
        same(ours.losses, trusted.losses, f"{kind}, losses")
        same(weights(ours), weights(trusted), f"{kind}, at the end")
        assert len(set(ours.losses)) == 4


@pytest.mark.parametrize(
    "kinds",
    [
        ("lora", "dora"),
        ("prompt", "switching"),
        ("tokens",),
        *[slow((kind,)) for kind in OTHERS[1:]],
        pytest.param(("gaussian", "orthogonal", "pissa", "modules_to_save"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_every_kind_starts_and_trains_as_under_ddp(kinds: tuple[str, ...], tmp_path: Path) -> None:
    save(tmp_path, "llama")
    _as_ddp(folder=str(tmp_path), kinds=list(kinds))


def up16(numel: int) -> int:
    return -(-numel // 16) * 16


@on_ranks(2)
def _counted(rank: int, world_size: int, folder: str) -> None:
    for stage in (1, 2, 3):
        module = Adapted(Path(folder) / "llama")
        sent: list[dict[str, int]] = []
        memory: dict[str, int] = {}

        class Watch(pl.Callback):
            def on_before_zero_grad(self, trainer: Any, *_args: Any) -> None:
                sent.append(dict(trainer.strategy.traffic.elements))  # noqa: B023
                memory.update(trainer.strategy.memory_bytes())  # noqa: B023
                assert all(p.grad is None for p in module.parameters() if not p.requires_grad)  # noqa: B023

        strategy = ZeROStrategy(stage, sharding={"min_unit_numel": 0, "overlap_step": False})
        fit(strategy, module, tokens(), max_steps=3, callbacks=[Watch()])
        trained = [p for p in module.parameters() if p.requires_grad]
        adapters = sum(up16(p.numel()) for p in trained) + 32 * 4  # and the end of every unit's last shard
        assert adapters < sum(p.numel() for p in module.parameters()) / 5
        what = f"stage {stage}: {memory}, {sent}"
        assert memory["optimizer"] <= 2 * 4 * adapters / world_size + 1024, what
        assert memory["gradients"] <= 2 * 4 * adapters, what
        step = {kind: now - sent[-2].get(kind, 0) for kind, now in sent[-1].items()}
        assert 0 < step["reduce_scatter"] <= adapters / world_size, what
        if stage < 3:
            assert step["all_gather"] <= adapters / world_size, what


def test_frozen_parameters_have_no_state_no_gradient_and_no_reduce_traffic(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    _counted(folder=str(tmp_path))


STEPS = 20


class Long(Adapted):
    """As many steps as the comparison asks for."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01, eps=1e-4, fused=True)


def long_tokens(rank: int, world_size: int) -> DataLoader:
    """Every step sees the same four sequences on any number of ranks."""
    ids = torch.randint(0, VOCABULARY, (STEPS * 4, LENGTH), generator=torch.Generator().manual_seed(7))
    mine = 4 // world_size
    index = torch.arange(STEPS * 4).view(STEPS, world_size, mine)[:, rank].flatten()
    return DataLoader(TensorDataset(ids[index]), batch_size=mine)


def train_long(rank: int, world_size: int, folder: str, strategy: Any, kind: str) -> Long:
    module = Long(Path(folder) / "llama", kind=kind)
    fit(strategy, module, long_tokens(rank, world_size), use_distributed_sampler=False, max_epochs=1)
    return module


class SwitchedOn(Long):
    """All parameters are in the optimizer. A second adapter is inactive until the third step, and switched to then."""

    def further(self, model: Any) -> None:
        import peft

        model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"]))
        model.set_adapter("default")

    def on_train_batch_start(self, batch: Any, i: int) -> None:
        if i == 3:
            self.model.set_adapter("other")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        strategy: Any = self.trainer.strategy
        if isinstance(strategy, ZeROStrategy):
            self.seen.append(float(strategy.memory_bytes()["optimizer"]))

    def configure_optimizers(self) -> Any:
        # B starts at zero, so that Adam with a smaller eps multiplies the rounding of its first gradients.
        return torch.optim.AdamW(self.parameters(), lr=0.05, eps=1e-2, fused=True)


def train_switched(rank: int, world_size: int, folder: str, strategy: Any) -> SwitchedOn:
    module = SwitchedOn(Path(folder) / "llama")
    fit(strategy, module, long_tokens(rank, world_size), use_distributed_sampler=False, max_epochs=1, max_steps=6)
    return module


@on_ranks(1)
def _trusted_switch(rank: int, world_size: int, folder: str) -> None:
    module = train_switched(rank, world_size, folder, "auto")
    torch.save((module.losses, weights(module)), f"{folder}/trusted.pt")


@on_ranks(2, timeout_s=90)
def _switched(rank: int, world_size: int, folder: str) -> None:
    losses, expected = torch.load(f"{folder}/trusted.pt")
    for name in ("zero1", "zero3_offload", "tensor, stage 3"):
        alone = "parallel" in LAYOUTS[name]
        strategy = ZeROStrategy(sharding={"min_unit_numel": 0}, **LAYOUTS[name])
        module = train_switched(0 if alone else rank, 1 if alone else world_size, folder, strategy)
        assert_close(mean_over_ranks(module.losses), losses, f"{name}, losses", 1e-5)
        assert_close(weights(module), expected, name, 1e-5)
        other = sum(up16(p.numel()) for key, p in module.named_parameters() if "lora_" in key and ".other" in key)
        before, after = module.seen[2], module.seen[-1]
        assert 0 < before < after < before + 2 * 4 * (other + 64 * 4), f"{name}: {module.seen}"


def test_an_adapter_that_is_switched_on_trains_and_the_model_does_not(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    _trusted_switch(folder=str(tmp_path))
    _switched(folder=str(tmp_path))


@on_ranks(1, timeout_s=150)
def _trusted(rank: int, world_size: int, folder: str, kind: str) -> None:
    module = train_long(rank, world_size, folder, "auto", kind)
    torch.save((module.losses, weights(module)), f"{folder}/trusted.pt")


LAYOUTS: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero3_offload": {"stage": 3, "offload": "cpu"},
    "tensor": {"stage": 1, "parallel": {"tensor": 2}},
    "tensor, stage 3": {"stage": 3, "parallel": {"tensor": 2}},
}


@on_ranks(2, timeout_s=150)
def _layouts(rank: int, world_size: int, folder: str, kind: str) -> None:
    losses, expected = torch.load(f"{folder}/trusted.pt")
    assert len(set(losses)) == STEPS
    for name, options in LAYOUTS.items():
        alone = "parallel" in options
        strategy = ZeROStrategy(sharding={"min_unit_numel": 0}, **options)
        module = train_long(0 if alone else rank, 1 if alone else world_size, folder, strategy, kind)
        assert len(module.losses) == STEPS
        assert_close(mean_over_ranks(module.losses), losses, f"{name}, losses", 1e-5)
        assert_close(weights(module), expected, name, 1e-5)


@pytest.mark.parametrize("kind", ["lora", slow("dora")])
def test_every_layout_trains_as_one_process(kind: str, tmp_path: Path) -> None:
    save(tmp_path, "llama")
    _trusted(folder=str(tmp_path), kind=kind)
    _layouts(folder=str(tmp_path), kind=kind)


ADAPTERS = "adapter_model.safetensors"


class Exported(Adapted):
    """Predicts logits."""

    def predict_step(self, batch: Any, i: int) -> Any:
        return self.model(input_ids=batch[0]).logits


def logits(trainer: pl.Trainer, module: Adapted) -> torch.Tensor:
    return torch.cat(trainer.predict(module, tokens(4)))  # type: ignore[arg-type]


@on_ranks(2, timeout_s=150)
def _saved(rank: int, world_size: int, folder: str, stages: list[int]) -> None:
    import peft
    import transformers
    from safetensors.torch import load_file

    place = Path(folder) / "llama"
    mine = tokens(4).dataset[rank::world_size][0]
    for stage in stages:
        module = Exported(place)
        strategy = ZeROStrategy(stage, sharding={"min_unit_numel": 0}, checkpoint={"frozen": False})
        trainer = fit(strategy, module, tokens(), max_steps=4)
        expected = logits(trainer, module)
        trainer.save_checkpoint(f"{folder}/{stage}.ckpt")
        save_adapters(trainer, module.model, f"{folder}/{stage}")
        module.model.save_pretrained(f"{folder}/{stage} by peft alone", is_main_process=rank == 0)
        trainer.strategy.barrier()
        ours, theirs = (load_file(f"{folder}/{stage}{end}/{ADAPTERS}") for end in ("", " by peft alone"))
        assert_equal(ours, theirs, "adapters")

        def plain() -> Any:
            return transformers.AutoModelForCausalLM.from_pretrained(place)

        loaded = peft.PeftModel.from_pretrained(plain(), f"{folder}/{stage}")
        assert_close(loaded(input_ids=mine).logits, expected, "save_pretrained")
        if rank == 0:
            consolidate(f"{folder}/{stage}.ckpt", f"{folder}/{stage}.pt")
            state = torch.load(f"{folder}/{stage}.pt", weights_only=False)["state_dict"]
            assert state
            assert all("lora_" in name for name in state)
            bare = peft.get_peft_model(plain(), peft.get_peft_config(dict(KINDS["lora"])))
            state = {name.removeprefix("model."): value for name, value in state.items()}
            assert not bare.load_state_dict(state, strict=False).unexpected_keys
            assert_close(bare(input_ids=mine).logits, expected, "consolidate")

        with trainer.strategy.gathered_parameters(module.model, modify=True):  # type: ignore[attr-defined]
            module.model.merge_adapter()
        assert_close(logits(trainer, module), expected, "merged", 1e-5)
        with trainer.strategy.gathered_parameters(module.model, modify=True):  # type: ignore[attr-defined]
            module.model.unmerge_adapter()
        assert_close(logits(trainer, module), expected, "unmerged", 1e-5)
        save_merged(trainer, module.model, f"{folder}/{stage} merged")
        trainer.strategy.barrier()
        whole = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/{stage} merged")
        assert_close(whole(input_ids=mine).logits, expected, "merge_and_unload", 1e-5)


@pytest.mark.parametrize("stages", [[3], slow([1, 2])], ids=str)
def test_what_is_saved_loads_in_plain_peft(stages: list[int], tmp_path: Path) -> None:
    save(tmp_path, "llama")
    _saved(folder=str(tmp_path), stages=stages)
