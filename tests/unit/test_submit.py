"""The batch script that ``ls-strategy submit`` writes, and what it hands to sbatch."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from ls_strategy.errors import ConfigError, StateError
from ls_strategy.extras.cli import job_program, submit
from ls_strategy.extras.slurm.script import Job, render
from tests.processes import output_of

CONFIG = """
trainer:
  logger:
    class_path: lightning.pytorch.loggers.TensorBoardLogger
    init_args: {save_dir: curves}
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A folder with a program, ``recipes.toy``, and two configs; the current one."""
    configs = tmp_path / "recipes" / "toy" / "configs"
    configs.mkdir(parents=True)
    (configs.parent / "__main__.py").touch()
    (configs / "base.yaml").write_text(CONFIG)
    (configs / "big.yaml").write_text("trainer: {precision: bf16-true}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cli(*words: str) -> int:
    parser = argparse.ArgumentParser()
    submit.add(parser.add_subparsers(dest="subcommand", required=True))
    args = parser.parse_args(["submit", *words])
    return args.run(args)


BASE, BIG = "recipes/toy/configs/base.yaml", "recipes/toy/configs/big.yaml"


def directives(text: str) -> dict[str, str]:
    found = [line.removeprefix("#SBATCH --").partition("=") for line in text.splitlines() if line.startswith("#SBATCH")]
    return {name: value for name, _, value in found}


def command(text: str) -> list[str]:
    return shlex.split(text[text.index("exec srun") :].replace("\\\n", " "))


def bash_accepts(text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_geometry_of_the_job_is_the_trainers(program, capsys):
    assert cli(BASE, BIG, "--nodes=4", "--gpus-per-node=8", "--cpus-per-task=6", "--time=1-00:00:00", "--account=lab",
               "--qos=long", "--constraint=ib&a100", "--mail-user=me@lab.org", "--dry-run") == 0  # fmt: skip
    text = capsys.readouterr().out
    bash_accepts(text)
    expected = {
        "job-name": "toy-big", "nodes": "4", "ntasks-per-node": "8", "gpus-per-node": "8", "cpus-per-task": "6",
        "time": "1-00:00:00", "account": "lab", "qos": "long", "constraint": "ib&a100", "mail-user": "me@lab.org",
        "signal": "SIGUSR1@120", "requeue": "", "open-mode": "append",
    }  # fmt: skip
    assert directives(text).items() >= expected.items()
    words = command(text)
    assert "--kill-on-bad-exit=1" in words
    assert words[words.index("-m") : words.index("-m") + 5] == [
        "-m", "recipes.toy", "fit", f"--config={BASE}", f"--config={BIG}",
    ]  # fmt: skip
    assert words[-5:] == [
        "--trainer.callbacks+=ls_strategy.PreemptionHandler",
        "--trainer.accelerator=gpu",
        "--trainer.num_nodes=$SLURM_JOB_NUM_NODES",
        "--trainer.devices=$SLURM_NTASKS_PER_NODE",
        "--trainer.logger.init_args.version=job_$job",
    ]
    assert not (program / "slurm").exists(), "a dry run writes nothing"


def test_on_the_cpu_nothing_is_said_that_was_not_given(program, capsys):
    cli(BASE, "--tasks-per-node=2", "--dry-run")
    named = directives(capsys.readouterr().out)
    assert named["ntasks-per-node"] == "2"
    assert named.keys().isdisjoint({"gpus-per-node", "cpus-per-task", "time", "partition", "array", "mail-user"})


@pytest.mark.parametrize(
    ("accelerator", "words", "expected"),
    [
        ("cpu", ["--gpus-per-node=2"], ["--trainer.accelerator=gpu"]),
        ("auto", ["--gpus-per-node=2"], ["--trainer.accelerator=gpu"]),
        ("cuda", ["--gpus-per-node=2"], []),
        ("cpu", ["--tasks-per-node=2"], []),
        ("gpu", ["--", "--trainer.accelerator=gpu"], ["--trainer.accelerator=gpu"]),
    ],
)
def test_a_job_with_gpus_trains_on_them(program, capsys, accelerator, words, expected):
    Path(BASE).write_text(f"trainer: {{accelerator: {accelerator}}}")
    cli(BASE, "--dry-run", *words)
    assert [w for w in command(capsys.readouterr().out) if "accelerator" in w] == expected


@pytest.mark.parametrize(
    ("config", "words", "message"),
    [
        ("{}", ["--gpus-per-node=2", "--", "--trainer.accelerator=cpu"], "GPUs would be idle"),
        ("{}", ["--gpus-per-node=2", "--", "--trainer.accelerator", "cpu"], "GPUs would be idle"),
        ("{accelerator: gpu, devices: auto}", [], "Set --gpus-per-node N"),
        ("{}", ["--nodes=2", "--", "--trainer.num_nodes=4"], "Set --nodes 4"),
        ("{devices: 2}", ["--tasks-per-node=2", "--", "--trainer.devices=8"], "Set --tasks-per-node 8"),
    ],
)
def test_a_job_that_contradicts_the_program_is_refused(program, config, words, message):
    Path(BASE).write_text(f"trainer: {config}")
    with pytest.raises(ConfigError, match=message):
        cli(BASE, "--dry-run", *words)


def test_numbers_of_the_files_give_way_to_the_jobs_and_that_is_said(program, capsys):
    Path(BASE).write_text("trainer: {devices: 8, num_nodes: 1}")
    cli(BASE, "--dry-run", "--nodes=1", "--tasks-per-node=2")
    said = capsys.readouterr()
    assert "trainer.devices=8; the Trainer uses the job's --tasks-per-node 2" in said.err
    assert "num_nodes" not in said.err
    bash_accepts(said.out)


def test_options_of_the_program_follow_two_dashes(program, capsys):
    cli(BASE, "--dry-run", "--nodes", "2", "--", "--trainer.max_steps", "6", "--data.name=a b", "--config=x.yaml")
    words = command(capsys.readouterr().out)
    assert words[words.index("--trainer.max_steps") + 1] == "6"
    assert {"--data.name=a b", "--config=x.yaml"} <= set(words)


def test_the_handler_is_added_once(program, capsys):
    Path(BIG).write_text("trainer: {callbacks: [ls_strategy.PreemptionHandler]}\n")
    cli(BASE, BIG, "--dry-run")
    assert "PreemptionHandler" not in capsys.readouterr().out
    cli(BASE, "--dry-run", "--", "--trainer.callbacks+=PreemptionHandler")
    assert capsys.readouterr().out.count("PreemptionHandler") == 1


@pytest.mark.parametrize(
    ("config", "extra", "expected"),
    [
        ("trainer: {logger: {class_path: lightning.pytorch.loggers.CSVLogger}}", [], True),
        ("trainer: {logger: {class_path: TensorBoardLogger, init_args: {version: 3}}}", [], False),
        ("trainer: {logger: {class_path: lightning.pytorch.loggers.WandbLogger}}", [], False),
        ("trainer: {logger: false}", [], False),
        ("seed_everything: 1", [], False),
        ("trainer: {logger: {class_path: CSVLogger}}", ["--trainer.logger=false"], False),
        ("trainer: {logger: {class_path: CSVLogger}}", ["--trainer.logger.init_args.save_dir=x"], True),
    ],
)
def test_the_log_folder_is_named_by_the_job_where_the_logger_can(program, config, extra, expected):
    Path(BASE).write_text(config)
    assert bool(job_program.version_option(job_program.trainer_options([Path(BASE)]), extra)) is expected


def test_variables_and_setup_lines(program, capsys):
    cli(BASE, "--dry-run", "--env", "A=it's", "--env=MASTER_PORT=4000", "--setup", "module load cuda",
        "--setup=ulimit -n")  # fmt: skip
    text = capsys.readouterr().out
    bash_accepts(text)
    lines = text.splitlines()
    assert lines.index("module load cuda") < lines.index("ulimit -n") < lines.index("export MASTER_ADDR MASTER_PORT")
    assert lines.index("export MASTER_ADDR MASTER_PORT") < lines.index("export MASTER_PORT=4000"), "the user's wins"
    assert "export A='it'\"'\"'s'" in lines


def run_script(program: Path, text: str, **variables: str) -> str:
    """What the script would start, with commands that only say how they were called."""
    binaries = program / "bin"
    binaries.mkdir(exist_ok=True)
    for name, body in {"srun": 'printf "%s\\n" "$@"; env', "scontrol": "echo node1; sleep 0.1; echo node2"}.items():
        (binaries / name).write_text(f"#!/bin/sh\n{body}\n")
        (binaries / name).chmod(0o755)
    environ = {
        **os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", "PYTHONPATH": str(Path(submit.__file__).parents[2]),
        "SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NAME": "toy", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NTASKS_PER_NODE": "4", "MASTER_PORT": "1", **variables,
    }  # fmt: skip
    return output_of(["bash"], input=text, env=environ, timeout=60)


def test_the_script_runs(program, capsys):
    cli(BASE, "--dry-run", "--cpus-per-task=3")
    text = capsys.readouterr().out
    said = run_script(program, text, SLURM_CPUS_PER_TASK="3").splitlines()
    assert {"--output=slurm/toy-9/rank-%t.log", "--trainer.devices=4", "--trainer.num_nodes=2"} <= set(said)
    assert {"OMP_NUM_THREADS=3", "SRUN_CPUS_PER_TASK=3", "MASTER_ADDR=node1", "PYTHONFAULTHANDLER=1"} <= set(said)
    (port,) = (line.removeprefix("MASTER_PORT=") for line in said if line.startswith("MASTER_PORT="))
    assert 20_000 <= int(port) < 32_000, "free, and not what the shell that submitted it had"
    assert (program / "slurm" / "toy-9").is_dir()


def test_tasks_of_an_array_have_their_own_folders(program, capsys):
    cli(BASE, "--dry-run", "--array=0-3%2")
    text = capsys.readouterr().out
    assert directives(text)["array"] == "0-3%2"
    assert directives(text)["output"] == "slurm/%x-%A_%a.log"
    said = run_script(program, text, SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID="2")
    assert "--output=slurm/toy-5_2/rank-%t.log" in said
    assert "--trainer.logger.init_args.version=job_5_2" in said


VIRTUAL = "--trainer.strategy.init_args.parallel.virtual_ranks=4"


def test_an_elastic_job_starts_agents_that_may_lose_nodes(program, capsys):
    cli(BASE, "--dry-run", "--nodes=2", "--tasks-per-node=2", "--cpus-per-task=3", "--elastic", "--", VIRTUAL)
    text = capsys.readouterr().out
    bash_accepts(text)
    found = directives(text)
    assert (found["ntasks-per-node"], found["cpus-per-task"], found["no-kill"]) == ("1", "6", "")
    assert "exec srun" not in text
    words = shlex.split(text[text.index("srun --no-kill") :].replace("\\\n", " ").split("|| status")[0])
    for word in ("--nnodes=1:2", "--nproc-per-node=2", "--rdzv-id=$job", "--trainer.devices=2", VIRTUAL):
        assert word in words
    assert f"--trainer.callbacks+={job_program.ELASTIC}" in words
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 OMP_NUM_THREADS=3" in text


def test_an_elastic_job_that_would_train_on_other_batches_is_refused(program, capsys):
    with pytest.raises(ConfigError, match=r"virtual_ranks=4`, or set --elastic 2"):
        cli(BASE, "--dry-run", "--nodes=2", "--tasks-per-node=2", "--elastic", "1")
    with pytest.raises(ConfigError, match="the fewest nodes to continue on, from 1 to 2"):
        cli(BASE, "--dry-run", "--nodes=2", "--elastic", "3")
    cli(BASE, "--dry-run", "--nodes=2", "--elastic", "2")
    assert "--nnodes=2:2" in capsys.readouterr().out


def fake_sbatch(program: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    (program / "sbatch").write_text(f"#!/bin/sh\n{body}\n")
    (program / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{program}:{os.environ['PATH']}")


def test_the_script_is_submitted_and_the_user_told_where_to_look(program, monkeypatch, capsys):
    fake_sbatch(program, monkeypatch, 'echo "$@" > called; echo "41;cluster"')
    assert cli(BASE, "--name=run1") == 0
    (script,) = (program / "slurm").glob("run1-*.sbatch")
    assert (program / "called").read_text().split() == ["--parsable", str(script.relative_to(program))]
    said = capsys.readouterr().out
    for part in ("job 41", "squeue -j 41", "slurm/run1-41/rank-0.log", "tensorboard --logdir curves", "scancel 41"):
        assert part in said


@pytest.mark.parametrize("to", ["slurm", "torchrun"])
def test_a_script_of_another_job_is_not_replaced(program, monkeypatch, to):
    """Jobs of one name may be submitted in one second, and the first may still be waiting to be read."""
    fake_sbatch(program, monkeypatch, "echo 41")
    monkeypatch.setattr(submit.time, "strftime", lambda _: "20260101-000000")
    assert cli(BASE, "--name=run1", "--to", to, "--", "--trainer.max_steps=1") == 0
    (script,) = (program / to).glob("run1-20260101-000000.*")
    before = script.read_text()
    with pytest.raises(StateError, match=r"run1-20260101-000000.* exists: another job of this name was made in this"):
        cli(BASE, "--name=run1", "--to", to, "--", "--trainer.max_steps=2")
    assert script.read_text() == before


@pytest.mark.parametrize("words", ["invalid partition", "login node"], ids=["refuses", "is missing"])
def test_an_sbatch_that_refuses_or_is_missing(program, monkeypatch, words):
    if words == "login node":
        monkeypatch.setenv("PATH", str(program))
    else:
        fake_sbatch(program, monkeypatch, "echo invalid partition >&2; exit 1")
    with pytest.raises(StateError, match=words):
        cli(BASE)
    assert words != "login node" or not (program / "slurm").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["missing.yaml"], [BASE, "--nodes=0"], [BASE, "--tasks-per-node=-1"], [BASE, "--name=a b"],
        [BASE, "--time=1 day"], [BASE, "--env=A"], [BASE, "--env=1A=b"], [BASE, "--signal-lead-s=0"],
        [BASE, "--gpus-per-node=-1"], [BASE, "--partition=a;b"],
    ],
)  # fmt: skip
def test_wrong_options_are_refused(program, words, capsys):
    with pytest.raises((ConfigError, SystemExit)) as ended:  # the second: argparse has said why
        cli(*words, "--dry-run")
    assert isinstance(ended.value, ConfigError) or "it must be a whole number" in capsys.readouterr().err


def test_a_module_that_cannot_be_inferred_has_to_be_named(program, capsys):
    Path("alone.yaml").touch()
    with pytest.raises(ConfigError, match="--module"):
        cli("alone.yaml", "--dry-run")
    assert cli("alone.yaml", "--module=some.thing", "--dry-run") == 0
    assert "-m some.thing fit" in capsys.readouterr().out
    assert job_program.infer_module(Path(BASE).absolute()) == "recipes.toy"


def test_a_config_that_is_no_yaml(program):
    Path(BASE).write_text("a: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        cli(BASE, "--dry-run")


def test_constraints_may_have_their_operators():
    text = render(Job(name="a", command=["true"], constraint="a100&ib|[x*2]"))
    assert directives(text)["constraint"] == "a100&ib|[x*2]"
