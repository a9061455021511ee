"""Folders that `HuggingFaceExport` writes, opened by transformers and peft alone: the bits of the model that trains."""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from ls_strategy import HuggingFaceExport, ZeROStrategy
from ls_strategy.checkpoint import safetensors
from ls_strategy.extras import cli
from ls_strategy.testing import RankDiedError, spawn
from tests.dist.hub_server import serving
from tests.dist.ranks import assert_equal, fit, on_ranks
from tests.dist.test_adapters import Adapted, Switching
from tests.dist.test_pretrained import VOCABULARY, Pretrained, save, tokens

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs {name}")
    for name in ("peft", "transformers", "safetensors")
]

IDS = torch.arange(24).view(3, 8) * 5 % VOCABULARY


class Watch(pl.Callback):
    """What the run's model is at its end: full weights by the model's own names, and its logits."""

    def __init__(self, *, logits: bool = True) -> None:
        self.wants_logits = logits
        self.weights: dict[str, Tensor] = {}
        self.logits: Tensor | None = None

    def on_train_end(self, trainer: Any, module: Any) -> None:
        found = dict(trainer.strategy.full_weights(module.model))
        self.weights = {name.replace("_orig_mod.", ""): t.clone() for name, t in found.items()}
        if self.wants_logits:
            module.eval()
            with torch.no_grad():
                self.logits = module.model(input_ids=IDS).logits.clone()


def run(module: Any, folder: Path, strategy: ZeROStrategy, *, logits: bool = True, **options: Any) -> Watch:
    """Two exports of a fit, of which the second replaces the first."""
    watch = Watch(logits=logits)
    export = HuggingFaceExport(folder, every=2, **options)
    fit(strategy, module, tokens(), max_steps=3, callbacks=[export, watch])
    return watch


def opened(folder: Path, model_class: str = "AutoModelForCausalLM", **options: Any) -> Any:
    """The folder as transformers alone opens it, if it reports nothing."""
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    model, info = getattr(transformers, model_class).from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values()), info
    return model.eval()


def compare(folder: Path, watch: Watch, what: str, cast: Any = lambda t: t) -> None:
    model = opened(folder)
    own = model.state_dict()
    assert_equal({n: own[n] for n in sorted(own)}, {n: cast(watch.weights[n]) for n in sorted(own)}, what)
    if watch.logits is not None:
        with torch.no_grad():
            assert_equal(model(input_ids=IDS).logits, watch.logits, f"{what}: logits")


def stored(folder: Path) -> set[str]:
    """Names of tensors in the files."""
    from safetensors import safe_open

    found: list[str] = []
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened_file:
            found += opened_file.keys()
    assert len(set(found)) == len(found)
    return set(found)


def as_theirs(folder: Path, ours: Path) -> None:
    """Names, and the small files but for what the export knows better, are those of ``save_pretrained``."""
    assert stored(ours) == stored(folder)
    config, expected = (json.loads((place / "config.json").read_text()) for place in (ours, folder))
    assert config == {**expected, "use_cache": False}
    assert (folder / "generation_config.json").exists() == (ours / "generation_config.json").exists()


@on_ranks(2)
def _stages(rank: int, world_size: int, folder: str, stages: tuple[int, ...]) -> None:
    place = Path(folder)
    for stage in stages:
        module = Pretrained(place / "llama, tied")
        strategy = ZeROStrategy(stage, sharding={"min_unit_numel": 0})
        watch = run(module, place / f"out {stage}", strategy, max_shard_gb=1e-4)
        if rank == 0:
            compare(place / f"out {stage}", watch, f"stage {stage}")


