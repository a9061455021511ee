"""Weights that every rank needs in full, at stages 0 to 2: the ranks read the files once, whatever user code does.

The trusted run is DDP's, which loads the full model on every rank.
"""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ls_strategy.distributed import meeting
from ls_strategy.errors import CheckpointError
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.pretrained import together
from ls_strategy.pretrained.together import BLOCK_BYTES
from tests.dist.fabric_ranks import make_fabric
from tests.dist.ranks import assert_equal, fit, on_ranks, trainer_of, weights
from tests.dist.test_pretrained import (
    CONSTANT,
    WIDE,
    Peak,
    Pretrained,
    Reads,
    bytes_of,
    of_a_shard_and_a_tensor,
    resident,
    save,
    save_wide,
    second_rank_cannot_read,
    tokens,
)
from tests.marks import slow

safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")
pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")


class Elsewhere(Pretrained):
    """Rank 1 has another folder, and expects rank 0's weights as under DDP."""

    def load(self) -> Any:
        self.folder += "" if dist.get_rank() == 0 else " 2"
        return super().load()


class FirstAlone(Pretrained):
    """Rank 0 loads first, for example to fill a cache."""

    def load(self) -> Any:
        if dist.get_rank() == 0:
            super().load()
        dist.barrier()
        return super().load()


class OneMore(Pretrained):
    """Rank 1 loads a second model, which is in no other rank's program."""

    def load(self) -> Any:
        model = super().load()
        if dist.get_rank() == 1:
            assert torch.equal(super().load().lm_head.weight, model.lm_head.weight)
        return model


class InThread(Pretrained):
    """Loads two models, one in another thread."""

    def load(self) -> Any:
        found = []
        thread = threading.Thread(target=lambda: found.append(super(InThread, self).load()))
        thread.start()
        model = super().load()
        thread.join()
        assert torch.equal(found[0].lm_head.weight, model.lm_head.weight)
        return model


class Uses(Pretrained):
    """Uses values at once, as it may where models have memory."""

    def load(self) -> Any:
        model = super().load()
        with torch.no_grad():
            model.lm_head.weight.mul_(1 + float(model.lm_head.weight.numpy().max()))
        self.sum = sum(p.double().sum().item() for p in model.parameters())
        return model


@on_ranks(2)
def _programs(rank: int, world_size: int, folder: str) -> None:
    place = Path(folder) / "llama"
    factors = {Elsewhere: 2, FirstAlone: 3, OneMore: 2, InThread: 3, Uses: 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "PATIENCE_S", 0.5)
        for kind, factor in factors.items():
            with pytest.MonkeyPatch.context() as counting:
                reads = Reads(counting)
                fit(2, ours := kind(place), tokens(), max_steps=2)
                total = reads.total()
            fit("ddp", trusted := kind(place), tokens(), max_steps=2)
            assert_equal(ours.at_start, trusted.at_start, f"{kind.__name__}, at the start")
            assert_equal(ours.losses, trusted.losses, kind.__name__)
            assert total <= (factor + 0.1) * bytes_of(place), (kind.__name__, total / bytes_of(place))


def test_programs_in_which_ranks_differ_neither_hang_nor_mix_weights(tmp_path: Path) -> None:
    """The bytes read show where the ranks read together, and where each for itself."""
    save(tmp_path, "llama")
    save(tmp_path / "other", "llama, tied")
    place = save(tmp_path / "2", "llama")
    state = safetensors.load_file(place / "model.safetensors")
    safetensors.save_file({k: v + 1 for k, v in state.items()}, place / "model.safetensors", {"format": "pt"})
    place.rename(tmp_path / "llama 2")
    _programs(folder=str(tmp_path))


