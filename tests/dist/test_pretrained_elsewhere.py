"""Pretrained weights read in parts by tiers, tensor-parallel, expert-parallel and pipeline ranks.

The trusted run has the same options, and loads the full model on every rank.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from ls_strategy.lightning.strategy import ZeROStrategy
from recipes.gpt.network import GPT, GPTConfig
from tests.dist.ranks import assert_equal, fit, on_ranks, trainer_of, weights
from tests.dist.test_pretrained import (
    LLAMA,
    MODELS,
    VOCABULARY,
    Pretrained,
    Reads,
    bytes_of,
    save,
    second_rank_cannot_read,
    tokens,
)

safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")
pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
]


class OnHost(Pretrained):
    """The full model on every rank."""

    def load(self) -> Any:
        with torch.device("cpu"):
            return super().load()


def here(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without what other pipeline ranks have."""
    return {name: value for name, value in state.items() if not value.is_meta}


def parted(place: Path, what: str, **options: Any) -> int:
    """A fit from files against one from full models. Returns bytes read by all ranks. Collective."""
    converts, trainer, model = (options.pop(name, {}) for name in ("converts", "trainer", "model"))

    def run(kind: type[Pretrained]) -> Pretrained:
        class Converted(kind):  # type: ignore[misc, valid-type]
            def load(self) -> Any:
                from ls_strategy import convert_moe

                model = super().load()
                convert_moe(model)
                return model

        module = (Converted if converts else kind)(place, **model)
        module.fused = None  # both runs update alike, and states on a drive need a fused update
        fit(ZeROStrategy(sharding={"min_unit_numel": 0}, **options), module, tokens(), max_epochs=1, **trainer)
        return module

    with pytest.MonkeyPatch.context() as patch:
        reads = Reads(patch)
        ours = run(Pretrained)
        total = reads.total()
    trusted = run(OnHost)
    assert ours.was_on_meta
    assert not trusted.was_on_meta
    assert_equal(here(ours.at_start), here(trusted.at_start), f"{what}, at the start")
    assert_equal(ours.losses, trusted.losses, f"{what}, losses")
    assert_equal(here(weights(ours)), here(weights(trusted)), f"{what}, at the end")
    return total


@on_ranks(2)
def _tiers(rank: int, world_size: int, folder: str) -> None:
    place = Path(folder) / "llama, tied"
    tiers: dict[str, Any] = {
        "cpu": "cpu",
        "nvme": {"optimizer": "nvme", "parameters": "nvme", "nvme_path": f"{folder}/nvme", "nvme_allow_ram": True},
    }
    for name, offload in tiers.items():
        assert parted(place, name, stage=3, offload=offload) <= 1.1 * bytes_of(place)


def test_offload_tiers(tmp_path: Path) -> None:
    save(tmp_path, "llama, tied")
    _tiers(folder=str(tmp_path))


@on_ranks(2)
def _tensor(rank: int, world_size: int, folder: str) -> None:
    for name in ("llama", "llama, tied", "gpt2", "qwen2-moe"):
        place = Path(folder) / name
        for stage in (1, 3) if name == "llama, tied" else (2, 3) if name == "qwen2-moe" else (3,):
            total = parted(place, f"{name}, stage {stage}", stage=stage, parallel={"tensor": 2})
            assert total <= 1.3 * bytes_of(place), name  # both ranks hold the norms and biases


def test_tensor_parallel_ranks(tmp_path: Path) -> None:
    for name in ("llama", "llama, tied", "gpt2", "qwen2-moe"):
        save(tmp_path, name)
    _tensor(folder=str(tmp_path))


@on_ranks(2)
def _experts(rank: int, world_size: int, folder: str) -> None:
    place = Path(folder) / "qwen2-moe"
    for stage in (0, 1, 2, 3):
        total = parted(place, f"experts, stage {stage}", stage=stage, parallel={"expert": 2}, converts=True)
        assert total <= 1.1 * bytes_of(place), stage


def test_expert_parallel_ranks(tmp_path: Path) -> None:
    save(tmp_path, "qwen2-moe")
    _experts(folder=str(tmp_path))


@on_ranks(2)
def _pipeline(rank: int, world_size: int, folder: str) -> None:
    for name in ("llama", "gpt2"):
        place = Path(folder) / name
        for stage in (1, 3):
            parallel = {"pipeline": {"size": 2, "micro_batches": 2}}
            total = parted(place, f"{name}, stage {stage}", stage=stage, parallel=parallel)
            assert total <= 1.2 * bytes_of(place), (name, total, bytes_of(place))


