"""Training from a DeepSpeed configuration: what reaches the Trainer and the module, and what contradicts it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy import ConfigError, ZeROStrategy
from ls_strategy.extras.deepspeed import WarmupLR
from ls_strategy.testing import spawn
from tests.trainers import bare_trainer

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "deepspeed"

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.3,
    "zero_optimization": {"stage": 2, "overlap_comm": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 4, "warmup_type": "linear"},
    },
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6))

    def forward(self, x):
        return x + self.inner(x)


class Net(pl.LightningModule):
    """Without configure_optimizers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(Block(), Block())
        self.rates: list[float] = []

    def training_step(self, batch, _):
        (x,) = batch
        return (self.layers(x) - x.flip(1)).pow(2).mean()

    def on_train_batch_end(self, *_):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def train_dataloader(self):
        data = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(data), batch_size=4, shuffle=False)


class WithOptimizer(Net):
    returns: object = "optimizer"

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1)
        schedule = WarmupLR(optimizer, 0.0, 0.05, 4, "linear")
        return {
            "optimizer": optimizer,
            "list": [optimizer],
            "dict": {"optimizer": optimizer},
            "both": {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}},
            "none": None,
        }[self.returns]


def fit(rank, world_size, module, strategy, arguments, steps=6):
    # through a plain dictionary: a strategy cannot be sent to ranks
    strategy = ZeROStrategy(**strategy)
    trainer = bare_trainer(strategy, world_size, max_steps=steps, **arguments)
    trainer.fit(module)
    weights = {k: v.clone() for k, v in strategy.lightning_module_state_dict().items()}
    facts = (str(trainer.precision), trainer.gradient_clip_val, trainer.accumulate_grad_batches)
    return weights, module.rates, facts, "configure_optimizers" in module.__dict__


def test_a_file_alone_trains_as_the_same_by_hand():
    """Clipping, accumulation, optimizer and schedule of the file, against a Trainer and a module that say it all."""
    by_file = spawn(fit, 2, Net(), {"deepspeed_config": CONFIG}, {}, init_process_group=False)
    module = WithOptimizer()
    module.returns = "both"
    arguments = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}
    by_hand = spawn(fit, 2, module, {"stage": 2}, arguments, init_process_group=False)
    for (weights, rates, facts, left), (expected, expected_rates, expected_facts, _) in zip(
        by_file, by_hand, strict=True
    ):
        assert facts == expected_facts == ("32-true", 0.3, 2)
        assert rates == expected_rates
        assert len(set(rates)) == 5
        assert not left
        assert weights.keys() == expected.keys()
        for name, value in weights.items():
            assert torch.equal(value, expected[name]), name


def run(module, config, *, arguments=None, steps=2, **options):
    return fit(0, 1, module, {"deepspeed_config": config, **options}, arguments or {}, steps)


def without(*keys, **more):
    return {**{k: v for k, v in CONFIG.items() if k not in keys}, **more}


@pytest.mark.parametrize("returns", ["optimizer", "list", "dict"])
def test_a_schedule_for_the_modules_own_optimizer(returns):
    module = WithOptimizer()
    module.returns = returns
    _, rates, *_ = run(module, without("optimizer"), steps=3)
    assert rates == [0.0, 0.0, 0.0, 0.0125, 0.0125, 0.025]


def test_a_module_that_returns_none_gets_the_files():
    module = WithOptimizer()
    module.returns = "none"
    weights, *_ = run(module, CONFIG)
    expected, *_ = run(Net(), CONFIG)
    assert all(torch.equal(value, expected[name]) for name, value in weights.items())


def test_auto_is_the_modules_and_the_trainers():
    module = Net()
    module.lr = 0.25
    config = without(
        "gradient_accumulation_steps",
        gradient_clipping="auto",
        optimizer={"type": "AdamW", "params": {"lr": "auto"}},
        scheduler={
            "type": "WarmupDecayLR",
            "params": {
                "total_num_steps": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": 2,
                "warmup_type": "linear",
            },
        },
    )
    _, rates, facts, _ = run(module, config, steps=4, arguments={"gradient_clip_val": 0.7})
    assert facts == ("32-true", 0.7, 1)
    assert rates == [0.0, 0.125, 0.25, 0.125]


@pytest.mark.parametrize(
    ("config", "given", "expected"),
    [
        ({"bf16": {"enabled": True}}, {}, "bf16-true"),
        ({"bf16": {"enabled": True}}, {"precision": "bf16-mixed"}, "bf16-mixed"),
        ({"bf16": {"enabled": "auto"}}, {"precision": "bf16-true"}, "bf16-true"),
        ({"fp16": {"enabled": True, "initial_scale_power": 4}}, {}, "16-true"),
    ],
)
def test_precision(config, given, expected):
    _, _, facts, _ = run(Net(), without(**config), arguments=given)
    assert facts[0] == expected


