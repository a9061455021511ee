"""The MoE recipe: its files, its network, two ranks of it from the command line; and the CIFAR recipe's experts."""

from __future__ import annotations

import doctest
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("jsonargparse")
pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ls_strategy.moe.layer import MoE
from ls_strategy.testing import spawn
from recipes.gpt.main import GPTCLI
from recipes.gpt.network import GPT, GPTConfig
from recipes.moe import network
from recipes.moe.main import main
from recipes.moe.model import MoEGPTModule
from recipes.moe.network import MoEConfig, MoEGPT
from tests.dist.ranks import quiet
from tests.recipes.programs import assert_names_no_place, fit, flatten, stem

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "moe"
CONFIGS = RECIPE / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))
OVERLAYS = [f for f in FILES if f.name != "base.yaml"]
SMALL = GPTConfig(vocab_size=64, block_size=16, num_layers=4, num_heads=2, width=16)
TINY = [
    "--trainer.max_steps=6", "--trainer.val_check_interval=3", "--trainer.log_every_n_steps=1",
    "--trainer.enable_model_summary=false", "--model.config.num_layers=4", "--model.config.width=32",
    "--model.optim.warmup_steps=2", "--model.optim.lr=1e-2", "--model.sample.max_new_tokens=8",
    "--data.block_size=32", "--data.batch_size=4", "--data.val_crops=16", "--data.corpus.max_bytes=200000",
]  # fmt: skip