@pytest.mark.parametrize("stages", [(0, 3), pytest.param((1, 2), marks=pytest.mark.wide)])
def test_a_folder_of_every_stage_has_the_bits_and_the_logits_of_the_run(
    stages: tuple[int, ...], tmp_path: Path
) -> None:
    save(tmp_path, "llama, tied")
    _stages(folder=str(tmp_path), stages=stages)
    for stage in stages:
        folder = tmp_path / f"out {stage}"
        as_theirs(tmp_path / "llama, tied", folder)
        assert len(list(folder.glob("model-*-of-*.safetensors"))) > 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["llama, tied", *(f"out {stage}" for stage in stages)]


PARALLEL: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor": ("llama, tied", {"tensor": 2}),
    "pipeline": ("llama", {"pipeline": {"size": 2, "micro_batches": 2}}),
    "pipeline, tied": ("llama, tied", {"pipeline": {"size": 2, "micro_batches": 2}}),
    "expert": ("qwen2-moe", {"expert": 2}),
}


class Converted(Pretrained):
    """With sparse blocks that are sharded."""

    def load(self) -> Any:
        from ls_strategy import convert_moe

        model = super().load()
        convert_moe(model)
        return model


@on_ranks(2, timeout_s=120)
def _parallel(rank: int, world_size: int, folder: str, kind: str, stages: tuple[int, ...]) -> None:
    place = Path(folder)
    name, parallel = PARALLEL[kind]
    for stage in stages:
        module = (Converted if kind == "expert" else Pretrained)(place / name)
        options: Any = {"sharding": {"min_unit_numel": 0}, "parallel": parallel, "checkpoint": {"background": True}}
        watch = run(module, place / f"out {stage}", ZeROStrategy(stage, **options), logits=False)
        if rank == 0:
            compare(place / f"out {stage}", watch, f"{kind}, stage {stage}")


@pytest.mark.parametrize(
    ("kind", "stages"),
    [
        ("expert", (3,)),
        ("tensor", (3,)),
        pytest.param("pipeline, tied", (1,), marks=pytest.mark.wide),
        pytest.param("pipeline", (0, 1), marks=pytest.mark.wide),
        pytest.param("tensor", (0, 1), marks=pytest.mark.wide),
        pytest.param("expert", (1, 2), marks=pytest.mark.wide),
    ],
)
def test_parts_of_parallel_ranks_are_one_model_under_its_own_names(
    kind: str, stages: tuple[int, ...], tmp_path: Path
) -> None:
    folder = save(tmp_path, PARALLEL[kind][0])
    _parallel(folder=str(tmp_path), kind=kind, stages=stages)
    for stage in stages:
        as_theirs(folder, tmp_path / f"out {stage}")


class Compiled(Pretrained):
    """torch.compile's wrappers around the model and a block, run eagerly."""

    def load(self) -> Any:
        model = super().load()
        model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
        return torch.compile(model, backend="eager")


@on_ranks(2)
def _compiled(rank: int, world_size: int, folder: str) -> None:
    place = Path(folder)
    strategy = ZeROStrategy(2, checkpoint={"background": True})
    watch = run(Compiled(place / "llama"), place / "{step}" / "out", strategy, logits=False, dtype="bfloat16")
    if rank == 0:
        compare(place / "3" / "out", watch, "compiled", lambda t: t.bfloat16())
        assert json.loads((place / "2" / "out" / "config.json").read_text())["dtype"] == "bfloat16"
        assert sorted(p.name for p in place.iterdir()) == ["2", "3", "llama"]


