"""What an argument and ``deepspeed_config`` both say is the same, or an error; also where a parser fills defaults."""

from __future__ import annotations

import json
import sys
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml
from lightning.pytorch.demos.boring_classes import BoringModel

from ls_strategy import ActivationOffloadConfig, LossScaleConfig, NVMeIOConfig, OffloadConfig, TierConfig, ZeROStrategy
from ls_strategy.config import nested
from ls_strategy.config.option_names import GROUPS
from ls_strategy.errors import ConfigError
from ls_strategy.extras.deepspeed import translate
from ls_strategy.extras.deepspeed.options import KEYS_OF


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2, **keys}}


CPU = zero(offload_optimizer={"device": "cpu"})
NVME = {**zero(offload_optimizer={"device": "nvme", "nvme_path": "/a"}), "aio": {"block_size": 1 << 20}}

PARTITION = {"pipeline": {"stages": 2, "partition": "uniform"}}
ACCUMULATION = {"pipeline": {"stages": 2}, "gradient_accumulation_steps": 4}
BF16 = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}

CONTRADICTIONS = [
    (zero(), {"stage": 3}, "zero_optimization.stage=2"),
    (zero(), {"stage": 1}, "zero_optimization.stage=2"),
    (zero(), {"stage": "auto"}, "zero_optimization.stage=2"),
    (CPU, {"offload.optimizer": None}, "zero_optimization.offload_optimizer.device='cpu'"),
    (CPU, {"offload.optimizer": "nvme"}, "device='cpu'"),
    (CPU, {"offload.optimizer": {"tier": "nvme"}}, "device='cpu'"),
    (zero(offload_optimizer={"device": "none"}), {"offload.optimizer": "cpu"}, "device='none'"),
    (zero(offload_optimizer={"device": "cpu", "ratio": 0.5}), {"offload.optimizer": "cpu"}, "ratio=0.5"),
    (zero(cpu_offload=False), {"offload.optimizer": "cpu"}, "zero_optimization.cpu_offload=False"),
    (zero(stage3_prefetch_bucket_size=0), {"sharding.prefetch_units": 1}, "stage3_prefetch_bucket_size=0"),
    (zero(stage3_prefetch_bucket_size=5e7), {"sharding.prefetch_units": 0}, "stage3_prefetch_bucket_size"),
    (NVME, {"offload.nvme_path": "/b"}, "nvme_path='/a'"),
    (NVME, {"offload.nvme_path": None}, "nvme_path='/a'"),
    (NVME, {"offload.nvme_io": NVMeIOConfig(block_bytes=1 << 21)}, "aio.block_size=1048576"),
    (NVME, {"offload.nvme_io": None}, "aio.block_size=1048576"),
    ({"bf16": BF16}, {"precision.master_weights": True}, "bf"),
    ({"bf16": {"bf16_master_weights_and_grads": False}}, {"precision.master_weights": False}, "master_weights_and"),
    ({"fp16": {"enabled": True, "hysteresis": 4}}, {"precision.loss_scale": LossScaleConfig()}, "fp16.hysteresis=4"),
    ({"fp16": {"enabled": True, "hysteresis": 4}}, {"precision.loss_scale": None}, "fp16.hysteresis=4"),
    ({"communication_data_type": "fp32"}, {"precision.reduce_dtype": "compute"}, "communication_data_type='fp32'"),
    ({"communication_data_type": "fp16"}, {"precision.reduce_dtype": "fp32"}, "communication_data_type='fp16'"),
    ({"activation_checkpointing": {"cpu_checkpointing": True}}, {"activations.checkpointing": None}, "cpu_checkpoint"),
    ({"activation_checkpointing": {"cpu_checkpointing": True}}, {"activations.offload": "nvme"}, "cpu_checkpointing"),
    ({"activation_checkpointing": {"cpu_checkpointing": False}}, {"activations.offload": "cpu"}, "cpu_checkpointing"),
    ({"tensor_parallel": {"autotp_size": 2}}, {"parallel.tensor.size": 1}, "tensor_parallel.autotp_size=2"),
    ({"tensor_parallel": {"autotp_size": 1}}, {"parallel.tensor.size": 2}, "tensor_parallel.autotp_size=1"),
    ({"sequence_parallel_size": 2}, {"parallel.context": 1}, "sequence_parallel_size=2"),
    ({"pipeline": {"stages": 2}}, {"parallel.pipeline.size": 1}, "pipeline.stages=2"),
    ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, {"sharding.hpz": 4}, "hpz_partition_size=8"),
    ({"zero_optimization": {"stage": 3, "mics_shard_size": 8}}, {"sharding.shard_size": 4}, "mics_shard_size=8"),
    ({"zero_optimization": {"stage": 3, "mics_shard_size": -1}}, {"sharding.shard_size": 4}, "mics_shard_size=-1"),
    (zero(zero_quantized_weights=False), {"sharding.quantized_gathers": "int8"}, "zero_quantized_weights=False"),
    (zero(zero_quantized_gradients=False), {"sharding.quantized_gradients": "int4"}, "quantized_gradients=False"),
    (PARTITION, {"parallel.pipeline.partition": "parameters"}, "pipeline.partition"),
    (ACCUMULATION, {"parallel.pipeline.micro_batches": 2}, "gradient_accumulation"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "options", "key"), CONTRADICTIONS)