def config_args(file: Path) -> list[str]:
    return [f"--config={f}" for f in dict.fromkeys([CONFIGS / "base.yaml", file])]


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> GPTCLI:
    """The program on base.yaml."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["recipes.moe"])
        args = [*config_args(CONFIGS / "base.yaml"), "--trainer.devices=1"]
        return main([*args, f"--trainer.logger.init_args.save_dir={folder}"], run=False)


# --- configurations -------------------------------------------------------------------------------------------------


@pytest.mark.wide
@pytest.mark.sample(2)
@pytest.mark.parametrize("file", FILES, ids=stem)
def test_parses_and_fits_the_network(cli: GPTCLI, file: Path) -> None:
    """Every name and type is checked, and the network builds without memory."""
    parsed = cli.parser.parse_args(config_args(file))
    assert parsed.model.config.block_size == parsed.data.block_size
    with torch.device("meta"):
        MoEGPT(GPTConfig(**parsed.model.config.as_dict()), MoEConfig(**parsed.model.moe.as_dict()))


@pytest.mark.parametrize("file", OVERLAYS, ids=stem)
def test_an_overlay_says_only_what_it_changes(file: Path) -> None:
    base = flatten(yaml.safe_load((CONFIGS / "base.yaml").read_text()))
    overlay = flatten(yaml.safe_load(file.read_text()))
    assert not {k for k, v in overlay.items() if k in base and base[k] == v}


@pytest.mark.parametrize("file", FILES, ids=stem)
def test_names_no_place_on_this_machine(file: Path) -> None:
    assert_names_no_place(file)


def test_help_shows_the_docstrings_of_options(cli: GPTCLI, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parser.parse_args(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "Experts that a token visits" in shown
    assert "Width of the residual stream" in shown


def test_the_readmes_name_every_file() -> None:
    moe, cifar = RECIPE / "README.md", ROOT / "recipes" / "cifar" / "README.md"
    names = {file.stem for file in (ROOT / "recipes" / "cifar" / "configs").glob("moe*.yaml")}
    for readme, stems in ((moe, {f.stem for f in OVERLAYS}), (cifar, names)):
        text = readme.read_text()
        assert not [name for name in stems if not re.search(rf"`{name}(\.yaml)?`", text)]


# --- network --------------------------------------------------------------------------------------------------------


def of_overlay(cli: GPTCLI, name: str) -> MoEConfig:
    parsed = cli.parser.parse_args(config_args(CONFIGS / f"{name}.yaml"))
    return MoEConfig(**parsed.model.moe.as_dict())


@pytest.mark.parametrize("name", ["base", "top1", "dropless", "deepseek", "pr_moe"])
def test_a_token_meets_as_many_weights_as_in_the_dense_twin(cli: GPTCLI, name: str) -> None:
    """But for the router and the coefficients, and for rounding the width of experts up to a multiple of 8."""
    config = GPTConfig(num_layers=4, width=96 if name == "base" else 128)
    moe = of_overlay(cli, name)
    ours, dense = MoEGPT(config, moe), GPT(config)
    extra = sum(n * config.width for n in ours.experts_per_block) + 4 * 2 * config.width * moe.residual
    assert ours.flops_per_token() == dense.flops_per_token() + 6 * extra
    assert sum(p.numel() for p in ours.parameters()) > 2 * sum(p.numel() for p in dense.parameters())


@pytest.mark.parametrize("name", ["dropless", "deepseek", "pr_moe"])
def test_flops_are_those_that_torch_counts(cli: GPTCLI, name: str) -> None:
    """Of matrix products; those of attention are counted by the kernel, which may skip what is masked."""
    config, moe = SMALL, replace(of_overlay(cli, name), drop_tokens=False)
    model = MoEGPT(config, moe).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.randint(0, 64, (2, 16)))
    matrices = sum(count for op, count in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
    attention = 12 * config.num_layers * config.width * config.block_size
    assert 3 * matrices == 32 * (model.flops_per_token() - attention)


def test_the_dense_twin_is_the_gpt_recipes_network() -> None:
    torch.manual_seed(0)
    twin = MoEGPT(SMALL, MoEConfig(every=0))
    torch.manual_seed(0)
    dense = GPT(SMALL)
    tokens = torch.randint(0, 64, (2, 16))
    assert torch.equal(twin(tokens), dense(tokens))
    assert twin.flops_per_token() == dense.flops_per_token()


def test_blocks_with_and_without_experts() -> None:
    model = MoEGPT(SMALL, MoEConfig(every=2, num_experts=[2, 4]))
    found = [block.mlp.num_experts if isinstance(block.mlp, MoE) else 0 for block in model.blocks]  # type: ignore[union-attr]
    assert found == model.experts_per_block == [0, 2, 0, 4]
    plan = model.tensor_parallel_plan()
    divided = {pattern for pattern in plan if ".mlp." in pattern}
    assert divided == {f"blocks.{i}.mlp.{name}" for i in (0, 2) for name in ("gate_up", "down")}
    assert "blocks.*.attention.out" in plan


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_experts": []},
        {"num_experts": [0]},
        {"every": -1},
        {"shared_experts": -1},
        {"residual": True, "shared_experts": 1},
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Give|negative|Choose"):
        MoEConfig(**wrong)


def test_a_pyramid_of_the_wrong_height_is_refused() -> None:
    with pytest.raises(ValueError, match="2 blocks with experts"):
        MoEGPT(SMALL, MoEConfig(every=2, num_experts=[2, 4, 8]))
    with pytest.raises(ValueError, match="swiglu"):
        MoEGPT(GPTConfig(mlp="gelu"), MoEConfig())


@pytest.mark.wide
@pytest.mark.parametrize("name", ["base", "pr_moe", "deepseek"])
def test_built_on_meta_it_starts_as_wide_as_built_at_once(cli: GPTCLI, name: str) -> None:
    """Every module that owns parameters fills them itself, from the distribution that the constructor draws from."""
    config = GPTConfig(num_layers=4, width=64, tied_embeddings=False)
    torch.manual_seed(0)
    eager = MoEGPT(config, of_overlay(cli, name))
    with torch.device("meta"):
        late = MoEGPT(config, of_overlay(cli, name))
    late.to_empty(device="cpu")
    with torch.no_grad():
        for module in late.modules():
            if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                module.reset_parameters()  # type: ignore[operator]
    for (key, mine), (_, theirs) in zip(late.named_parameters(), eager.named_parameters(), strict=True):
        if mine.numel() > 2:
            assert float(mine.detach().std()) == pytest.approx(float(theirs.detach().std()), rel=0.25, abs=1e-6), key
    down = eager.blocks[0].mlp.experts.down.weight  # type: ignore[union-attr]
    assert float(down.detach().std()) == pytest.approx(config.residual_std, rel=0.05)


def test_doctests() -> None:
    assert doctest.testmod(network).attempted > 0
    assert doctest.testmod(network).failed == 0


# --- training -------------------------------------------------------------------------------------------------------


def test_the_loss_has_the_balance_of_experts_and_validation_has_not() -> None:
    module = MoEGPTModule(SMALL, MoEConfig(num_experts=[4], balance_loss=0.5, drop_tokens=False))
    logged: dict[str, Any] = {}
    module.log = lambda name, value, **_: logged.update({name: float(torch.as_tensor(value).detach())})  # type: ignore[method-assign]
    module._data = lambda: None  # type: ignore[method-assign]
    module.configure_model()
    batch = (torch.randint(0, 64, (2, 16)), torch.randint(0, 64, (2, 16)))
    loss = module.training_step(batch, 0)
    assert float(loss) == pytest.approx(logged["train/loss"] + logged["train/expert_loss"])
    assert logged["train/expert_loss"] == pytest.approx(4 * 0.5, rel=0.3)  # four layers, about even loads
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
    module.eval()
    with torch.no_grad():
        module.validation_step(batch, 0)
    assert logged["val/loss"] == pytest.approx(logged["train/loss"])


def test_a_checkpoint_holds_the_experts_options(tmp_path: Path) -> None:
    module = MoEGPTModule(SMALL, MoEConfig(num_experts=[4], k=3))
    assert {"config", "moe", "optim", "sample"} <= set(module.hparams)
    again = MoEGPTModule(**module.hparams)
    assert again.moe == module.moe
    assert again.config == module.config


def events(folder: Path) -> EventAccumulator:
    (run,) = folder.glob("*/version_0")
    return EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()


def scalars(folder: Path) -> dict[str, list[float]]:
    found = events(folder)
    return {tag: [e.value for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


@pytest.mark.wide
def test_two_ranks_train_divide_experts_log_and_save(tmp_path: Path) -> None:
    cache = f"--data.corpus.cache_dir={tmp_path / 'cache'}"
    output = fit(tmp_path, ["base", "ep2_zero2"], *TINY, cache, "--trainer.devices=2", recipe="moe")
    assert re.findall(r"-+ step (\d+) -+\ndef ", output) == ["3", "6"]
    found = events(tmp_path)
    assert found.Tags()["images"] == ["zero_time/step", "zero_memory/step", "zero_experts/load"]
    assert {f"zero_expert_tokens/model.blocks.{i}.mlp" for i in range(4)} == set(found.Tags()["histograms"])
    logged = scalars(tmp_path)
    assert len(logged["train/loss"]) == 6
    assert logged["train/loss"][-1] < logged["train/loss"][0]
    assert logged["val/loss"][-1] < logged["val/loss"][0]
    groups = sorted({tag.split("/")[0] for tag in logged})  # as TensorBoard shows them; it opens the first two
    assert groups[:2] == ["train", "val"]
    assert all(group.startswith("zero") for group in groups[2:])
    assert logged.keys() >= {"zero_experts/dropped", "zero_experts/largest_load", "zero/grad_norm", "val/bits_per_byte"}
    assert all(sent > 0 for sent in logged["zero_experts/sent_mib_per_step"])
    assert all(0 < value < math.log(8) + 1e-6 for value in logged["zero_experts/entropy"])
    assert {f.stem for f in tmp_path.glob("moe/version_0/checkpoints/*.ckpt")} >= {"last"}


def run_all(rank: int, world_size: int, runs: list[list[str]]) -> None:
    """The recipe, once per list of arguments: one start of the ranks, which costs more than a run."""
    quiet()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["recipes.moe"])
        for args in runs:
            main(["fit", *args, f"--trainer.devices={world_size}"])


def run_overlays(
    folder: Path, overlays: list[str], world_size: int, *options: str
) -> dict[str, dict[str, list[float]]]:
    """What every overlay logs on so many ranks."""
    common = [*TINY, *options, f"--data.corpus.cache_dir={folder / 'cache'}"]
    runs = [
        [*config_args(CONFIGS / f"{name}.yaml"), *common, f"--trainer.logger.init_args.save_dir={folder / name}"]
        for name in overlays
    ]
    spawn(run_all, world_size, runs, init_process_group=False, timeout_s=800)
    return {name: scalars(folder / name) for name in overlays}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_divided_experts_change_no_loss(tmp_path: Path) -> None:
    """Nothing is drawn and nothing dropped, so that only the order of summation differs.

    Stage 3 builds the network without memory, and so draws other initial weights than a constructor does.
    """
    divided = {"ep2": "base", "ep2_zero1": "base", "ep2_zero2": "base", "ep2_offload": "base", "ep2_zero3": "zero3"}
    whole = run_overlays(tmp_path, ["base"], 2, "--model.moe.drop_tokens=false")
    stage_3 = "--trainer.strategy=zero3"
    whole["zero3"] = run_overlays(tmp_path / "3", ["base"], 2, "--model.moe.drop_tokens=false", stage_3)["base"]
    found = run_overlays(tmp_path, list(divided), 2, "--model.moe.drop_tokens=false")
    for overlay, reference in divided.items():
        for name in ("train/loss", "train/expert_loss", "val/loss", "zero/grad_norm"):
            assert found[overlay][name] == pytest.approx(whole[reference][name], rel=1e-4), (overlay, name)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_overlay_learns_on_as_many_ranks_as_it_says(tmp_path: Path, ranks: int) -> None:
    wanted = {f.stem: yaml.safe_load(f.read_text()).get("trainer", {}).get("devices", 2) for f in OVERLAYS}
    found = run_overlays(tmp_path, [name for name, devices in wanted.items() if devices == ranks], ranks)
    assert len(found) >= 4
    for name, logged in found.items():
        assert logged["train/loss"][-1] < logged["train/loss"][0], name
        assert logged["val/loss"][-1] < logged["val/loss"][0], name
        assert ("zero_experts/entropy" in logged) == (name != "dense")


# --- CIFAR ----------------------------------------------------------------------------------------------------------

DATA = next((d for d in (ROOT / "data", ROOT.parent / "shared" / "data") if (d / "cifar-10-batches-py").is_dir()), None)


def test_the_tutorials_experts_are_where_the_tutorial_has_them() -> None:
    pytest.importorskip("torchvision")
    from recipes.cifar.model import CIFARModule
    from recipes.cifar.network import MoEConfig as Experts

    moe = Experts(num_experts=[2, 4], mlp_type="residual", noisy_gate_policy="RSample")
    module = CIFARModule("tutorial", moe=moe)
    layers = [m for m in module.modules() if isinstance(m, MoE)]
    assert [layer.num_experts for layer in layers] == [2, 4]
    fc3, router, coefficient = 84 * 85, 84, 2 * 85
    per_layer = sum(n * (fc3 + router) + fc3 + coefficient for n in (2, 4))
    assert sum(p.numel() for p in module.parameters()) == 62_006 + per_layer
    logits = module(torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8))
    assert logits.shape == (4, 10)
    before = torch.get_rng_state()
    dense = 3 * 2 * (28 * 28 * 25 * 3 * 6 + 10 * 10 * 25 * 6 * 16 + 400 * 120 + 120 * 84 + 84 * 10)
    visited = 3 * 2 * sum(2 * 84 * 84 + 84 * n + 2 * 84 for n in (2, 4))
    assert module.flops_per_sample() == dense + visited
    assert torch.equal(torch.get_rng_state(), before)
    again = CIFARModule(**module.hparams | {"optim": module.optim})
    assert again.moe == moe
    with pytest.raises(ValueError, match="tutorial"):
        CIFARModule("resnet", moe=moe)
    with pytest.raises(ValueError, match="num_experts"):
        Experts(num_experts=[])
    assert isinstance(CIFARModule("tutorial").net.fc3, nn.Linear)


@pytest.mark.skipif(DATA is None, reason="no images of CIFAR-10 here")
def test_the_tutorials_experts_learn_real_images() -> None:
    pytest.importorskip("torchvision")
    from ls_strategy.moe.losses import moe_losses
    from recipes.cifar.data import read_images
    from recipes.cifar.model import CIFARModule
    from recipes.cifar.network import MoEConfig as Experts

    torch.manual_seed(0)
    images, labels = read_images(str(DATA), ("data_batch_1",)).__getitems__(list(range(64)))
    module = CIFARModule("tutorial", augmentation=False, moe=Experts(num_experts=[2, 4], mlp_type="residual"))
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    losses = []
    for _ in range(80):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(images), labels)
        (loss + moe_losses(module)).backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.skipif(DATA is None, reason="no images of CIFAR-10 here")
@pytest.mark.slow
def test_the_tutorials_experts_are_divided_over_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    options = [
        f"--data.data_dir={DATA}", "--trainer.max_epochs=1", "--trainer.max_steps=20", "--trainer.log_every_n_steps=10",
        "--trainer.limit_val_batches=1", "--trainer.enable_model_summary=false",
    ]  # fmt: skip
    fit(tmp_path, ["base", "moe", "moe_ep2"], *options, recipe="cifar")
    logged = scalars(tmp_path)
    assert len(logged["train/loss"]) == 2
    assert all(2.0 < loss < 2.6 for loss in logged["train/loss"])  # about log(10): a few steps from the start
    assert all(sent > 0 for sent in logged["zero_experts/sent_mib_per_step"])
    assert set(logged) >= {"zero_expert_dropped/net.moe_layer_list.0", "train/expert_loss"}