@pytest.mark.wide
@pytest.mark.own_ranks  # dynamo replaces functions of torch
def test_names_have_no_trace_of_compile_and_the_dtype_is_the_one_asked_for(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    _compiled(folder=str(tmp_path))


@on_ranks(2, timeout_s=120)
def _adapters(rank: int, world_size: int, folder: str, cases: list[tuple[str, int, dict[str, Any]]]) -> None:
    import peft
    import transformers

    place = Path(folder)
    for number, (kind, stage, parallel) in enumerate(cases):
        several = kind == "switching"
        module = Switching(place / "llama") if several else Adapted(place / "llama", kind)
        out = place / f"out {number}"
        strategy = ZeROStrategy(stage, sharding={"min_unit_numel": 0}, parallel=parallel)  # type: ignore[arg-type]
        watch = run(module, out, strategy, logits=not parallel)
        if rank == 0:
            base = transformers.AutoModelForCausalLM.from_pretrained(place / "llama")
            model = peft.PeftModel.from_pretrained(base, out)
            if several:
                model.load_adapter(str(out / "other"), "other")
                model.set_adapter(module.model.active_adapter)
            own = model.state_dict()
            assert_equal({n: own[n] for n in sorted(own)}, {n: watch.weights[n] for n in sorted(own)}, kind)
            assert not any("base_layer" in name for name in stored(out))
            if watch.logits is not None:
                with torch.no_grad():
                    assert_equal(model.eval()(input_ids=IDS).logits, watch.logits, f"{kind}: logits")


@pytest.mark.parametrize(
    "cases",
    [
        [("lora", 3, {}), ("tokens", 1, {})],
        pytest.param(
            [("lora", 0, {"tensor": 2}), ("switching", 2, {}), ("modules_to_save", 3, {}), ("dora", 1, {})],
            marks=pytest.mark.wide,
        ),
    ],
    ids=["few", "all"],
)
def test_adapters_alone_are_written_as_peft_reads_them(cases: list[Any], tmp_path: Path) -> None:
    save(tmp_path, "llama")
    _adapters(folder=str(tmp_path), cases=cases)


class Broken:
    """A tokenizer that cannot be saved."""

    def save_pretrained(self, folder: str) -> None:
        raise ValueError("no vocabulary")


class Two(Pretrained):
    """Two models."""

    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "teacher"):
            self.teacher = self.load()


@on_ranks(2)
def _refused(rank: int, world_size: int, folder: str) -> None:
    place = Path(folder)
    (place / "mine").mkdir(exist_ok=True)
    (place / "mine" / "notes.txt").touch()
    cases: list[tuple[type[Pretrained], dict[str, Any], str, int]] = [
        (Two, {}, "has the models model, teacher", 0),
        (Pretrained, {"module": "net"}, r"Got module='net'.*has the models model\.", 0),
        (Pretrained, {"path": place / "mine"}, "a folder that no export wrote", 0),
        (Pretrained, {"tokenizer": Broken()}, "no vocabulary", 1),
        (functools.partial(Adapted, kind="prompt"), {}, "PEFT computes from the weights", 1),  # type: ignore[list-item]
    ]
    for make, options, words, steps in cases:
        module = make(place / "llama")
        with pytest.raises(Exception, match=words):
            fit(
                3,
                module,
                tokens(),
                max_steps=2,
                callbacks=[HuggingFaceExport(**{"path": place / "out", "every": 1, **options})],
            )
        assert len(module.losses) == steps
    assert [p.name for p in (place / "mine").iterdir()] == ["notes.txt"]