def test_a_contradiction_names_both_and_the_cure(config: dict[str, Any], options: dict[str, Any], key: str) -> None:
    (name,) = options
    with pytest.raises(ConfigError) as caught:
        ZeROStrategy(deepspeed_config=config, **nested(options))
    text = str(caught.value)
    assert text.startswith(f"Got {name}=")
    assert key in text
    assert "leave it out" in text


OBJECTS = [each for each in CONTRADICTIONS if "stage" not in each[1] and not {"offload.nvme_path", "offload.nvme_io",
           "parallel.pipeline.partition", "parallel.pipeline.micro_batches"} & set(each[1])]  # fmt: skip
"""Those that a group alone can hold."""


@pytest.mark.parametrize(("config", "options", "key"), OBJECTS)
def test_a_group_says_what_was_written_into_it_and_no_more(
    config: dict[str, Any], options: dict[str, Any], key: str
) -> None:
    """Also the value of a default; an option that was not written gives way to the file."""
    ((group, inner),) = nested(options).items()
    with pytest.raises(ConfigError, match="Got "):
        ZeROStrategy(deepspeed_config=config, **{group: GROUPS[group](**inner)})
    made = ZeROStrategy(deepspeed_config=config, **{group: GROUPS[group]()})
    assert made.config == ZeROStrategy(deepspeed_config=config).config


def test_short_forms_are_compared_with_the_file() -> None:
    assert ZeROStrategy(deepspeed_config=CPU, offload="cpu").config.offload == OffloadConfig(optimizer="cpu")
    for offload in (None, "nvme"):
        with pytest.raises(ConfigError, match=r"Got offload\.optimizer="):
            ZeROStrategy(deepspeed_config=CPU, offload=offload)
    saved = {"activation_checkpointing": {"cpu_checkpointing": True}}
    assert (
        ZeROStrategy(deepspeed_config=saved, activations="selective").config.activations.recompute.policy == "selective"
    )
    with pytest.raises(ConfigError, match=r"Got activations\.checkpointing=None"):
        ZeROStrategy(deepspeed_config=saved, activations=None)


AGREEMENTS = [
    (zero(), {"stage": 2}),
    ({}, {"stage": 3}),  # the file says nothing
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "auto"}}}, {"stage": 2}),
    (CPU, {"offload.optimizer": "cpu"}),
    (CPU, {"offload.optimizer": TierConfig(tier="cpu", ratio=0.5)}),  # says more
    (CPU, {"offload.optimizer": {"tier": "cpu", "ratio": 0.5}}),
    (zero(stage3_prefetch_bucket_size=5e7), {"sharding.prefetch_units": 2}),
    (NVME, {"offload.nvme_io": NVMeIOConfig(block_bytes=1 << 20, parallelism=2)}),
    ({"fp16": {"hysteresis": 4}}, {"precision.loss_scale": LossScaleConfig(hysteresis=4, window=9)}),
    (
        {"activation_checkpointing": {"cpu_checkpointing": True}},
        {"activations.offload": ActivationOffloadConfig(tier="cpu", min_bytes=0)},
    ),
    ({"activation_checkpointing": {"cpu_checkpointing": True}}, {"activations.checkpointing": "selective"}),
]