def test_pipeline_ranks(tmp_path: Path) -> None:
    for name in ("llama", "gpt2"):
        save(tmp_path, name)
    _pipeline(folder=str(tmp_path))


class WithHead(Pretrained):
    """A model of transformers without its head, and a head of the user's; a metric of the user's buffers."""

    def build(self) -> None:
        super().build()
        self.head: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            self.head = torch.nn.Linear(64, 3)
            self.register_buffer("scale", torch.ones(3, device="cpu"))

    def loss(self, batch: Any) -> Tensor:
        hidden = self.model(input_ids=batch[0]).last_hidden_state.mean(1)
        return torch.nn.functional.cross_entropy(self.head(hidden) * self.scale, batch[0][:, 0] % 3)


@on_ranks(2)
def _whole_runs(rank: int, world_size: int, folder: str) -> None:
    """Precision, a head of the user's, evaluation only, a second fit, and a checkpoint loaded over the files."""
    place = Path(folder) / "llama"
    assert parted(place, "bf16-true", stage=3, trainer={"precision": "bf16-true"}) <= 1.1 * bytes_of(place)
    parted(place, "bf16-mixed, stage 3", stage=3, trainer={"precision": "bf16-mixed"})

    fit(3, ours := WithHead(place, "AutoModel"), tokens(), max_epochs=1)
    fit("ddp", trusted := WithHead(place, "AutoModel"), tokens(), max_epochs=1)
    assert ours.was_on_meta
    assert_equal(ours.losses, trusted.losses, "with a head")

    losses = []
    for strategy in (3, "ddp"):
        module = Pretrained(place)
        trainer = trainer_of(strategy)
        losses.append(trainer.test(module, tokens(), verbose=False)[0]["test_loss"])
        losses.append(trainer.validate(module, tokens(), verbose=False)[0]["val_loss"])
    assert losses[:2] == losses[2:]

    modules = []
    for strategy in (3, "ddp"):
        module = Pretrained(place)
        fit(strategy, module, tokens(), max_epochs=1)
        fit(strategy, module, tokens(), max_epochs=1)
        modules.append(module)
    assert_equal(modules[0].losses, modules[1].losses, "a second fit")
    saved = f"{folder}/trained.ckpt"
    trainer = trainer_of(3, max_epochs=1)
    trainer.fit(module := Pretrained(place), tokens())
    trainer.save_checkpoint(saved)
    again = Pretrained(place)
    fit(3, again, tokens(), ckpt=saved, max_epochs=2)
    longer = Pretrained(place)
    fit(3, longer, tokens(), max_epochs=2)
    assert_equal(again.losses, longer.losses[len(module.losses) :], "resumed")


