"""Loading on meta in one process: what is recorded, what is refused, and the keys that are reported."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ls_strategy import load_safetensors
from ls_strategy.distributed.comm import Comm
from ls_strategy.distributed.mesh import Mesh
from ls_strategy.errors import CheckpointError, PlanError
from ls_strategy.meta_init.deferred import note_deferred
from ls_strategy.meta_init.lazy import source_of
from ls_strategy.pretrained.huggingface import without_memory
from ls_strategy.zero.setup.materialize import Materializer, value_of

needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
needs_safetensors = pytest.mark.skipif(importlib.util.find_spec("safetensors") is None, reason="needs safetensors")


@contextmanager
def on_meta() -> Generator[None, None, None]:
    """As the strategy runs ``configure_model``."""
    with without_memory(torch.device("cpu")):
        yield


def values(module: nn.Module) -> dict[str, Tensor]:
    """What the strategy would fill in."""
    found = {}
    for name, p in module.named_parameters():
        source = source_of(p)
        found[name] = p.detach() if source is None else source.materialize().to(p.dtype)
    return found


def fill(model: nn.Module) -> None:
    """Give parameters that are not read from files their values."""
    note_deferred(model)
    Materializer(model, torch.device("cpu"), {}, Mesh.data_only(Comm(None, None))).provide(list(model.parameters()))


def plain(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters()}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("gpt2")
    config = transformers.GPT2Config(
        vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def load(folder: Path, **options: Any) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


# --- from_pretrained -------------------------------------------------------------------------------------------------


@needs_transformers
def test_parameters_stay_on_meta_and_know_their_values(gpt2: Path) -> None:
    with on_meta():
        model = load(gpt2)
    expected = load(gpt2)
    assert all(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())
    assert model.lm_head.weight is model.transformer.wte.weight
    torch.testing.assert_close(values(model), plain(expected), rtol=0, atol=0)


@needs_transformers
def test_under_the_cpu_the_model_has_its_values(gpt2: Path) -> None:
    with on_meta(), torch.device("cpu"):
        model = load(gpt2)
    assert not any(p.is_meta for p in model.parameters())
    assert all(source_of(p) is None for p in model.parameters())


@needs_transformers
def test_transformers_is_as_before_afterwards(gpt2: Path) -> None:
    from transformers import core_model_loading, modeling_utils

    def parts() -> tuple[Any, ...]:
        base = vars(modeling_utils.PreTrainedModel)
        return (
            base["from_pretrained"], base["_load_pretrained_model"], modeling_utils.log_state_dict_report,
            core_model_loading.set_param_for_module,
        )  # fmt: skip

    before = parts()
    with pytest.raises(OSError, match="nowhere"), on_meta():
        load(gpt2 / "nowhere")
    assert parts() == before


@needs_transformers
@pytest.mark.parametrize(
    "options",
    [{"device_map": "auto"}, {"tp_plan": "auto"}, {"quantization_config": {"quant_method": "bitsandbytes"}}],
    ids=lambda options: next(iter(options)),
)
def test_arguments_that_cannot_work(gpt2: Path, options: dict[str, Any]) -> None:
    with on_meta(), pytest.raises(PlanError, match=f"{next(iter(options))}=.*eave it out"):
        load(gpt2, **options)


@needs_transformers
def test_bin_files(gpt2: Path, tmp_path: Path) -> None:
    model = load(gpt2)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with on_meta(), pytest.raises(PlanError, match="save_pretrained"):
        load(tmp_path)
    with on_meta(), torch.device("cpu"):
        assert not next(load(tmp_path).parameters()).is_meta


@needs_transformers
def test_copies_and_conversions_have_values(gpt2: Path) -> None:
    expected = load(gpt2)
    with on_meta():
        model = load(gpt2)
        teacher = copy.deepcopy(model)
        half = load(gpt2).to(torch.bfloat16)
        both = model.transformer.wpe.weight, model.transformer.wte.weight
        joined = nn.Parameter(torch.cat([p.mT for p in both], 1))
        scale = model.transformer.wte.weight.norm().item()
        host = model.transformer.wpe.weight.detach().to("cpu")
    torch.testing.assert_close(values(teacher), plain(expected), rtol=0, atol=0)
    torch.testing.assert_close(values(half), plain(expected.bfloat16()), rtol=0, atol=0)
    expected = load(gpt2).transformer
    source = source_of(joined)
    assert source is not None
    assert torch.equal(source.materialize(), torch.cat([expected.wpe.weight.mT, expected.wte.weight.mT], 1))
    assert scale == pytest.approx(expected.wte.weight.norm().item())
    assert torch.equal(host, expected.wpe.weight)


@needs_transformers
def test_a_folder_of_adapters_loads_them_and_the_model(gpt2: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    peft.get_peft_model(load(gpt2), config).save_pretrained(tmp_path)
    with on_meta():
        model = load(tmp_path)
    found, expected = values(model), plain(load(tmp_path))
    assert any("lora_B" in name for name in expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@needs_transformers
def test_an_unknown_loader_is_refused(gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import modeling_utils

    monkeypatch.delattr(modeling_utils, "log_state_dict_report")
    with on_meta(), pytest.raises(PlanError, match="Install transformers"):
        load(gpt2)


@needs_transformers
def test_views_of_loaded_weights(gpt2: Path) -> None:
    views: dict[str, Any] = {
        "rows": lambda w: w[3:7],
        "columns": lambda w: w[:, 16:32],
        "transposed": lambda w: w[2:5].t(),
        "every other": lambda w: w[::2],
    }
    expected = load(gpt2).transformer.h[0].attn.c_attn.weight
    with on_meta():
        weight = load(gpt2).transformer.h[0].attn.c_attn.weight
        found = {name: source_of(view(weight).clone()) for name, view in views.items()}
    for name, source in found.items():
        assert source is not None
        assert torch.equal(source.materialize(), views[name](expected)), name


@needs_transformers
def test_changes_are_made_when_the_values_are_read(gpt2: Path) -> None:
    def build() -> nn.Module:
        model = load(gpt2).transformer
        model.wte.weight.data.mul_(2)
        copied = nn.Embedding(8, 16)
        copied.weight.data.copy_(model.wpe.weight)
        nn.init.zeros_(model.ln_f.weight)
        with torch.no_grad():
            model.wpe.weight[3] += copied.weight[0] + torch.randn(16)
        norm = nn.Parameter(model.wte.weight.detach().norm(dim=1) + torch.zeros(40))
        return nn.ParameterList([*model.parameters(), *copied.parameters(), norm])

    torch.manual_seed(3)
    with on_meta():
        model = build()
    fill(model)
    torch.manual_seed(3)
    torch.testing.assert_close(values(model), plain(build()), rtol=0, atol=0)


@needs_transformers
@pytest.mark.parametrize("tokens", [44, 36])
def test_embeddings_are_resized(gpt2: Path, tokens: int) -> None:
    def resized() -> Any:
        torch.manual_seed(0)
        model = load(gpt2)
        model.resize_token_embeddings(tokens)
        return model

    with on_meta():
        model = resized()
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.transformer.wpe.weight.is_meta
    torch.testing.assert_close(values(model), plain(resized()), rtol=0, atol=0)


@needs_transformers
def test_parameters_of_another_shape_are_refused(gpt2: Path) -> None:
    with on_meta():
        model = load(gpt2)
    weight = model.transformer.wpe.weight
    weight.data = torch.empty(9, 16, device="meta")
    with pytest.raises(PlanError, match=r"\(8, 16\), and has shape \(9, 16\)"):
        value_of(weight, None, torch.device("cpu"))


@needs_transformers
@needs_safetensors
def test_shards_that_hold_a_name_twice_load_as_under_transformers(gpt2: Path, tmp_path: Path) -> None:
    """It reads all shards that an index names, in order, whatever the index says of a name."""
    safetensors = pytest.importorskip("safetensors.torch")
    state = safetensors.load_file(gpt2 / "model.safetensors")
    name = "transformer.ln_f.weight"
    (tmp_path / "config.json").write_text((gpt2 / "config.json").read_text())
    for i in (1, 2):
        shard = {key: value + i for key, value in state.items() if key == name or (len(key) % 2 == i - 1)}
        safetensors.save_file(shard, tmp_path / f"{i}.safetensors", metadata={"format": "pt"})
    files = {key: f"{len(key) % 2 + 1}.safetensors" for key in state} | {name: "1.safetensors"}
    index = {"metadata": {}, "weight_map": files}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    expected = plain(load(tmp_path))
    with on_meta():
        model = load(tmp_path)
    torch.testing.assert_close(values(model), expected, rtol=0, atol=0)
    assert torch.equal(expected[name], state[name] + 2)


# --- load_safetensors ------------------------------------------------------------------------------------------------


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 3, bias=False)
        self.tied = nn.Linear(4, 3, bias=False)
        self.tied.weight = self.last.weight


@pytest.fixture
def toy(tmp_path: Path) -> tuple[Path, Toy]:
    safetensors = pytest.importorskip("safetensors.torch")
    model = Toy()
    model.norm.running_mean = torch.randn(4)
    state = {name: value for name, value in model.state_dict().items() if not name.startswith("tied")}
    names = sorted(state)
    for i, part in enumerate((names[:3], names[3:])):
        safetensors.save_file({name: state[name] for name in part}, tmp_path / f"part{i}.safetensors")
    return tmp_path, model


@needs_safetensors
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_module_from_any_files(toy: tuple[Path, Toy], dtype: torch.dtype) -> None:
    folder, expected = toy
    with on_meta():
        model = Toy().to(dtype)
        assert load_safetensors(model, sorted(folder.glob("*.safetensors"))) == ([], [])
    assert model.tied.weight is model.last.weight
    expected.to(dtype)
    torch.testing.assert_close(values(model), plain(expected), rtol=0, atol=0)
    assert torch.equal(model.norm.running_mean, expected.norm.running_mean)
    filled = Toy().to(dtype)
    load_safetensors(filled, folder)
    torch.testing.assert_close(filled.state_dict(), expected.state_dict(), rtol=0, atol=0)


@needs_safetensors
def test_names_and_shapes_that_differ(toy: tuple[Path, Toy]) -> None:
    folder, expected = toy
    with on_meta():
        model = nn.ModuleDict({"last": nn.Linear(4, 3), "norm": nn.BatchNorm1d(4)})
        with pytest.raises(CheckpointError, match=r"Missing: last\.bias\. Unexpected: first\.bias, first\.weight"):
            load_safetensors(model, folder)
        assert source_of(model["last"].weight) is None
        keys = load_safetensors(model, folder, strict=False)
        assert keys.missing_keys == ["last.bias"]
        assert sorted(keys.unexpected_keys) == ["first.bias", "first.weight"]
        other = nn.ModuleDict({"first": nn.Linear(3, 5)})
        with pytest.raises(CheckpointError, match=r"first.weight: \(4, 3\) instead of \(5, 3\)"):
            load_safetensors(other, folder, strict=False)
        renamed = nn.ModuleDict({"head": nn.Linear(3, 4)})
        load_safetensors(renamed, folder, strict=False, rename=lambda name: name.replace("first.", "head."))
    assert torch.equal(values(renamed)["head.weight"], expected.first.weight)