@pytest.mark.parametrize(("config", "options"), AGREEMENTS)
def test_what_says_the_same_or_more_is_accepted_and_counts(config: dict[str, Any], options: dict[str, Any]) -> None:
    made = ZeROStrategy(deepspeed_config=config, **nested(options))
    alone = ZeROStrategy(**nested({**translate(config).strategy, **options}))
    assert made.config == alone.config


def test_every_option_of_a_file_has_its_keys() -> None:
    """`KEYS_OF` is complete: what `translate` can set is in it."""
    full = {
        **zero(offload_optimizer={"device": "nvme", "nvme_path": "/a"}, stage3_prefetch_bucket_size=0),
        "aio": {"block_size": 1 << 20},
        "fp16": {"enabled": True, "loss_scale": 2},
        "communication_data_type": "fp16",
        "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
        "tensor_parallel": {"autotp_size": 2},
        "sequence_parallel_size": 2,
        "pipeline": {"stages": 2},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
    }
    options = {
        *translate(full).strategy,
        *translate({"zero_optimization": {"offload_param": {"device": "cpu"}}}).strategy,
        *translate(
            zero(stage=3, zero_hpz_partition_size=8, zero_quantized_weights=True, zero_quantized_gradients=True)
        ).strategy,
        *translate({"zero_optimization": {"stage": 3, "mics_shard_size": 8}}).strategy,
    }
    options |= translate({**full, "train_micro_batch_size_per_gpu": "auto"}).strategy.keys()
    assert options | {"precision.master_weights"} == set(KEYS_OF)


# --- LightningCLI passes every default -------------------------------------------------------------------------------


def build(arguments: list[str]) -> Any:
    cli = pytest.importorskip("lightning.pytorch.cli")
    quiet = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    return cli.LightningCLI(
        BoringModel, args=arguments, run=False, save_config_callback=None, trainer_defaults=quiet
    ).trainer.strategy


def yaml_file(folder: Any, **init_args: Any) -> str:
    strategy = {"class_path": "ls_strategy.ZeROStrategy", "init_args": init_args}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    return str(path)


@pytest.fixture
def ds_config(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "argv", ["program"])
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({**CPU, "tensor_parallel": {"autotp_size": 1}}))
    return str(path)


@pytest.mark.wide
def test_yaml_alone_takes_the_file(tmp_path: Any, ds_config: str) -> None:
    strategy = build(["--config", yaml_file(tmp_path, deepspeed_config=ds_config)])
    assert (strategy.config.stage, strategy.config.offload) == (2, OffloadConfig(optimizer="cpu"))
    partly = {"stage": 2, "offload": {"step_on": "cpu"}, "parallel": {"expert": 1}}
    config = build(["--config", yaml_file(tmp_path, deepspeed_config=ds_config, **partly)]).config
    assert (config.stage, config.offload) == (2, OffloadConfig(optimizer="cpu", step_on="cpu"))
    # And the signature is as before.
    assert pl.strategies.Strategy in ZeROStrategy.__mro__
    assert ZeROStrategy().config.stage == 3
    words = ["--trainer.strategy=ls_strategy.ZeROStrategy", "--trainer.strategy.checkpoint.frozen=false"]
    assert build(words).config.stage == 3


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize("written", [{"stage": 3}, {"offload": {"optimizer": None}}, {"offload": "nvme"}, {"stage": 1}])
def test_yaml_that_contradicts_the_file(tmp_path: Any, ds_config: str, written: dict[str, Any]) -> None:
    (name,) = ("stage",) if "stage" in written else ("offload.optimizer",)
    with pytest.raises(ValueError, match=f"Got {name}="):  # jsonargparse puts what was raised into an error of its own
        build(["--config", yaml_file(tmp_path, deepspeed_config=ds_config, **written)])


@pytest.mark.wide
def test_a_command_line_that_contradicts_the_file(tmp_path: Any, ds_config: str) -> None:
    config = yaml_file(tmp_path, deepspeed_config=ds_config)
    with pytest.raises(ValueError, match=r"Got stage=3.*zero_optimization\.stage=2"):
        build(["--config", config, "--trainer.strategy.init_args.stage", "3"])
    assert build(["--config", config, "--trainer.strategy.init_args.checkpoint.background", "true"]).config.stage == 2