def test_whole_runs(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    _whole_runs(folder=str(tmp_path))


@on_ranks(4, timeout_s=150)
def _four(rank: int, world_size: int, folder: str) -> None:
    place = Path(folder) / "llama, tied"
    pipeline = {"pipeline": {"size": 2, "micro_batches": 2}}
    for stage in (0, 1, 3):
        parted(place, f"pipeline, stage {stage}", stage=stage, parallel=pipeline)
    parted(place, "tensor", stage=3, parallel={"tensor": 2}, offload="cpu")
    parted(place, "tensor and pipeline", stage=1, parallel={"tensor": 2, **pipeline})
    moe = Path(folder) / "qwen2-moe"
    parted(moe, "experts and replicas", stage=3, parallel={"expert": 2}, converts=True)
    parted(moe, "experts and tensor", stage=3, parallel={"expert": 2, "tensor": 2}, converts=True)


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    for name in ("llama, tied", "qwen2-moe"):
        save(tmp_path, name)
    _four(folder=str(tmp_path))


@on_ranks(2)
def _missing(rank: int, world_size: int, folder: str) -> None:
    """Heads that no file has, on ranks with parts of the model."""
    bert = {"auto": "AutoModelForSequenceClassification"}
    parted(Path(folder) / "bert", "bert, tensor", stage=3, parallel={"tensor": 2}, model=bert)
    place = Path(folder) / "llama without head"
    pipeline = {"pipeline": {"size": 2, "micro_batches": 2}}
    for stage in (1, 3):
        parted(place, f"pipeline, stage {stage}", stage=stage, parallel=pipeline)


def test_missing_entries_on_ranks_with_parts(tmp_path: Path) -> None:
    save(tmp_path, "bert")
    config = {**LLAMA, "tie_word_embeddings": False}
    MODELS["llama without head"] = ("LlamaModel", "LlamaConfig", config)
    save(tmp_path, "llama without head")
    _missing(folder=str(tmp_path))


class MadeEarly(Pretrained):
    """Built under ``trainer.init_module()``."""

    def build(self) -> None:
        super().build()
        self.configure_model()


class Resized(Pretrained):
    """With tokens that the files do not have."""

    def load(self) -> Any:
        model = super().load()
        model.resize_token_embeddings(VOCABULARY + 5)
        return model


@on_ranks(2)
def _other_ways(rank: int, world_size: int, folder: str) -> None:
    place = Path(folder) / "llama"
    fit("ddp", trusted := Pretrained(place), tokens(), max_epochs=1)
    fit("ddp", larger := Resized(place), tokens(), max_epochs=1)
    fit(3, ours := Resized(place), tokens(), max_epochs=1)
    assert_equal(ours.at_start, larger.at_start, "resized, at the start")
    assert_equal(ours.losses, larger.losses, "resized")
    fit(ZeROStrategy("auto"), ours := Pretrained(place), tokens(), max_epochs=1)
    assert ours.was_on_meta
    assert_equal(ours.losses, trusted.losses, "auto")
    trainer = trainer_of(3, max_epochs=1)
    with trainer.init_module(empty_init=True):
        ours = MadeEarly(place)
    assert ours.was_on_meta
    trainer.fit(ours, tokens())
    assert_equal(ours.losses, trusted.losses, "init_module")


def test_other_ways_to_meta(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    _other_ways(folder=str(tmp_path))


class Parallelized(Pretrained):
    """The user's own plan: layers are DTensors when the strategy gets them."""

    def configure_model(self) -> None:
        if self.model is not None:
            return
        super().configure_model()
        mesh = self.device_mesh["tensor_parallel"]
        for block in self.model.model.layers:
            plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
            parallelize_module(block.mlp, mesh, plan)


class ParallelizedOnHost(Parallelized, OnHost):
    pass


@on_ranks(2)
def _dtensors(rank: int, world_size: int, folder: str) -> None:
    place = Path(folder) / "llama"
    stages: tuple[Any, ...] = (1, 3)
    for stage in stages:
        modules = []
        for kind in (Parallelized, ParallelizedOnHost):
            fit(ZeROStrategy(stage, parallel={"tensor": 2}), module := kind(place), tokens(), max_epochs=1)
            modules.append(module)
        ours, trusted = modules
        assert ours.was_on_meta
        assert_equal(ours.at_start, trusted.at_start, f"stage {stage}, at the start")
        assert_equal(ours.losses, trusted.losses, f"stage {stage}, losses")


def test_layers_that_configure_model_has_parallelized(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    _dtensors(folder=str(tmp_path))


@on_ranks(2)
def _examples(rank: int, world_size: int, folder: str) -> None:
    from docs.examples import pretrained
    from docs.examples.model import RandomTokens

    class Trained(pretrained.FromFiles):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return torch.nn.functional.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[1].flatten())

        def on_fit_start(self) -> None:
            self.at_start = weights(self.net)

        configure_optimizers = pretrained.FineTuned.configure_optimizers

    trainer_of(3, max_steps=2).fit(pretrained.FineTuned(f"{folder}/llama"), tokens())
    module = Trained(f"{folder}/net")
    trainer_of(3, max_steps=2).fit(module, DataLoader(RandomTokens(), batch_size=8))
    expected = safetensors.load_file(f"{folder}/net/model.safetensors")
    assert_equal({name: module.at_start[name] for name in expected}, expected, "from files")


def test_examples_of_the_guide(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    (tmp_path / "net").mkdir()
    net = GPT(GPTConfig(num_layers=2, num_heads=2, width=32, block_size=32))
    state = {name: value.clone() for name, value in net.state_dict().items()}
    safetensors.save_file(state, tmp_path / "net" / "model.safetensors")
    _examples(folder=str(tmp_path))


@on_ranks(2)
def _fails_on_one(rank: int, world_size: int, folder: str) -> None:
    strategy, module = ZeROStrategy(3, sharding={"min_unit_numel": 0}), WithHead(Path(folder) / "llama", "AutoModel")
    with pytest.MonkeyPatch.context() as patch:
        second_rank_cannot_read(patch, rank)
        with pytest.raises(Exception) as error:  # noqa: PT011  (its class differs)
            fit(strategy, module, tokens())
    assert "Input/output error" in str(error.value)


def test_a_file_that_one_rank_cannot_read_ends_all(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    _fails_on_one(folder=str(tmp_path))