@pytest.mark.wide
def test_what_cannot_be_exported_is_refused_on_all_ranks_and_nothing_is_written(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    _refused(folder=str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["llama", "mine"]


def killed_at_the_second(rank: int, world_size: int, folder: str) -> None:
    """Rank 0 is killed in the middle of the second export."""
    place = Path(folder)
    files: list[str] = []
    write = safetensors._write

    def killing(path: Path, *arguments: Any) -> Any:
        files.append(path.name)
        if len(files) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        yield from write(path, *arguments)

    safetensors._write = killing
    strategy = ZeROStrategy(3, checkpoint={"background": True})
    export = HuggingFaceExport(place / "out", every=1, max_shard_gb=2e-4)
    fit(strategy, Pretrained(place / "llama"), tokens(), max_steps=3, callbacks=[export])


@pytest.mark.wide
@pytest.mark.own_ranks  # they are killed
def test_a_rank_that_is_killed_leaves_the_folder_before_and_the_next_run_cleans_up(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    with pytest.raises(RankDiedError):
        spawn(killed_at_the_second, 2, str(tmp_path), init_process_group=False, timeout_s=90)
    assert len(list(tmp_path.iterdir())) > 2
    first = opened(tmp_path / "out").state_dict()
    start = opened(tmp_path / "llama").state_dict()
    assert all(not torch.equal(value, start[name]) for name, value in first.items())
    _stages_once(folder=str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["llama", "out"]


@on_ranks(2)
def _stages_once(rank: int, world_size: int, folder: str) -> None:
    place = Path(folder)
    watch = run(Pretrained(place / "llama"), place / "out", ZeROStrategy(2, offload="cpu"))  # type: ignore[arg-type]
    if rank == 0:
        compare(place / "out", watch, "after a kill, offloaded")


HUB = """
import sys
from ls_strategy import HuggingFaceExport
from tests.dist.hub_server import serving
from tests.dist.ranks import fit
from tests.dist.test_pretrained import Pretrained, tokens

place, gb = sys.argv[1:]
export = HuggingFaceExport(f"{place}/out", every=1, push_to_hub="me/model", max_shard_gb=float(gb))
fit(2, Pretrained(f"{place}/llama"), tokens(), max_steps=3, callbacks=[export])
"""


@pytest.mark.wide
def test_every_export_is_a_commit_on_the_hub_which_loses_what_the_folder_has_not(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    with serving() as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_token", "HF_HUB_OFFLINE": "0"}
        outputs: list[str] = []
        for gb in ("1e-4", "5"):
            done = subprocess.run(
                [sys.executable, "-c", HUB, str(tmp_path), gb],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            outputs.append(done.stderr)
            there = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
            assert hub.files == there
            hub.failing = 1  # the first commit of the second run
        assert hub.commits == ["Step 1", "Step 2", "Step 3", "Step 2", "Step 3"]
        assert hub.created[0]["visibility"] == "private"
    assert "could not be uploaded to me/model" in outputs[1]
    assert "could not be uploaded" not in outputs[0]


@on_ranks(2)
def _checkpoint(rank: int, world_size: int, folder: str) -> None:
    module = Converted(Path(folder) / "qwen2-moe")
    strategy = ZeROStrategy(3, sharding={"min_unit_numel": 0}, parallel={"expert": 2}, checkpoint="sharded")  # type: ignore[arg-type]
    watch = Watch(logits=False)
    trainer = fit(strategy, module, tokens(), max_steps=2, callbacks=[watch])
    trainer.save_checkpoint(Path(folder) / "last.ckpt")
    if rank == 0:
        torch.save(watch.weights, Path(folder) / "weights.pt")


def consolidate(folder: Path, *more: str) -> None:
    source, target, model = (str(folder / name) for name in ("last.ckpt", "out", "qwen2-moe"))
    assert cli.main(["consolidate", source, target, "--to", "hf", "--model", model, *more]) == 0


@pytest.mark.wide
def test_a_checkpoint_of_any_layout_becomes_a_folder_for_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(tmp_path, "qwen2-moe")
    (folder / "tokenizer.json").write_text("{}")
    _checkpoint(folder=str(tmp_path))
    watch = Watch(logits=False)
    watch.weights = torch.load(tmp_path / "weights.pt")
    consolidate(tmp_path)
    compare(tmp_path / "out", watch, "consolidated")
    assert stored(tmp_path / "out") == stored(folder)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    consolidate(tmp_path, "--force", "--dtype", "bf16", "--max-shard-gb", "1e-4")
    compare(tmp_path / "out", watch, "consolidated, bf16", lambda t: t.bfloat16())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": 32}))
    with pytest.raises(AssertionError):
        consolidate(tmp_path, "--force")
    assert "experts.gate_up_proj has shape (4, 96, 64), the model has (4, 64, 64)" in capsys.readouterr().err