@on_ranks(2)
def _fails(rank: int, world_size: int, folder: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        second_rank_cannot_read(patch, rank)
        with pytest.raises(CheckpointError, match=r"Input/output error" if rank else r"rank 1: .* Input/output error"):
            fit(1, Pretrained(Path(folder) / "llama"), tokens())
    fit(1, ours := Pretrained(Path(folder) / "llama"), tokens(), max_steps=1)
    fit("ddp", trusted := Pretrained(Path(folder) / "llama"), tokens(), max_steps=1)
    assert_equal(ours.losses, trusted.losses, "after a failure")


@pytest.mark.wide
def test_a_file_that_one_rank_cannot_read_is_an_error_on_all(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    _fails(folder=str(tmp_path))


class FromFiles(Pretrained):
    """Loads with `load_safetensors`, into a model of another dtype with a weight that is not contiguous."""

    def load(self) -> Any:
        import transformers

        import ls_strategy

        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(self.folder))
        model = model.to(torch.float64)
        head = model.lm_head
        head.weight = torch.nn.Parameter(torch.empty(head.weight.shape[::-1], dtype=torch.float64).T)
        assert not head.weight.is_contiguous()
        self.keys = ls_strategy.load_safetensors(model, self.folder)
        return model.float()


@on_ranks(3)
def _any_module(rank: int, world_size: int, folder: str) -> None:
    """In many small blocks, on ranks whose parts do not come out even."""
    place = Path(folder) / "llama"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(together, "BLOCK_BYTES", 4112)
        reads = Reads(patch)
        fit(1, ours := FromFiles(place), tokens(), max_steps=2)
        assert reads.total() <= 1.1 * bytes_of(place)
    fit("ddp", trusted := FromFiles(place), tokens(), max_steps=2)
    assert ours.keys == trusted.keys == ([], [])
    expected = safetensors.load_file(place / "model.safetensors")
    assert_equal({name: ours.at_start[f"model.{name}"] for name in expected}, expected, "from files")
    assert ours.losses[0] == trusted.losses[0]
    # Updates round each operation; torch contracts two into one on some CPUs: a last digit of fp32 after one step.
    torch.testing.assert_close(ours.losses[1], trusted.losses[1], rtol=2.4e-7, atol=0)


@pytest.mark.wide
def test_any_module(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    _any_module(folder=str(tmp_path))


class PeakInFull(Peak):
    """Resident memory until the model is loaded, and until the engine has it."""

    def configure_model(self) -> None:
        super().configure_model()
        self.peak_of_loading = resident("VmHWM") - self.before


@on_ranks(2, timeout_s=120)
def _memory(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> None:
    place = Path(folder)
    with pytest.MonkeyPatch.context() as patch:
        reads = Reads(patch)
        fit(ZeROStrategy(2), module := PeakInFull(place, **options), tokens(4), max_steps=1)
        total = reads.total()
    model = bytes_of(place)
    largest = max(p.numel() for p in module.parameters()) * 4
    more = largest + CONSTANT + 2 * BLOCK_BYTES
    assert module.peak_of_loading <= model + more, f"{module.peak_of_loading / 2**20:.0f} of {model / 2**20:.0f} MiB"
    with_masters = model + model / world_size  # in the unit's buffers, and this rank's shard in master precision
    assert module.peak <= with_masters + more, f"{module.peak / 2**20:.0f} of {model / 2**20:.0f} MiB"
    assert total <= 1.01 * model


@pytest.mark.wide
@pytest.mark.parametrize("name", ["llama", *(slow(name) for name in WIDE if name != "llama")])
def test_memory_is_that_of_the_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _memory(**save_wide(tmp_path, name, monkeypatch))


class Adapted(Pretrained):
    """From a folder of adapters, which transformers loads to be used, not trained."""

    def load(self) -> Any:
        model = super().load()
        for name, param in model.named_parameters():
            param.requires_grad_("lora_" in name)
        return model


@on_ranks(2)
def _other_ways(rank: int, world_size: int, folder: str) -> None:
    """Evaluation only, another dtype, adapters, layers in parts, and Fabric."""
    place, fits = Path(folder) / "llama", {"max_steps": 2}
    factor = 1.1 * bytes_of(place)
    with pytest.MonkeyPatch.context() as patch:
        reads = Reads(patch)
        evaluated = [trainer_of(s).validate(Pretrained(place), tokens(), verbose=False) for s in (0, "ddp")]
        assert evaluated[0] == evaluated[1]
        assert 0 < reads.total() <= factor, "evaluation"
        adapters = Path(folder) / "adapters"
        models = {
            "bf16": lambda: Pretrained(place, dtype=torch.bfloat16),
            "adapters": lambda: Adapted(adapters),
        }
        for what, make in models.items():
            reads.nbytes = 0
            fit(1, ours := make(), tokens(), **fits)
            assert 0 < reads.total() <= factor + 1.1 * bytes_of(adapters), what
            fit("ddp", trusted := make(), tokens(), **fits)
            assert_equal(ours.at_start, trusted.at_start, f"{what}, at the start")
            assert_equal(ours.losses, trusted.losses, what)
            assert any("lora_B" in name for name in ours.at_start) == (what == "adapters")
        fit("ddp", trusted := Pretrained(place), tokens(), **fits)
        reads.nbytes = 0
        fit(ZeROStrategy(1, parallel={"tensor": 2}), ours := Pretrained(place), tokens(), **fits)
        assert 0 < reads.total() <= 1.3 * bytes_of(place), "tensor parallel"
        assert_equal(ours.at_start, trusted.at_start, "tensor parallel, at the start")
        reads.nbytes = 0
        fabric = make_fabric("zero2", world_size)
        with fabric.init_module():
            model = trusted.load()
        assert 0 < reads.total() <= factor, "Fabric"
    expected = {name.removeprefix("model."): value for name, value in trusted.at_start.items()}
    assert_equal(weights(model), expected, "Fabric")


@pytest.mark.wide
def test_other_ways_to_load(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    import transformers

    place = save(tmp_path, "llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(place)
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapters")
    _other_ways(folder=str(tmp_path))


@pytest.mark.wide
def test_memory_is_that_of_a_part_with_tensor_parallelism(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = {"stage": 2, "parallel": {"tensor": 2}}
    of_a_shard_and_a_tensor(**save_wide(tmp_path, "llama", monkeypatch), strategy=strategy)
