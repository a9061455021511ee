"""Groups of options: short forms, what is refused; in Python, YAML, and on the command line."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

import ls_strategy
from ls_strategy import (
    ActivationOffloadConfig,
    ActivationsConfig,
    CheckpointConfig,
    ConfigError,
    NVMeIOConfig,
    OffloadConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    RecomputeConfig,
    ShardingConfig,
    TensorConfig,
    TierConfig,
    ZeROStrategy,
)
from ls_strategy.autoload import ALIASES
from ls_strategy.config import ZeROConfig, nested
from ls_strategy.config.option_names import GROUPS, default_of, option_names
from ls_strategy.extras.planner.candidates import ladder

CLASSES = [name for name in ls_strategy.__all__ if dataclasses.is_dataclass(getattr(ls_strategy, name))]
FULL: dict[str, Any] = {
    "stage": 2,
    "sharding.block_classes": ["Block"],
    "sharding.rank_weights": [2, 1],
    "precision.loss_scale": {"window": 7},
    "precision.moments": "int8",
    "offload.optimizer": {"tier": "nvme", "ratio": 0.5},
    "offload.gradients": "cpu",
    "offload.nvme_io": {"parallelism": 2},
    "offload.delay_after": 3,
    "activations.checkpointing": {"policy": "selective", "every": 2},
    "activations.offload": "nvme",
    "parallel.context": 2,
    "checkpoint.background": True,
}
"""Options of every group, by names with dots."""

# --- groups -----------------------------------------------------------------------------------------------------------


def test_a_dictionary_is_the_group() -> None:
    by_dictionary = ZeROStrategy(**nested(FULL)).config
    by_class = ZeROStrategy(
        stage=2,
        sharding=ShardingConfig(block_classes=("Block",), rank_weights=(2.0, 1.0)),
        precision=PrecisionConfig(loss_scale=ls_strategy.LossScaleConfig(window=7), moments="int8"),
        offload=OffloadConfig(
            optimizer=TierConfig(tier="nvme", ratio=0.5),
            gradients=TierConfig(tier="cpu"),
            nvme_io=NVMeIOConfig(parallelism=2),
            delay_after=3,
        ),
        activations=ActivationsConfig(
            checkpointing=RecomputeConfig(policy="selective", every=2), offload=ActivationOffloadConfig(tier="nvme")
        ),
        parallel=ParallelConfig(context=2),
        checkpoint=CheckpointConfig(background=True),
    ).config
    assert by_dictionary == by_class


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offload_alone_is_what_the_name_with_it_means(stage: Any, tier: Any) -> None:
    name = f"zero{stage}_{'offload' if tier == 'cpu' else 'nvme'}"
    short = ZeROStrategy(stage, offload=tier).config
    assert short == ZeROStrategy(**ALIASES[name]).config  # type: ignore[arg-type]
    assert short.offload.optimizer == TierConfig(tier=tier)
    assert short.offload.parameters == (TierConfig(tier=tier) if stage == 3 else None)
    assert short.offload.gradients is None


def test_short_forms_are_what_they_stand_for() -> None:
    short = ZeROStrategy(activations="full", checkpoint="file", parallel={"tensor": 2}, offload=None).config
    assert short.activations == ActivationsConfig(checkpointing=RecomputeConfig(policy="full"))
    assert short.checkpoint == CheckpointConfig(format="file")
    assert short.parallel == ParallelConfig(tensor=TensorConfig(size=2))
    assert (short.parallel.tp.size, short.parallel.pp.size) == (2, 1)
    assert short.offload == OffloadConfig()
    assert ParallelConfig(pipeline=4) == ParallelConfig(pipeline=PipelineConfig(size=4))


@pytest.mark.parametrize("name", CLASSES)
def test_a_group_survives_copies_and_cannot_change(name: str) -> None:
    required = {
        "ActivationOffloadConfig": {"tier": "cpu"},
        "RecomputeConfig": {"policy": "full"},
        "TierConfig": {"tier": "cpu"},
        "TensorConfig": {"size": 2},
        "PipelineConfig": {"size": 2},
    }
    group = getattr(ls_strategy, name)(**required.get(name, {}))
    for made in (copy.copy(group), copy.deepcopy(group), pickle.loads(pickle.dumps(group)), dataclasses.replace(group)):
        assert made == group
    assert copy.deepcopy(group).written == group.written == required.get(name, {})
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(group, dataclasses.fields(group)[0].name, 5)


def test_what_was_written_is_told_from_defaults() -> None:
    group = OffloadConfig(optimizer=None, nvme_path="/x")
    assert group.written == {"optimizer": None, "nvme_path": "/x"}
    assert group == OffloadConfig(nvme_path="/x")


def test_names_with_dots() -> None:
    assert nested({"stage": 1, "offload.optimizer": "cpu", "parallel.tensor.size": 2, "parallel.expert": 2}) == {
        "stage": 1, "offload": {"optimizer": "cpu"}, "parallel": {"tensor": {"size": 2}, "expert": 2},
    }  # fmt: skip
    both = nested({"stage": 3, "offload": "cpu", "offload.nvme_path": "/x"})
    assert ZeROStrategy(**both).config.offload == OffloadConfig(optimizer="cpu", parameters="cpu", nvme_path="/x")


def test_every_candidate_of_a_plan_can_be_written_as_it_says() -> None:
    for candidate in ladder(ranks=4, drive=True):
        assert ZeROStrategy(**candidate.arguments()).config == candidate.config(ZeROConfig())


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload.optimizer": "disk"}, r"Got offload\.optimizer='disk', but .* Set offload\.optimizer='cpu'"),
        ({"offload": "disk"}, r"Got offload='disk', but offload must be 'cpu' or 'nvme'"),
        ({"offload.optimizer": {"ratio": 0.5}}, r"Got offload\.optimizer=\{'ratio': 0\.5\}, but TierConfig needs tier"),
        ({"offload.optimizer": {"tier": "cpu", "ratio": 2}}, r"offload\.optimizer=.*in it: Got TierConfig\(ratio=2"),
        ({"offload.optimzer": "cpu"}, r"OffloadConfig has no option 'optimzer'. Did you mean 'optimizer'"),
        ({"sharding.prefetch_units": -1}, r"Got sharding\.prefetch_units=-1, .* Set sharding\.prefetch_units=0"),
        ({"sharding.rank_weights": []}, r"Got sharding\.rank_weights=\[\]"),
        ({"parallel.virtual_ranks_per_rank": [1, 3]}, r"without .*Set parallel\.virtual_ranks=4"),
        ({"parallel.virtual_ranks": 8, "parallel.virtual_ranks_per_rank": [1, 3]}, r"the sum must be"),
        ({"parallel.virtual_ranks": 3, "parallel.virtual_ranks_per_rank": [0, 3]}, r"virtual_ranks_per_rank"),
        ({"precision": "bf16-mixed"}, r"the numbers' precision is Trainer\(precision=\.\.\.\)"),
        ({"precision": 16}, r"the numbers' precision is Trainer\(precision=\.\.\.\)"),
        ({"precision.reduce_dtype": "bf16"}, r"Got precision\.reduce_dtype='bf16', but .*'fp32' or 'compute'"),
        ({"parallel": 2}, r"Got parallel=2, but parallel must be a ParallelConfig"),
        ({"parallel.tensor": "2"}, r"Got parallel\.tensor='2', but .*whole number.* Set parallel\.tensor=2"),
        ({"parallel.sequence": 2}, r"ParallelConfig has no option 'sequence'. Its options are tensor, context, expert"),
        ({"offload": {"ratio": 0.5}}, r"Did you mean optimizer=TierConfig\(tier=\.\.\., ratio=\.\.\.\)"),
        ({"parallel": {"size": 2}}, r"Did you mean tensor=TensorConfig\(size=\.\.\.\)"),
        ({"parallel.pipeline": {"size": 2, "micro_batches": 2, "micro_batch_size": 1}}, "Choose one of micro_batches"),
        ({"checkpoint": "folder"}, r"Got checkpoint='folder', but checkpoint must be 'auto', 'sharded' or 'file'"),
        ({"ofload": "cpu"}, "ZeROStrategy has no option 'ofload'. Did you mean 'offload'"),
        ({"optimizer": "cpu"}, r"Did you mean offload\.optimizer: offload=OffloadConfig\(optimizer=\.\.\.\)"),
        ({"tensor": 2}, r"Did you mean parallel\.tensor: parallel=ParallelConfig\(tensor=\.\.\.\)"),
        ({"nothing_of_the_kind": 2}, "Its options are stage, sharding, precision, offload"),
        # Across groups.
        ({"stage": 0, "offload": "cpu"}, r"Got offload with stage=0.*Use stage 1"),
        ({"stage": 2, "offload.parameters": "cpu"}, r"Got offload\.parameters with stage=2.*Use stage=3"),
        ({"stage": 3, "offload.optimizer": "cpu", "offload.delay_after": 1}, r"Got offload\.delay_after=1 with stage"),
        ({"stage": 0, "sharding.rank_weights": "auto"}, r"Got sharding\.rank_weights='auto' with stage=0"),
        ({"sharding.rank_weights": [1, 2], "parallel.expert": 2}, r"rank_weights=.* with parallel\.expert=2"),
        ({"activations": {"checkpointing": "full", "partitioning": True}}, r"with parallel\.tensor=1"),
        ({"parallel.pipeline": 2, "checkpoint": "file"}, r"Got checkpoint\.format='file' with parallel\.pipeline=2"),
        ({"stage": "auto", "offload": "nvme"}, 'Got offload or parallel with stage="auto"'),
        ({"stage": "auto", "parallel.context": 2}, 'Got offload or parallel with stage="auto"'),
        # Compiled code.
        ({"compile": "whole"}, "Got compile='whole', but compile must be"),
        ({"compile": {"region": "blocks"}}, "no option 'region'. Did you mean 'regions'"),
        ({"compile": {"regions": "blocks", "mode": "reduce-overhead"}}, "CUDA graphs.*'max-autotune-no-cudagraphs'"),
        ({"compile": {"regions": "model", "fullgraph": True}}, "graphs end at blocks.*compile='blocks'"),
        ({"compile": "model", "parallel.pipeline": 2}, "one by one. Set compile='blocks'"),
        ({"compile": "blocks", "activations": {"checkpointing": "full", "partitioning": True}, "parallel.tensor": 2},
         "partitioning=True, but compiled code chooses"),
        # Products in fp8.
        ({"precision.matmul": "fp8", "precision.frozen": "nf4"}, "quantized weights are rounded"),
        ({"precision.matmul": "fp8", "parallel.pipeline": 2}, "parallel.pipeline, but a scale.*rowwise_with_gw_hp"),
        ({"precision.matmul": "fp8", "parallel.context": 2}, "parallel.context, but a scale.*rowwise_with_gw_hp"),
        ({"precision.matmul": "fp8", "activations.tiling": "mlp"},
         "activations.tiling, but a scale.*rowwise_with_gw_hp"),
    ],
)  # fmt: skip
def test_a_wrong_value_names_its_group_and_the_cure(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ZeROStrategy(**nested({"stage": 3, **options}))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OffloadConfig(optimzer="cpu"), "no option 'optimzer'. Did you mean 'optimizer'"),  # type: ignore[call-arg]
        (lambda: OffloadConfig(tier="cpu", ratio=0.7), r"Did you mean optimizer=TierConfig\(tier=\.\.\.\)"),  # type: ignore[call-arg]
        (lambda: RecomputeConfig(classes=("Block",)), "Did you mean 'block_classes'"),  # type: ignore[call-arg]
        (lambda: TierConfig(ratio=0.5), r"Got TierConfig\(ratio=0\.5\), but tier is required. Add tier="),  # type: ignore[call-arg]
        (lambda: PipelineConfig(schedule="zbv"), "but size is required"),  # type: ignore[call-arg]
    ],
)
def test_a_group_refuses_names_that_it_does_not_have(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_what_can_be_compiled() -> None:
    assert ZeROStrategy(3, compile=None).config.compile == ZeROStrategy(3).config.compile
    assert ZeROStrategy(3, compile="blocks").config.compile.fullgraph is False
    for stage in (0, 1, 2):
        ZeROStrategy(stage, compile={"regions": "model", "mode": "reduce-overhead", "fullgraph": True})
    ZeROStrategy(3, compile={"mode": "reduce-overhead"})  # without regions nothing is compiled


# --- unknown names of the strategy ------------------------------------------------------------------------------------

FLAT = {
    "offload_optimizer": "offload.optimizer",
    "offload_param": "offload.parameters",
    "nvme_path": "offload.nvme_path",
    "tensor_parallel_size": "parallel.tensor.size",
    "pipeline_parallel_size": "parallel.pipeline.size",
}
"""Names as other packages have them, and the options that they mean."""


@pytest.mark.parametrize(
    ("flat", "option"),
    [
        *FLAT.items(),
        *((option.replace(".", "_"), option) for option in option_names()),
        ("optimizer_offload", "offload.optimizer"),
        ("activation_checkpointing", "activations.checkpointing"),
        ("context_parallel_size", "parallel.context"),
        ("expert_parallel_size", "parallel.expert"),
        ("micro_batches", "parallel.pipeline.micro_batches"),
        ("loss_scale_window", "precision.loss_scale.window"),
    ],
)
def test_a_flat_name_says_the_dotted_one(flat: str, option: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ZeROStrategy(**{flat: 2})  # type: ignore[arg-type]
    group = option.partition(".")[0]
    start = f"Got {flat}=2, but ZeROStrategy has no option {flat!r}. Did you mean {option}: {group}="
    assert str(caught.value).startswith(start)


@pytest.mark.parametrize(
    ("flat", "value", "expected"),
    [
        ("offload_optimizer", "cpu", {"offload.optimizer": "cpu"}),
        ("tensor_parallel_size", 2, {"parallel.tensor.size": 2}),
        ("micro_batches", 2, {"parallel.pipeline.size": 2, "parallel.pipeline.micro_batches": 2}),
        ("loss_scale_window", 7, {"precision.loss_scale": {"window": 7}}),
        ("checkpoint_format", "file", {"checkpoint.format": "file"}),
    ],
)
def test_the_argument_in_the_message_sets_the_option(flat: str, value: Any, expected: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Did you mean") as caught:
        ZeROStrategy(**{flat: value})  # type: ignore[arg-type]
    argument = str(caught.value).rpartition(": ")[2].removesuffix("?").replace("...", repr(value))
    made = eval(
        f"ZeROStrategy({argument})",
        vars(ls_strategy) | {n: getattr(ls_strategy, n) for n in CLASSES} | {"ZeROStrategy": ZeROStrategy},
    )
    assert made.config == ZeROStrategy(**nested(expected)).config


def test_every_option_of_a_group_has_a_default() -> None:
    for group, kind in GROUPS.items():
        for field in dataclasses.fields(kind):
            assert default_of(f"{group}.{field.name}") == getattr(kind(), field.name)
    assert default_of("parallel.tensor.plan") == "auto"


# --- YAML and the command line ----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def plain_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program"])


def cli(*words: str) -> Any:
    quiet = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    return LightningCLI(BoringModel, args=[*words], run=False, save_config_callback=None, trainer_defaults=quiet)


def build(*words: str) -> ZeROConfig:
    return cli(*words).trainer.strategy.config


def written(folder: Path, strategy: Any, **init_args: Any) -> str:
    if init_args:
        strategy = {"class_path": strategy, "init_args": init_args}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    return f"--config={path}"


OURS = "ls_strategy.ZeROStrategy"
STRATEGY = f"--trainer.strategy={OURS}"


@pytest.mark.wide
def test_yaml_takes_every_group(tmp_path: Path) -> None:
    assert build(written(tmp_path, OURS, **nested(FULL))) == ZeROStrategy(**nested(FULL)).config


@pytest.mark.wide
def test_the_printed_configuration_makes_the_same_strategy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [written(tmp_path, OURS, **nested(FULL)), "--trainer.strategy.sharding.prefetch_units=3", "--print_config"]
    with pytest.raises(SystemExit):
        cli(*words)
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert "class_path: ls_strategy.OffloadConfig" not in printed.read_text()
    assert yaml.safe_load(printed.read_text())["trainer"]["strategy"]["init_args"]["offload"]["gradients"] == "cpu"
    assert build(f"--config={printed}") == build(*words[:-1])


def test_help_describes_groups_and_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli(f"--trainer.strategy.help={OURS}")
    text = capsys.readouterr().out
    assert "--trainer.strategy.offload.help" in text
    assert "optimizer states, and at stage 3 the" in " ".join(text.split())


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["offload=nvme"], {"offload": "nvme"}),
        (["offload.optimizer=nvme"], {"offload.optimizer": "nvme"}),
        (["offload.nvme_io.parallelism=2"], {"offload.nvme_io": {"parallelism": 2}}),
        (["offload.optimizer.tier=cpu", "offload.optimizer.ratio=0.5"],
         {"offload.optimizer": {"tier": "cpu", "ratio": 0.5}}),
        (["activations=selective"], {"activations": "selective"}),
        (["activations.offload=cpu"], {"activations.offload": "cpu"}),
        (["parallel.tensor=2"], {"parallel.tensor": 2}),
        (["parallel.tensor.size=2", "parallel.tensor.sequence_parallel=true"],
         {"parallel.tensor": {"size": 2, "sequence_parallel": True}}),
        (["parallel.pipeline.size=2", "parallel.pipeline.schedule=zbv"],
         {"parallel.pipeline": {"size": 2, "schedule": "zbv"}}),
        (["checkpoint=file"], {"checkpoint": "file"}),
        (["checkpoint.background=true", "checkpoint.on_error=continue"],
         {"checkpoint": {"background": True, "on_error": "continue"}}),
        (["sharding.prefetch_units=2", "precision.moments=bf16"],
         {"sharding.prefetch_units": 2, "precision.moments": "bf16"}),
    ],
    ids=str,
)  # fmt: skip
def test_a_command_line_says_the_same(words: list[str], options: dict[str, Any]) -> None:
    assert build(STRATEGY, *(f"--trainer.strategy.{word}" for word in words)) == ZeROStrategy(**nested(options)).config


@pytest.mark.wide
def test_a_command_line_goes_on_from_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, OURS, offload={"optimizer": "cpu", "parameters": {"tier": "cpu", "ratio": 0.5}})
    offload = build(file, "--trainer.strategy.offload.optimizer", "nvme", "--trainer.strategy.stage", "3").offload
    assert offload == OffloadConfig(optimizer="nvme", parameters=TierConfig(tier="cpu", ratio=0.5))
    file = written(tmp_path, OURS, parallel={"pipeline": {"size": 2, "micro_batches": 4}})
    parallel = build(
        file, "--trainer.strategy.parallel.expert=2", "--trainer.strategy.parallel.pipeline.micro_batches=8"
    )
    assert parallel.parallel == ParallelConfig(expert=2, pipeline=PipelineConfig(size=2, micro_batches=8))


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "given", "words", "expected"),
    [
        ("zero3_nvme", {"nvme_path": "/x"}, [], OffloadConfig(optimizer="nvme", parameters="nvme", nvme_path="/x")),
        ("zero3_nvme", {}, ["nvme_path=/x"], OffloadConfig(optimizer="nvme", parameters="nvme", nvme_path="/x")),
        ("zero3_nvme", {}, ["optimizer.ratio=0.5"],
         OffloadConfig(optimizer=TierConfig(tier="nvme", ratio=0.5), parameters="nvme")),
        ("zero3_offload", {}, ["optimizer=nvme"], OffloadConfig(optimizer="nvme", parameters="cpu")),
        ("zero3_offload_param", {"step_on": "cpu"}, [], OffloadConfig(parameters="cpu", step_on="cpu")),
        ("zero2_offload", {}, ["gradients=nvme"], OffloadConfig(optimizer="cpu", gradients="nvme")),
    ],
    ids=str,
)  # fmt: skip
def test_a_name_keeps_its_tiers_under_other_options(
    tmp_path: Path, name: str, given: dict[str, Any], words: list[str], expected: OffloadConfig
) -> None:
    strategy = {"class_path": name, "init_args": {"offload": given}} if given else name
    config = build(written(tmp_path, strategy), *(f"--trainer.strategy.offload.{word}" for word in words))
    assert config == ZeROStrategy(ALIASES[name]["stage"], offload=expected).config  # type: ignore[arg-type]


def test_a_share_in_a_file_names_its_tier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build(written(tmp_path, "zero3_nvme", offload={"optimizer": {"ratio": 0.5}}))
    assert "the following arguments are required: tier" in capsys.readouterr().err


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("words", "required"),
    [
        (["activations.offload=nvme", "activations.offload.min_bytes=0"], "tier"),
        (["activations.checkpointing=selective", "activations.checkpointing.every=2"], "policy"),
        (["activations=selective", "activations.checkpointing.every=2"], "policy"),
    ],
    ids=str,
)
def test_a_further_option_does_not_turn_a_short_form_into_a_default(
    words: list[str], required: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A parser forgets the short form, so that ``nvme`` would become ``cpu``, and ``selective`` ``full``."""
    with pytest.raises(SystemExit):
        build(STRATEGY, *(f"--trainer.strategy.{word}" for word in words))
    assert f"the following arguments are required: {required}" in capsys.readouterr().err


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("offload.optimizer=disk", r"Got offload\.optimizer='disk', but .* Set offload\.optimizer='cpu'"),
        ("offload.optimzer=cpu", "no option 'optimzer'. Did you mean 'optimizer'"),
        ("sharding.prefetch_units=-1", r"Got sharding\.prefetch_units=-1"),
        ("sharding.prefetch_units=many", r"Got sharding\.prefetch_units='many'"),
        (
            "parallel.tensor.sequence_parallel=true",
            r"parallel\.tensor\.sequence_parallel with parallel\.tensor\.size=1",
        ),
        ("checkpoint.format=folder", r"Got checkpoint\.format='folder'"),
    ],
)
def test_a_wrong_value_on_the_command_line(word: str, message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):  # jsonargparse puts it into an error of its own
        build(STRATEGY, f"--trainer.strategy.{word}")


@pytest.mark.sample(1)
@pytest.mark.parametrize("where", ["file", "command line"])
@pytest.mark.parametrize("flat", FLAT)
def test_a_flat_name_in_yaml_or_on_the_command_line_says_the_dotted_one(
    tmp_path: Path, flat: str, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [written(tmp_path, OURS, **{flat: 2})] if where == "file" else [STRATEGY, f"--trainer.strategy.{flat}=2"]
    with pytest.raises(SystemExit):
        cli(*words)
    text = f"error: Got {flat}=2, but ZeROStrategy has no option {flat!r}. Did you mean {FLAT[flat]}: "
    assert text in capsys.readouterr().err
