"""Translating DeepSpeed configurations: what is mapped, what is ignored with a reason, what is refused."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest
import torch

from ls_strategy import ConfigError, Lamb, Lion, LossScaleConfig, NVMeIOConfig, TierConfig, ZeROStrategy
from ls_strategy.config import nested
from ls_strategy.config.option_names import option_names
from ls_strategy.extras.deepspeed import translate
from ls_strategy.extras.deepspeed.keys import KEYS, documented
from ls_strategy.extras.deepspeed.optimizers import OptimizerBlock, SchedulerBlock
from ls_strategy.lightning.deepspeed import takes_deepspeed_config

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "deepspeed"


def zero(**keys):
    return translate({"zero_optimization": {"stage": 3, **keys}}).strategy


# --- whole files -----------------------------------------------------------------------------------------------------

SCALE = LossScaleConfig(static=None, initial_power=16, window=1000, hysteresis=2, min_scale=1.0)
CIFAR_SCALE = LossScaleConfig(static=None, initial_power=15, window=500, hysteresis=2, min_scale=1.0)
TRAINER = ("precision", "gradient_clip_val", "accumulate_grad_batches")
NVME = "/path/to/my/fast_nvme_storage"
ON_NVME = {"stage": 3, "offload.optimizer": "nvme", "offload.parameters": "nvme", "offload.nvme_path": NVME}


@pytest.mark.parametrize(
    ("name", "strategy", "arguments"),
    [
        ("zero2_stage_only", {"stage": 2}, {}),
        ("zero3_cpu_optimizer", {"stage": 3, "offload.optimizer": "cpu"}, {}),
        ("fp16_only", {"stage": 0}, {"precision": "16-true"}),
        ("zero3_partition_activations", {"stage": 3, "activations.checkpointing": "full"}, {}),
        ("gpt_zero2_fp16", {"stage": 2, "precision.loss_scale": SCALE}, {"precision": "16-true"}),
        ("zero2_cpu_offload", {"stage": 2, "offload.optimizer": "cpu"}, {}),
        ("zero3_cpu_offload", {"stage": 3, "offload.optimizer": "cpu", "offload.parameters": "cpu"}, {}),
        ("zero3_nvme", ON_NVME, {}),
        (
            "cifar_zero1_fp16",
            {"stage": 1, "precision.loss_scale": CIFAR_SCALE},
            {"precision": "16-true", "gradient_clip_val": 1},
        ),
        ("cifar_zero1_bf16", {"stage": 1}, {"precision": "bf16-true", "gradient_clip_val": 1}),
        ("cifar_zero1_fp32", {"stage": 1}, {"gradient_clip_val": 1}),
    ],
)
def test_files_of_tutorials(name, strategy, arguments):
    translation = translate(GOLDEN / f"{name}.json")
    assert translation.strategy == strategy
    fixed = {name: getattr(translation.trainer, name) for name in TRAINER}
    assert {k: v for k, v in fixed.items() if v is not None} == arguments
    config = json.loads((GOLDEN / f"{name}.json").read_text())
    assert set(translation.strategy) <= {"stage", *option_names()}
    ZeROStrategy(**nested(translation.strategy))
    rows = {row.key for row in translation.rows}
    assert leaves(config) <= rows
    report = translation.report()
    assert all(key in report for key in rows)


def leaves(config, table=KEYS, prefix=""):
    """Dotted keys that a report must name."""
    found = set()
    for name, value in config.items():
        entry = table[name]
        found |= leaves(value, entry, f"{prefix}{name}.") if isinstance(entry, dict) else {prefix + name}
    return found


def test_every_file_is_looked_at():
    tested = {mark.args[1][i][0] for mark in test_files_of_tutorials.pytestmark for i in range(len(mark.args[1]))}
    assert {path.stem for path in GOLDEN.glob("*.json")} == tested


def test_blocks_of_the_gpt_file():
    translation = translate(GOLDEN / "gpt_zero2_fp16.json")
    params = [torch.nn.Parameter(torch.ones(3))]
    optimizer = translation.optimizer.build(params)
    assert type(optimizer) is torch.optim.AdamW
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (1e-3, (0.9, 0.999), 1e-8, 3e-7)
    schedule = translation.scheduler.build(optimizer)
    assert group["lr"] == 0
    schedule.step(499)
    assert group["lr"] == pytest.approx(1e-3, rel=1e-12)
    assert translation.trainer.choose_batches(1, 2) == (1, 10)


def test_groups_of_ranks():
    assert zero(zero_hpz_partition_size=8) == {"stage": 3, "sharding.hpz": 8}
    assert zero(mics_shard_size=4, mics_hierarchical_params_gather=True) == {"stage": 3, "sharding.shard_size": 4}
    assert zero(zero_hpz_partition_size=1, mics_shard_size=-1) == {"stage": 3}
    packed = {"stage": 3, "sharding.hpz": 4, "sharding.quantized_gathers": "int8"}
    assert zero(zero_quantized_weights=True, zero_hpz_partition_size=4) == packed
    assert zero(zero_quantized_weights=False) == {"stage": 3}
    assert zero(zero_quantized_gradients=True) == {"stage": 3, "sharding.quantized_gradients": "int4"}
    assert zero(zero_quantized_gradients=False) == {"stage": 3}
    with pytest.raises(ConfigError, match="no error feedback"):
        zero(zero_quantized_gradients=True, zeropp_loco_param={"err_beta": 0.8})
    below = translate({"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 8}})
    assert below.strategy == {"stage": 2}
    assert "stage 3 only" in below.report()
    with pytest.raises(ConfigError, match="an integer of at least 0"):
        zero(zero_hpz_partition_size=-2)


# --- keys ------------------------------------------------------------------------------------------------------------


def test_every_known_key_has_an_outcome():
    """Each key alone, with a value that switches nothing on, gives a row; each text is there."""
    for key, entry in documented():
        assert entry.text, key
        assert entry.outcome in ("mapped", "ignored", "refused")
        if entry.outcome == "refused":
            assert entry.text[0].islower() or entry.text.startswith("DeepSpeed"), key


def alone(key, value):
    """A configuration with nothing but this key."""
    value = {"enabled": True} if key.endswith(".*") else value
    for name in reversed(key.removesuffix(".*").split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize("key", [key for key, entry in documented() if entry.outcome == "ignored"])
def test_ignored_keys_have_a_row(key):
    rows = {row.key: row for row in translate(alone(key, 1)).rows}
    row = rows[key.removesuffix(".*")]
    assert row.outcome == "ignored"
    assert row.text


@pytest.mark.parametrize("key", [key for key, entry in documented() if entry.outcome == "refused"])
def test_refused_keys_name_key_and_cure(key):
    with pytest.raises(ConfigError, match=re.escape(key.removesuffix(".*"))):
        translate(alone(key, "something"))


def block(of, kind, **params):
    return {of: {"type": kind, "params": params}}


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"zero_optimisation": {}}, "zero_optimization"),
        ({"zero_optimization": {"stge": 2}}, r"zero_optimization\.stage"),
        ({"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}}, r"offload_optimizer\.device"),
        ({"stage": 2}, r"zero_optimization\.stage"),
        ({"fp16": {"gradient_clipping": 1.0}}, "outside of fp16"),
        ({"fp16": True}, "fp16 is a block"),
        (block("optimizer", "OneBitAdam"), "removed"),
        (block("optimizer", "Muon", nesterov=False), "nesterov"),
        (block("optimizer", "AdamX"), "torch.optim"),
        (block("optimizer", "Optimizer", learning=1), "learning"),
        (block("optimizer", "AdamW", amsgrad=True), "amsgrad"),
        (block("optimizer", "AdamW", max_grad_norm=1.0), "gradient_clipping"),
        (block("optimizer", "AdamW", learning_rate=1.0), "learning_rate"),
        (block("scheduler", "CosineAnnealingLR"), "WarmupCosineLR"),
        (block("scheduler", "WarmupLR", warmup_steps=3), "warmup_num_steps"),
        (block("scheduler", "WarmupDecayLR"), "total_num_steps"),
    ],
)
def test_what_is_not_known_is_refused_with_the_closest(config, word):
    with pytest.raises(ConfigError, match=word):
        translate(config)


def test_switched_off_features_are_no_error():
    config = {
        "fp16": {"enabled": False, "fp16_master_weights_and_grads": False},
        "data_efficiency": {"enabled": False},
        "zero_optimization": {"zero_quantized_weights": False, "zenflow": None},
        "gradient_allreduce_op": "mean",
        "data_types": {"keep_in_fp32_modules": "auto"},
        "compression_training": {},
        "amp": {"enabled": False, "opt_level": "O1"},
    }
    assert all(row.outcome != "mapped" for row in translate(config).rows if row.key != "fp16.enabled")


# --- values ----------------------------------------------------------------------------------------------------------


def test_offload():
    assert zero(offload_optimizer={"device": "cpu", "ratio": 0.4})["offload.optimizer"] == TierConfig(
        tier="cpu", ratio=0.4
    )
    assert "offload.optimizer" not in zero(offload_optimizer={"device": "none"})
    assert "offload.optimizer" not in zero(offload_optimizer={"device": "cpu", "ratio": 0.0})
    assert zero(cpu_offload=True)["offload.optimizer"] == "cpu"
    assert zero(cpu_offload=True, offload_optimizer={"device": "nvme"})["offload.optimizer"] == "nvme"
    assert zero(cpu_offload_params=True)["offload.parameters"] == "cpu"
    assert zero(prefetch_bucket_size=0)["sharding.prefetch_units"] == 0
    assert "sharding.prefetch_units" not in zero(stage3_prefetch_bucket_size=5e7)
    assert translate({"zero_optimization": True}).strategy == {"stage": 1}
    assert translate({}).strategy == {"stage": 0}
    with pytest.raises(ConfigError, match="device='disk'"):
        zero(offload_param={"device": "disk"})
    with pytest.raises(ConfigError, match="stage=4"):
        zero(stage=4)
    paths = {
        "offload_optimizer": {"device": "nvme", "nvme_path": "/a"},
        "offload_param": {"device": "nvme", "nvme_path": "/b"},
    }
    with pytest.raises(ConfigError, match="share one folder"):
        zero(**paths)


def test_drive():
    config = {
        "aio": {"block_size": 2**20, "queue_depth": 8, "thread_count": 2, "single_submit": False},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/fast"}},
    }
    options = translate(config).strategy
    assert options["offload.nvme_io"] == NVMeIOConfig(block_bytes=2**20, queue_depth=8, parallelism=2)
    assert options["offload.nvme_path"] == "/fast"
    config["zero_optimization"]["offload_optimizer"]["device"] = "cpu"
    translation = translate(config)
    assert translation.strategy == {"stage": 2, "offload.optimizer": "cpu"}
    ignored = {row.key for row in translation.rows if row.outcome == "ignored"}
    assert {"aio.block_size", "zero_optimization.offload_optimizer.nvme_path"} <= ignored


def test_loss_scale():
    given = {"enabled": True, "loss_scale": 128, "min_loss_scale": 2, "consecutive_hysteresis": True}
    scale = translate({"fp16": given}).strategy["precision.loss_scale"]
    assert scale == LossScaleConfig(static=128.0, min_scale=2.0, consecutive_hysteresis=True)
    assert "precision.loss_scale" not in translate({"fp16": {"enabled": False, "loss_scale": 128}}).strategy
    assert translate({"fp16": {"enabled": "auto", "loss_scale": 128}}).strategy["precision.loss_scale"].static == 128
    with pytest.raises(ConfigError, match=r"fp16\.loss_scale=True"):
        translate({"fp16": {"enabled": True, "loss_scale": True}})
    with pytest.raises(ConfigError, match="window"):
        translate({"fp16": {"enabled": True, "loss_scale_window": 0}})


def test_sixteen_bit_states_and_sums():
    both = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    assert translate({"bf16": both}).strategy["precision.master_weights"] is False
    with pytest.raises(ConfigError, match="both"):
        translate({"bf16": {**both, "bf16_optimizer_states": False}})
    wanted = {"communication_data_type": "bf16", "bf16": {"enabled": True}}
    assert translate(wanted).strategy["precision.reduce_dtype"] == "compute"
    assert translate({"communication_data_type": "fp32"}).strategy["precision.reduce_dtype"] == "fp32"
    for other in ({"fp16": {"enabled": True}}, {"bf16": {"enabled": False}}):
        with pytest.raises(ConfigError, match="communication_data_type"):
            translate({"communication_data_type": "bf16", **other})


def test_activations_and_model_parallelism():
    partition = {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True}}
    expected = {"stage": 0, "activations.checkpointing": "full", "activations.offload": "cpu"}
    assert translate(partition).strategy == expected
    divided = translate({**partition, "tensor_parallel": {"autotp_size": 2}}).strategy
    assert divided == {**expected, "activations.partitioning": True, "parallel.tensor.size": 2}
    config = {
        "pipeline": {"stages": 4, "partition": "type:Block", "activation_checkpoint_interval": 1},
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 8,
        "sequence_parallel_size": 2,
    }
    translation = translate(config)
    assert translation.strategy == {
        "stage": 0,
        "activations.checkpointing": "full",
        "parallel.pipeline.size": 4,
        "parallel.pipeline.partition": "type:Block",
        "parallel.pipeline.micro_batch_size": 2,
        "parallel.context": 2,
    }
    assert translation.trainer.choose_batches(1, 2) == (1, 16)
    assert translate({"pipeline": {"stages": "auto", "partition": "best"}}).strategy == {"stage": 0}


# --- the Trainer -----------------------------------------------------------------------------------------------------


def test_precision():
    half = translate({"fp16": {"enabled": True}, "bf16": {"enabled": False}}).trainer
    assert [half.choose_precision(p) for p in ("32-true", "16-true", "16-mixed")] == ["16-true", "16-true", "16-mixed"]
    with pytest.raises(ConfigError, match="precision='16-true'"):
        half.choose_precision("bf16-true")
    nothing = translate({}).trainer
    assert [nothing.choose_precision(p) for p in ("32-true", "bf16-mixed")] == ["32-true", "bf16-mixed"]
    auto = translate({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}).trainer
    assert auto.choose_precision("16-mixed") == "16-mixed"
    off = translate({"fp16": {"enabled": False}, "bf16": {"enabled": False}}).trainer
    assert off.choose_precision("32-true") == "32-true"
    with pytest.raises(ConfigError, match="32-true"):
        off.choose_precision("bf16-mixed")
    assert translate({"fp16": {"enabled": False}}).trainer.choose_precision("bf16-true") == "bf16-true"
    autocast = translate({"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}).trainer
    assert autocast.choose_precision("32-true") == "bf16-mixed"
    with pytest.raises(ConfigError, match="dtype"):
        translate({"torch_autocast": {"enabled": True}})
    with pytest.raises(ConfigError, match="more than one"):
        translate({"fp16": {"enabled": True}, "bfloat16": {"enabled": True}})


def test_clipping():
    one = translate({"gradient_clipping": 1.0}).trainer
    assert one.choose_clipping(None, by_value=False) == 1.0
    assert one.choose_clipping(1, by_value=False) == 1.0
    for given, by_value in ((0.5, False), (0, False), (1.0, True)):
        with pytest.raises(ConfigError, match="gradient_clipping=1"):
            one.choose_clipping(given, by_value=by_value)
    for config in ({}, {"gradient_clipping": "auto"}):
        assert translate(config).trainer.choose_clipping(0.5, by_value=True) == 0.5
        assert translate(config).trainer.choose_clipping(None, by_value=False) is None
    with pytest.raises(ConfigError, match="gradient_clipping=-1"):
        translate({"gradient_clipping": -1})


@pytest.mark.parametrize(
    ("config", "trainer", "replicas", "expected"),
    [
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}, 1, 2, (3, 4)),
        ({"train_micro_batch_size_per_gpu": 4, "train_batch_size": 24}, 1, 2, (3, 4)),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 3}, 3, 2, (3, 4)),
        ({"train_batch_size": 24}, 3, 2, (3, 4)),
        ({"train_batch_size": 24}, 1, 2, (1, 12)),
        ({"train_micro_batch_size_per_gpu": 4}, 5, 2, (5, 4)),
        ({"gradient_accumulation_steps": 5}, 1, 2, (5, None)),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}, 7, 2, (7, None)),
    ],
)
def test_any_two_batch_sizes_give_the_third(config, trainer, replicas, expected):
    assert translate(config).trainer.choose_batches(trainer, replicas) == expected


@pytest.mark.parametrize(
    ("config", "trainer", "replicas", "word"),
    [
        ({"train_batch_size": 25, "train_micro_batch_size_per_gpu": 4}, 1, 2, "train_batch_size=25"),
        ({"train_batch_size": 25}, 1, 2, "train_batch_size=25"),
        ({"gradient_accumulation_steps": 3}, 2, 2, "accumulate_grad_batches=3"),
        (
            {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            1,
            2,
            "24 is not",
        ),
    ],
)
def test_batch_sizes_that_do_not_fit(config, trainer, replicas, word):
    with pytest.raises(ConfigError, match=word):
        translate(config).trainer.choose_batches(trainer, replicas)


def test_loader():
    settings = translate({"train_micro_batch_size_per_gpu": 4}).trainer
    settings.check_loader(4, 4)
    settings.check_loader(None, 4)
    settings.check_loader(3, None)
    with pytest.raises(ConfigError, match="batch_size=3"):
        settings.check_loader(3, 4)


# --- optimizer and schedule ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "params", "kind", "expected"),
    [
        ("Adam", {}, torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.0}),
        ("adam", {"adam_w_mode": False, "weight_decay": 0.1}, torch.optim.Adam, {"weight_decay": 0.1}),
        ("AdamW", {"lr": 0.1, "bias_correction": True}, torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.0}),
        ("AdamW", {"torch_adam": True}, torch.optim.AdamW, {"weight_decay": 0.01}),
        (
            "AdamW",
            {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
            torch.optim.AdamW,
            {"lr": 0.7},
        ),
        ("Lion", {"lr": 1e-4}, Lion, {"lr": 1e-4, "betas": (0.9, 0.99)}),
        ("Adagrad", {}, torch.optim.Adagrad, {"lr": 0.01, "eps": 1e-10}),
        ("SGD", {"lr": 0.5, "momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9}),
        ("Lamb", {"lr": 0.5, "max_coeff": 5.0}, Lamb, {"lr": 0.5, "max_ratio": 5.0, "min_ratio": 0.01, "eps": 1e-8}),
    ],
)
def test_optimizers(name, params, kind, expected):
    optimizer = OptimizerBlock(name, params).build([torch.nn.Parameter(torch.ones(2))], {"lr": 0.7})
    assert type(optimizer) is kind
    assert {key: optimizer.param_groups[0][key] for key in expected} == expected


def test_muon_updates_what_deepspeed_lets_it_update():
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(3, 2), "up": torch.nn.Linear(2, 4)})
    names = {id(p): name for name, p in model.named_parameters()}
    block = OptimizerBlock("Muon", {"lr": 0.1, "adam_lr": 0.01, "weight_decay": 0.2})
    optimizer = block.build(model.parameters(), names=names)
    chosen, others = optimizer.param_groups
    assert [names[id(p)] for p in chosen["params"]] == ["up.weight"]
    assert [names[id(p)] for p in others["params"]] == ["embed.weight", "up.bias"]
    assert (chosen["lr"], chosen["use_muon"], chosen["adjust_lr"]) == (0.1, True, "original")
    assert (others["lr"], others["use_muon"], others["weight_decay"]) == (0.01, False, 0.2)


def test_an_auto_that_nobody_knows():
    with pytest.raises(ConfigError, match=r"optimizer\.params\.lr"):
        OptimizerBlock("AdamW", {"lr": "auto"}).build([torch.nn.Parameter(torch.ones(2))])
    optimizer = OptimizerBlock("AdamW", {"lr": 0.2}).build([torch.nn.Parameter(torch.ones(2))])
    block = SchedulerBlock("WarmupDecayLR", {"total_num_steps": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 2})
    with pytest.raises(ConfigError, match="total_num_steps"):
        block.build(optimizer)
    schedule = block.build(optimizer, {"total_num_steps": 10})
    schedule.step(2)
    assert schedule.get_last_lr() == [0.2]


def test_a_scheduler_without_a_type():
    translation = translate({"scheduler": {"params": {"warmup_num_steps": 3}}})
    assert translation.scheduler is None
    assert {row.key: row.outcome for row in translation.rows}["scheduler.params"] == "ignored"


# --- files -----------------------------------------------------------------------------------------------------------


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="missing"):
        translate(tmp_path / "missing.json")
    for text, word in (("{,}", "not valid JSON"), ('{"fp16": {}, "fp16": {}}', "twice"), ("[]", "holds a list")):
        path = tmp_path / "bad.json"
        path.write_text(text)
        with pytest.raises(ConfigError, match=word):
            translate(path)


# --- arguments of the strategy ---------------------------------------------------------------------------------------


class Takes:
    @takes_deepspeed_config
    def __init__(self, stage: int = 3, *, offload=None, deepspeed_config=None, other: int = 0):
        self.stage, self.offload, self.deepspeed, self.other = stage, offload, deepspeed_config, other


def test_options_from_a_file():
    config = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    made = Takes(deepspeed_config=config, other=4)
    assert (made.stage, made.offload, made.other) == (2, {"optimizer": "cpu"}, 4)
    assert made.deepspeed.translation.strategy == {"stage": 2, "offload.optimizer": "cpu"}
    assert Takes(2, deepspeed_config=config).stage == 2
    assert Takes(1).deepspeed is None
    assert list(inspect.signature(Takes).parameters) == ["stage", "offload", "deepspeed_config", "other"]
    with pytest.raises(ConfigError, match="stage=1"):
        Takes(1, deepspeed_config=config)
    with pytest.raises(ConfigError, match=r"stage=3.*zero_optimization\.stage=2.*Set stage=2 or leave it out"):
        Takes(stage=3, deepspeed_config=config)  # the default, but passed


# --- docs/migration.md -----------------------------------------------------------------------------------------------


def test_every_key_is_documented():
    """In the tables that ``python -m tests.docs.option_tables`` writes; a test of the pages compares these."""
    text = (ROOT / "docs" / "migration.md").read_text()
    assert set(re.findall(r"^<!-- keys: (\w+) -->$", text, re.MULTILINE)) == {e.outcome for _, e in documented()}
    named = {key.replace("bfloat16.", "bf16.") for key, _ in documented()}  # the page says that one is the other
    assert [key for key in sorted(named) if f"`{key}`" not in text] == []


def test_examples_in_the_documentation():
    """Every JSON example of the document can be translated."""
    text = (ROOT / "docs" / "migration.md").read_text()
    examples = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    assert examples
    for example in examples:
        translate(json.loads(example))


def test_keys_of_the_installed_deepspeed_are_known():
    """Names in DeepSpeed's own configuration classes, read from its files without importing it."""
    import importlib.util

    package = importlib.util.find_spec("deepspeed")
    if package is None:
        pytest.skip("needs deepspeed")
    runtime = Path(package.submodule_search_locations[0]) / "runtime"
    zero_keys = fields((runtime / "zero" / "config.py").read_text(), "DeepSpeedZeroConfig")
    assert len(zero_keys) > 30
    known = set(KEYS["zero_optimization"])
    assert {k for k in zero_keys if k not in known and f"stage3_{k}" not in known} == set()
    offload = (runtime / "zero" / "offload_config.py").read_text()
    assert set(fields(offload, "DeepSpeedZeroOffloadParamConfig")) <= set(KEYS["zero_optimization"]["offload_param"])
    assert set(fields(offload, "DeepSpeedZeroOffloadOptimizerConfig")) <= set(
        KEYS["zero_optimization"]["offload_optimizer"]
    )
    precision = (runtime / "precision_config.py").read_text()
    assert set(fields(precision, "DeepSpeedFP16Config")) <= set(KEYS["fp16"])
    assert set(fields(precision, "DeepSpeedBF16Config")) <= set(KEYS["bf16"])


def fields(source, name):
    import ast

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return [item.target.id for item in node.body if isinstance(item, ast.AnnAssign)]
    raise AssertionError(f"{name} is not there")
