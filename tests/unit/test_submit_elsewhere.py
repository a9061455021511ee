"""The files that ``ls-strategy submit --to kubeflow|skypilot|torchrun`` writes.

They validate against published schemas, which are in ``published`` with their source and licence, and the words of the
command survive every quoting on the way.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ls_strategy.errors import ConfigError
from tests.processes import output_of
from tests.unit.test_submit import cli

jsonschema = pytest.importorskip("jsonschema")

PUBLISHED = Path(__file__).parent / "published"
ODD = [
    "--data.name=a b", "--data.quote=it's \"so\"", "--data.lines=one\ntwo\n", "--data.ref=$(HOME) $$ ${HOME} `id` $",
    "--data.yaml={a: [1, '#x']}", "--data.text=- : # é \\ \t.", "--data.empty=", "--data.trailing=x ",
]  # fmt: skip
"""Words that shells, YAML or Kubernetes would change."""

CASES: dict[str, list[str]] = {
    "plain": [],
    "nodes": ["--nodes=4", "--tasks-per-node=2", "--cpus-per-task=6"],
    "gpus": ["--nodes=2", "--gpus-per-node=8", "--env", "NCCL_DEBUG=INFO", "--env", "ODD=a: 'b'\n$(c) #d"],
    "setup": ["--setup", "pip install -e '.[all]'", "--setup", 'echo "$HOME # x"', "--signal-lead-s=600"],
    "odd words": ["--", *ODD],
}
MORE = {
    "kubeflow": ["--image=registry/me/train:1", "--storage=claim:/data", "--runtime=torch-distributed"],
    "skypilot": ["--image=registry/me/train:1", "--storage=s3://bucket/x:/data", "--spot"],
}


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A folder with a program, ``recipes.toy``, and a config; the current one."""
    configs = tmp_path / "recipes" / "toy" / "configs"
    configs.mkdir(parents=True)
    (configs.parent / "__main__.py").touch()
    (configs / "base.yaml").write_text("trainer: {default_root_dir: null}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


BASE = "recipes/toy/configs/base.yaml"


def text_of(capsys, to: str, *words: str) -> str:
    assert cli(BASE, "--to", to, "--dry-run", *words) == 0
    return capsys.readouterr().out


def words_for(to: str, case: str) -> list[str]:
    words = list(CASES[case])
    if to == "skypilot" and case == "gpus":
        words += ["--gpu-type=H100"]
    if to == "torchrun" and case in ("nodes", "gpus"):
        words += ["--endpoint=node0:29400"]
    return words


def schema(name: str) -> Any:
    loaded = json.loads((PUBLISHED / name).read_text())
    assert "Apache License 2.0" in loaded["$comment"]
    return jsonschema.Draft202012Validator(loaded)


def validate_task(task: dict[str, Any]) -> None:
    schema("skypilot_task.json").validate(task)
    schema("skypilot_resources.json").validate(task["resources"])
    for mount in task.get("file_mounts", {}).values():
        schema("skypilot_storage.json").validate(mount)


def expanded(text: str) -> str:
    """What Kubernetes makes of a word of ``command`` or the value of a variable."""
    return re.sub(r"\$(\$|\(\w+\))", lambda m: "$" if m[1] == "$" else "EXPANDED", text)


def run_in_bash(script: str, folder: Path, *words: str, **variables: str) -> list[list[str]]:
    """Run a script whose ``python`` notes its words; the words of every call."""
    fake = folder / "bin" / "python"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text(f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n")
    fake.chmod(0o755)
    environment = {"PATH": f"{fake.parent}:{os.environ['PATH']}", "HOME": str(folder), **variables}
    printed = output_of(["bash", "-c", script, *words], env=environment, cwd=folder)
    return [json.loads(line) for line in printed.splitlines() if line.startswith("[")]


# --- Kubeflow --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [[], MORE["kubeflow"]], ids=["bare", "with storage"])
@pytest.mark.parametrize("case", CASES)
def test_a_train_job_validates(program, capsys, case, more):
    job = yaml.safe_load(text_of(capsys, "kubeflow", *more, *words_for("kubeflow", case)))
    schema("trainjob.json").validate(job)
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job["metadata"]["name"] == "toy-base"
    for value in job["spec"]["trainer"]["env"]:
        assert isinstance(value["value"], str)


@pytest.mark.parametrize(
    "wrong", [{"spec": {"trainer": {"numNodes": "2"}}}, {"spec": {"trainr": {}}}, {"spec": {"trainer": {"cmd": []}}}]
)
def test_the_schema_of_train_jobs_finds_mistakes(wrong):
    job = {"spec": {"runtimeRef": {"name": "x"}}}
    schema("trainjob.json").validate(job)
    with pytest.raises(jsonschema.ValidationError):
        schema("trainjob.json").validate({"spec": {**job["spec"], **wrong["spec"]}})


def test_a_train_job_has_the_geometry_and_the_time_to_save(program, capsys):
    words = ["--nodes=2", "--gpus-per-node=8", "--cpus-per-task=4", "--signal-lead-s=300", *MORE["kubeflow"]]
    spec = yaml.safe_load(text_of(capsys, "kubeflow", *words))["spec"]
    trainer = spec["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["image"]) == (2, 8, "registry/me/train:1")
    assert trainer["resourcesPerNode"]["limits"] == {"cpu": "32", "nvidia.com/gpu": "8"}
    assert trainer["command"][:6] == ["python", "-m", "torch.distributed.run", "-m", "recipes.toy", "fit"]
    for option in ("num_nodes=2", "devices=8", "accelerator=gpu", "default_root_dir=/data/toy-base"):
        assert f"--trainer.{option}" in trainer["command"]
    assert {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": "300"} in trainer["env"]
    (patch,) = spec["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 300, "torchrun ends its ranks, not Kubernetes"
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "claim"
    assert pod["containers"][0]["volumeMounts"] == [{"name": "storage", "mountPath": "/data"}]


def test_torchs_reserved_variables_are_left_to_kubeflow(program, capsys):
    job = yaml.safe_load(text_of(capsys, "kubeflow", "--nodes=2"))
    assert not [v["name"] for v in job["spec"]["trainer"]["env"] if v["name"].startswith("PET_")]


def test_words_reach_a_container_unchanged(program, capsys):
    job = yaml.safe_load(text_of(capsys, "kubeflow", "--env", "ODD=$(x) $$\n'\"", "--", *ODD))
    words = [expanded(word) for word in job["spec"]["trainer"]["command"]]
    assert [word for word in words if word.startswith("--data")] == ODD
    assert expanded(job["spec"]["trainer"]["env"][-1]["value"]) == "$(x) $$\n'\""


def test_setup_runs_before_the_program_in_a_container(program, capsys):
    job = yaml.safe_load(text_of(capsys, "kubeflow", "--setup", 'export MARK="it\'s $HOME"', "--", *ODD))
    bash, option, script, *words = [expanded(word) for word in job["spec"]["trainer"]["command"]]
    assert (bash, option) == ("bash", "-c")
    ((seen, variables),) = run_in_bash(script, program, *words)
    assert [word for word in seen if word.startswith("--data")] == ODD
    assert variables["MARK"] == f"it's {program}"


@pytest.mark.parametrize("name", ["Upper", "under_score", "-x", "1st", "x" * 50, "a.b"])
def test_a_name_that_kubernetes_refuses_is_refused(program, name):
    with pytest.raises(ConfigError, match="--name"):
        cli(BASE, "--to=kubeflow", "--dry-run", "--name", name) if name[0] != "-" else cli(
            BASE, "--to=kubeflow", "--dry-run", f"--name={name}"
        )


# --- SkyPilot --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [[], MORE["skypilot"]], ids=["bare", "with storage"])
@pytest.mark.parametrize("case", CASES)
def test_a_task_of_skypilot_validates(program, capsys, case, more):
    validate_task(yaml.safe_load(text_of(capsys, "skypilot", *more, *words_for("skypilot", case))))


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_nodes": "2"},
        {"command": "x"},
        {"resources": {"gpus": 1}},
        {"config": {"hooks": [{"run": "x", "events": ["never"]}]}},
        {"file_mounts": {"/data": {"source": 1}}},
    ],
)
def test_the_schemas_of_skypilot_find_mistakes(wrong):
    with pytest.raises(jsonschema.ValidationError):
        validate_task({"resources": {}, **wrong})


def test_a_task_of_skypilot_has_the_geometry_and_the_time_to_save(program, capsys):
    words = ["--nodes=2", "--gpus-per-node=8", "--gpu-type=H100", "--signal-lead-s=90", *MORE["skypilot"]]
    task = yaml.safe_load(text_of(capsys, "skypilot", *words))
    assert task["num_nodes"] == 2
    assert task["resources"]["accelerators"] == {"H100": 8}
    assert task["resources"]["use_spot"] is True
    assert task["file_mounts"] == {"/data": {"source": "s3://bucket/x", "mode": "MOUNT"}}
    (hook,) = task["config"]["hooks"]
    assert (hook["events"], hook["timeout"]) == (["preemption"], 90)
    assert task["envs"]["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "90"


def test_words_reach_a_machine_of_skypilot_unchanged(program, capsys):
    task = yaml.safe_load(text_of(capsys, "skypilot", "--nodes=2", "--tasks-per-node=3", "--", *ODD))
    node = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1"}
    ((words, _),) = run_in_bash(task["run"], program, **node)
    Path("/tmp/ls-strategy-toy-base.pid").unlink()  # the script notes its number there
    assert [word for word in words if word.startswith("--data")] == ODD
    launcher = words[: words.index("recipes.toy") - 1]
    assert launcher[:2] == ["-m", "torch.distributed.run"]
    assert {"--nnodes=2", "--nproc-per-node=3", "--node-rank=1", "--master-addr=10.0.0.1"} <= set(launcher)


@pytest.mark.wide
def test_the_hook_of_skypilot_ends_the_run_and_waits_for_it(program, capsys):
    """The hook sends SIGTERM to the process that replaced the script, and returns when that has ended."""
    task = yaml.safe_load(text_of(capsys, "skypilot", "--name", f"hook-{os.getpid()}"))
    fake = program / "bin" / "python"
    fake.parent.mkdir()
    fake.write_text(
        f"#!{sys.executable}\nimport pathlib, signal, sys, time\n"
        "def end(*_):\n    time.sleep(0.5)\n    pathlib.Path('saved').touch()\n    sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, end)\npathlib.Path('ready').touch()\ntime.sleep(60)\n"
    )
    fake.chmod(0o755)
    environment = {"PATH": f"{fake.parent}:{os.environ['PATH']}", "SKYPILOT_NODE_IPS": "a", "SKYPILOT_NODE_RANK": "0"}
    job = subprocess.Popen(["bash", "-c", task["run"]], cwd=program, env=environment)
    try:
        for _ in range(200):
            if (program / "ready").exists():
                break
            with_timeout(job, 0.1)
        hook = subprocess.Popen(["bash", "-c", task["config"]["hooks"][0]["run"]], cwd=program)
        assert job.wait(30) == 1
        assert hook.wait(30) == 0
        assert (program / "saved").exists()
    finally:
        job.kill()
        Path(f"/tmp/ls-strategy-hook-{os.getpid()}.pid").unlink(missing_ok=True)


def with_timeout(job: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        job.wait(seconds)
    except subprocess.TimeoutExpired:
        return
    raise AssertionError("it has ended")


# --- torchrun --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_words_reach_torchrun_unchanged(program, capsys, case):
    text = text_of(capsys, "torchrun", *words_for("torchrun", case)).replace(sys.executable, "python")
    setup = [line for line in CASES[case] if line.startswith("pip")]
    for line in setup:
        text = text.replace(line, "true")
    ((words, variables),) = run_in_bash(text, program)
    assert [word for word in words if word.startswith("--data")] == (ODD if case == "odd words" else [])
    assert words[:2] == ["-m", "torch.distributed.run"]
    assert variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == ("600" if case == "setup" else "120")
    if case == "gpus":
        assert variables["ODD"] == "a: 'b'\n$(c) #d"


def test_nodes_of_torchrun_meet_at_the_endpoint(program, capsys):
    text = text_of(capsys, "torchrun", "--nodes=2", "--tasks-per-node=4", "--endpoint=node0:1234")
    ((words, _),) = run_in_bash(text.replace(sys.executable, "python"), program)
    assert {"--nnodes=2", "--nproc-per-node=4", "--rdzv-endpoint=node0:1234", "--rdzv-id=toy-base"} <= set(words)
    assert "--standalone" not in words


def test_an_elastic_run_of_torchrun_takes_fewer_nodes(program, capsys):
    virtual = "--trainer.strategy.init_args.parallel.virtual_ranks=8"
    text = text_of(
        capsys, "torchrun", "--nodes=4", "--tasks-per-node=2", "--elastic=2", "--endpoint=n:1", "--", virtual
    )
    ((words, variables),) = run_in_bash(text.replace(sys.executable, "python"), program)
    assert {"--nnodes=2:4", "--max-restarts=20", virtual} <= set(words)
    assert "--trainer.callbacks+=ls_strategy.ElasticTraining" in words
    assert variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_torchrun_knows_the_variable_for_the_time_to_save(monkeypatch):
    """It reads the variable when its module is imported."""
    from dataclasses import fields

    from torch.distributed.launcher import api

    if "shutdown_timeout" not in {each.name for each in fields(api.LaunchConfig)}:
        pytest.skip("this torch gives ranks 30 s")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "321")
    again = importlib.util.module_from_spec(api.__spec__)
    api.__spec__.loader.exec_module(again)
    assert again.LaunchConfig(1, 1, 1).shutdown_timeout == 321


# --- all -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to=kubeflow", "--partition=x"], "--partition with --to kubeflow"),
        (["--to=torchrun", "--array=0-3"], "--array with --to torchrun"),
        (["--to=torchrun", "--image=x"], "for --to kubeflow and skypilot"),
        (["--to=slurm", "--spot"], "--spot with --to slurm"),
        (["--to=kubeflow", "--elastic"], "restarts a job on as many nodes"),
        (["--to=skypilot", "--gpus-per-node=8"], "--gpu-type"),
        (["--to=skypilot", "--gpu-type=H100"], "Add --gpus-per-node"),
        (["--to=torchrun", "--nodes=2"], "--endpoint HOST"),
        (["--to=torchrun", "--nodes=2", "--elastic=3", "--endpoint=a:1"], "from 1 to 2"),
        (["--to=torchrun", "--nodes=2", "--elastic", "--endpoint=a:1"], "virtual_ranks=2"),
        (["--to=kubeflow", "--storage=claim"], "SOURCE:/path"),
        (["--to=kubeflow", "--env", "1x=2"], "--env 1x"),
        (["--to=skypilot", "--", "--trainer.num_nodes=4"], "--nodes 4"),
        (["--to=torchrun", "--name=a/b"], "it is also a file name"),
    ],
)
def test_what_a_target_cannot_do_is_refused_with_the_cure(program, words, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        cli(BASE, "--dry-run", *words)


@pytest.mark.parametrize("to", ["kubeflow", "skypilot"])
def test_files_that_other_machines_do_not_have_are_refused(program, to):
    with pytest.raises(ConfigError, match="Give a path inside it"):
        cli(str(program / BASE), "--to", to, "--module=recipes.toy", "--dry-run")


def test_a_job_for_kubernetes_without_an_image_is_noted(program, capsys):
    cli(BASE, "--to=kubeflow", "--storage=claim:/data", "--dry-run")
    said = capsys.readouterr()
    assert "note: no --image is given, so Kubernetes uses the image of the runtime." in said.err
    assert "image:" not in said.out
    cli(BASE, "--to=skypilot", "--storage=s3://bucket/x:/data", "--dry-run")  # the machine's own Python
    assert "--image" not in capsys.readouterr().err


def test_checkpoints_that_would_be_lost_are_noted(program, capsys):
    to = ("--to=kubeflow", "--image=x", "--dry-run")
    cli(BASE, *to)
    assert "lost with it" in capsys.readouterr().err
    cli(BASE, *to, "--storage=claim:/data")
    assert capsys.readouterr().err == ""
    cli(BASE, *to, "--storage=claim:/data", "--", "--trainer.default_root_dir=/tmp/x")
    said = capsys.readouterr()
    assert "not in --storage" in said.err
    assert "/data/toy-base" not in said.out


@pytest.mark.parametrize(("to", "start"), [("kubeflow", "kubectl apply -f"), ("skypilot", "sky jobs launch")])
def test_the_file_is_written_and_the_next_command_printed(program, capsys, to, start):
    assert cli(BASE, "--to", to, "--name=my-run") == 0
    (path,) = (program / to).iterdir()
    assert f"{start} {to}/{path.name}" in capsys.readouterr().out
    assert yaml.safe_load(path.read_text())