def test_a_skipped_step_keeps_the_rate():
    """As in DeepSpeed: an fp16 overflow skips the step, and the schedule does not move."""
    fp16 = {"enabled": True, "initial_scale_power": 40, "hysteresis": 1}
    config = without("gradient_accumulation_steps", "gradient_clipping", fp16=fp16)
    _, rates, *_ = run(Net(), config, steps=8)
    assert rates == [0.0] * 8, "a scale of 2^40 overflows in fp16, and halves once per step"
    fp16["initial_scale_power"] = 4
    _, rates, *_ = run(Net(), config, steps=3)
    assert rates == [0.0, 0.0125, 0.025]


@pytest.mark.parametrize(
    ("module", "config", "arguments", "word"),
    [
        (WithOptimizer, CONFIG, {}, "optimizer block"),
        (Net, CONFIG, {"gradient_clip_val": 1.0}, "gradient_clipping=0.3"),
        (Net, CONFIG, {"accumulate_grad_batches": 3}, "accumulate_grad_batches=2"),
        (Net, without(train_micro_batch_size_per_gpu=8), {}, "batch_size=4"),
        (Net, without(train_batch_size=9), {}, "train_batch_size=9"),
        (Net, without(fp16={"enabled": True}), {"precision": "bf16-mixed"}, "precision='16-true'"),
        (Net, without(gradient_clipping=1.0), {"gradient_clip_algorithm": "value"}, "clips by norm"),
        (Net, without(zero_optimization={"stage": 2, "zenflow": {"topk_ratio": 0.1}}), {}, "zenflow"),
    ],
)
def test_contradictions(module, config, arguments, word):
    with pytest.raises(ConfigError, match=word):
        run(module(), config, arguments=arguments)


def test_two_schedules_are_a_contradiction():
    module = WithOptimizer()
    module.returns = "both"
    with pytest.raises(ConfigError, match="scheduler block"):
        run(module, without("optimizer"))


def test_a_scheduled_accumulation_is_a_contradiction():
    callbacks = [GradientAccumulationScheduler({0: 2})]
    with pytest.raises(ConfigError, match="GradientAccumulationScheduler"):
        run(Net(), CONFIG, arguments={"callbacks": callbacks})


def test_manual_optimization_clips_by_hand():
    module = Net()
    module.automatic_optimization = False
    with pytest.raises(ConfigError, match="uses manual optimization"):
        run(module, CONFIG)


def test_without_any_optimizer_lightning_says_so():
    with pytest.raises(Exception, match="configure_optimizers"):
        run(Net(), without("optimizer"))


def test_the_log_has_a_line_for_every_key(caplog):
    with caplog.at_level(logging.INFO):
        run(Net(), CONFIG)
    lines = [line for line in caplog.text.splitlines() if "zero_optimization.overlap_comm" in line]
    assert len(lines) == 1
    assert "ignored" in lines[0]


def test_from_a_file_with_further_options(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONFIG))
    strategy = ZeROStrategy.from_deepspeed_config(path, checkpoint={"background": True})
    assert (strategy.config.stage, strategy.config.checkpoint.background) == (2, True)
    config = {"activation_checkpointing": {"cpu_checkpointing": True}}
    strategy = ZeROStrategy(deepspeed_config=config, activations="selective")  # says more than the file
    assert strategy.activations.recomputes
    with pytest.raises(ConfigError, match="stage=1"):
        ZeROStrategy.from_deepspeed_config(path, stage=1)


def test_by_class_path(tmp_path):
    """As LightningCLI and YAML name it, with every default written out."""
    jsonargparse = pytest.importorskip("jsonargparse")
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONFIG))
    parser = jsonargparse.ArgumentParser()
    parser.add_subclass_arguments(pl.strategies.Strategy, "strategy")
    value = {"class_path": "ls_strategy.ZeROStrategy", "init_args": {"deepspeed_config": str(path)}}
    made = parser.instantiate(parser.parse_object({"strategy": value})).strategy
    assert isinstance(made, ZeROStrategy)
    assert made.config.stage == 2


def fit_files(rank, world_size, configs, folder):
    found = []
    for config in configs:
        options = {}
        for block in config["zero_optimization"].values():
            if isinstance(block, dict) and "nvme_path" in block:
                block["nvme_path"] = folder
                options["offload"] = {"nvme_allow_ram": True}
        found.append(fit(rank, world_size, Net(), {"deepspeed_config": config, **options}, {}, steps=3)[0])
    return found


@pytest.mark.wide
def test_files_of_tutorials_train(tmp_path):
    """Stages, offload to memory and to a drive, recomputation: all give what stage 0 gives."""
    files = [json.loads(path.read_text()) for path in sorted(GOLDEN.glob("zero*.json"))]
    assert len(files) == 6
    configs = [{"zero_optimization": {"stage": 0}}, *files]
    configs = [{**config, "optimizer": CONFIG["optimizer"]} for config in configs]
    for config in configs:
        config.pop("train_micro_batch_size_per_gpu", None)  # the tutorials' batches are larger
    expected, *others = spawn(fit_files, 2, configs, str(tmp_path), init_process_group=False)[0]
    for weights in others:
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-7)
