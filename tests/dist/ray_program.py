"""Train functions for Ray, the same on a cluster and in Ray's local mode, and a driver that runs them on a cluster."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests import models
from tests.models import BATCH, LENGTH, VOCABULARY, Case, Net

CASES: dict[str, Case] = {
    "zero3": Case(stage=3, steps=6),
    "zero2, clipped sums": Case(stage=2, steps=4, accumulate=3, clip="norm", clip_at=0.3),
    "zero1, bf16": Case(stage=1, steps=4, precision="bf16-mixed", optimizer="sgd"),
    "zero3, offload": Case(stage=3, steps=4, options=(("offload", "cpu"),)),
    "zero3, fp16": Case(stage=3, steps=4, precision="16-mixed", traits=("tied", "unused")),
    "zero2, virtual ranks": Case(stage=2, steps=4, options=(("parallel", {"virtual_ranks": 4}),)),
    "zero2, recompute": Case(stage=2, steps=4, traits=("buffers",), options=(("activations", "full"),)),
}
"""What runs on two ranks, in one train function one after the other."""


def run_case(case: Case, world_size: int, *, ray: bool) -> dict[str, Any]:
    """Losses and weights of a case; in Ray with the Trainer's defaults for nodes and devices."""
    models.quiet()
    random.seed(0)
    module = Net(case)
    if ray:
        from ray.train.lightning import prepare_trainer

        from ls_strategy.extras.ray import RayZeROStrategy

        with mock.patch.object(models, "ZeROStrategy", RayZeROStrategy):
            trainer = prepare_trainer(models.trainer_of(case, 1))
    else:
        trainer = models.trainer_of(case, world_size)
    trainer.fit(module, models.loader(case, world_size))
    weights = trainer.strategy.lightning_module_state_dict()
    kept = {k: v.detach().clone() for k, v in weights.items()} if trainer.is_global_zero else {}
    return {"losses": module.result.losses, "weights": kept, "world_size": trainer.world_size}


def run_cases(rank: int, world_size: int, names: list[str]) -> dict[str, Any]:
    """The trusted runs: ranks of a Trainer's own."""
    return {name: run_case(CASES[name], world_size, ray=False) for name in names}


def train_cases(config: dict[str, Any]) -> dict[str, Any]:
    """A train function: the cases of ``config["cases"]``, on every rank's return value."""
    import ray.train

    ranks = ray.train.get_context().get_world_size()
    return {name: run_case(CASES[name], ranks, ray=True) for name in config["cases"]}


def in_local_mode(rank: int, world_size: int, function: Any, config: dict[str, Any]) -> Any:
    """Run a train function in Ray's local mode on a rank that torchrun, or `spawn`, has started."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(function, train_loop_config=config, scaling_config=ScalingConfig(num_workers=0))
    return trainer.fit().return_value


class _Folder:
    """A storage of Ray's in a folder; its local mode has none."""

    exists = True

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def free_name(self, wanted: str) -> str:
        return wanted

    def path(self, name: str) -> str:
        return f"{self.folder}/{name}/checkpoint.ckpt"

    def checkpoint(self, name: str) -> str:
        return name


def _is_complete(path: Path) -> bool:
    return path.is_file() or (path / "manifest.json").exists()


def train_announced(config: dict[str, Any]) -> dict[str, Any]:
    """A train function in which Ray announces twice that a node will be taken away; what was reported, and when."""
    from ray.train import PreemptionInfo

    from ls_strategy.extras.ray import RayReportCallback, RayZeROStrategy, report

    models.quiet()
    asked: list[int] = []
    reported: list[dict[str, Any]] = []
    first, second = (PreemptionInfo(deadline_ms=None, preempted_node_to_ranks=ranks) for ranks in ({"a": [1]}, {}))

    def ask() -> PreemptionInfo | None:
        asked.append(trainer.global_step)
        return None if len(asked) < 3 else (first if len(asked) < 5 else second)

    case = Case(stage=3, steps=7)
    with (
        mock.patch.object(report.train, "get_preemption_info", ask),
        mock.patch.object(report.train, "report", lambda **what: reported.append(what)),
        mock.patch.object(report, "RunStorage", return_value=_Folder(config["folder"])),
    ):
        trainer = models.pl.Trainer(
            accelerator="cpu",
            strategy=config.get("alias") or RayZeROStrategy(**config["options"]),
            callbacks=[RayReportCallback(every_n_steps=4, check_every_s=0)],
            max_epochs=1, max_steps=config.get("max_steps", -1), logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Net(case), models.loader(case, trainer.world_size))
    names = [each["checkpoint"] for each in reported if "checkpoint" in each]
    return {
        "asked": asked, "reported": [each["metrics"]["step"] for each in reported], "names": names,
        "end": trainer.global_step,
        "complete": [_is_complete(Path(config["folder"], name, "checkpoint.ckpt")) for name in names],
        "strategy": type(trainer.strategy).__name__,
    }  # fmt: skip


# --- on a cluster ----------------------------------------------------------------------------------------------------


class Steps(Net):
    """A `Net` that notes its losses by step, and can be told to fail or to die in one."""

    def __init__(self, case: Case, config: dict[str, Any]) -> None:
        super().__init__(case)
        self.config = config
        self.noted: dict[int, float] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Do what the test wants of this rank at this step, once."""
        step, wanted = self.trainer.global_step, self.config.get("at", {})
        marker = Path(self.config["folder"], f"{self.config['name']}.done")
        if step == wanted.get("step") and self.global_rank == wanted["rank"] and not marker.exists():
            marker.touch()
            if wanted["what"] == "kill":
                _wait_for(self.config, "step=000000004")
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError(f"a wrong batch on rank {self.global_rank}")
        loss = super().training_step(batch, batch_idx)
        assert loss is not None
        self.noted[step] = float(loss.detach())
        self.log("loss", loss, sync_dist=True)
        return loss


def _wait_for(config: dict[str, Any], name: str) -> None:
    """Return when Ray counts on a checkpoint: its controller asks the workers for reports every second or so."""
    known = Path(config["folder"], "storage", config["name"], "checkpoint_manager_snapshot.json")
    deadline = time.monotonic() + 120
    while not known.exists() or name not in known.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)


STEPS = 4
"""Of an epoch of `epochs`, on any number of ranks: every batch is `BATCH` samples of the 16 on two ranks."""


def epochs(config: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    """Train ``config["epochs"]`` epochs of `STEPS` steps; in Ray with reports."""
    models.quiet()
    random.seed(0)
    ray = config["ray"]
    folders = {"stage": 3, "sharding": {"min_unit_numel": 0}, "checkpoint": "sharded"}
    options = dict(config.get("options", folders))
    module = Steps(Case(stage=3), config)
    if ray:
        from ray.train.lightning import prepare_trainer

        from ls_strategy.extras.ray import RayReportCallback, RayZeROStrategy, latest_checkpoint

        strategy: Any = config.get("alias") or RayZeROStrategy(**options)
        arguments |= {"callbacks": [RayReportCallback(**config.get("report", {}))]}
        path = latest_checkpoint()
    else:
        strategy, path = models.ZeROStrategy(**options), config.get("resume")
        arguments |= {"callbacks": [_SaveLast(config["save"])] if "save" in config else []}
    trainer = models.pl.Trainer(
        accelerator="cpu", strategy=strategy, max_epochs=config["epochs"], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **arguments,
    )  # fmt: skip
    if ray:
        trainer = prepare_trainer(trainer)  # pyright: ignore[reportPossiblyUnboundVariable]
    generator = torch.Generator().manual_seed(5)
    x_BT, y_BT = (torch.randint(0, VOCABULARY, (STEPS * BATCH * 2, LENGTH), generator=generator) for _ in range(2))
    per_rank = BATCH * 2 // (trainer.world_size if ray else config["world_size"])  # the same global batch
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x_BT, y_BT), batch_size=per_rank, shuffle=True)
    trainer.fit(module, data, ckpt_path=path)
    weights = trainer.strategy.lightning_module_state_dict()
    kept = {k: v.detach().clone() for k, v in weights.items()} if trainer.is_global_zero else {}
    return {
        "losses": module.noted, "weights": kept, "world_size": trainer.world_size, "from": path, "pid": os.getpid(),
        "port": os.environ.get("MASTER_PORT"), "strategy": type(trainer.strategy).__name__, "cwd": str(Path.cwd()),
    }  # fmt: skip


class _SaveLast(models.pl.Callback):
    """Saves where `RayReportCallback` does: at the end of the last epoch."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch + 1 == trainer.max_epochs:
            trainer.save_checkpoint(self.path)


def own_ranks(rank: int, world_size: int, config: dict[str, Any]) -> dict[str, Any]:
    """The trusted run of `epochs`: a Trainer's own ranks."""
    return epochs({**config, "ray": False, "world_size": world_size}, devices=world_size)


def train_epochs(config: dict[str, Any]) -> None:
    """A train function: `epochs`, with the result of each rank in the folder; before it, the cases on rank 0's word."""
    import ray.train

    context = ray.train.get_context()
    result = epochs({**config, "ray": True})
    if config.get("cases"):
        result["cases"] = train_cases(config)
    if config.get("refused"):
        result["refused"] = refused()
    torch.save(result, Path(config["folder"], f"{config['name']}.{context.get_world_rank()}.pt"))


def refused() -> dict[str, str]:
    """What is an error in a train function, with its message."""
    from ls_strategy import ElasticTraining, ZeROStrategy

    models.quiet()
    common: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    messages = {}
    for name, make in {
        "plain": lambda: models.pl.Trainer(strategy=ZeROStrategy(), devices=2, **common),
        "notebook": lambda: models.pl.Trainer(strategy="zero3_notebook", **common),
        "elastic": lambda: models.pl.Trainer(strategy="zero3", callbacks=[ElasticTraining()], **common),
    }.items():
        try:
            make().fit(Net(Case(stage=3)), models.loader(Case(stage=3), 2))
        except ValueError as error:  # ConfigError and PlanError
            messages[name] = f"{type(error).__name__}: {error}"
    return messages


def _fit(config: dict[str, Any], workers: int, failures: int = 0, keep: int | None = None) -> dict[str, Any]:
    """Run `train_epochs` on the cluster; what the driver gets."""
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    run = RunConfig(
        name=config.get("run", config["name"]), storage_path=str(Path(config["folder"], "storage")),
        failure_config=FailureConfig(max_failures=failures), checkpoint_config=CheckpointConfig(num_to_keep=keep),
    )  # fmt: skip
    scaling = ScalingConfig(num_workers=workers)
    try:
        result = TorchTrainer(train_epochs, train_loop_config=config, scaling_config=scaling, run_config=run).fit()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    return {"checkpoint": None if result.checkpoint is None else result.checkpoint.path, "metrics": result.metrics}


def on_nvme(folder: str) -> dict[str, Any]:
    """Options of runs that store their states in one folder."""
    return {"stage": 3, "offload": {"optimizer": "nvme", "nvme_path": f"{folder}/nvme", "nvme_allow_ram": True}}


def drive(folder: str) -> None:
    """Everything that needs a cluster, on one; what the driver saw of each run goes into ``driver.json``."""
    import ray

    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=True)
    seen: dict[str, Any] = {}

    def run(name: str, workers: int, config: dict[str, Any], **options: Any) -> None:
        seen[name] = _fit({"folder": folder, "name": name, **config}, workers, **options)
        Path(folder, "driver.json").write_text(json.dumps(seen))

    try:
        run("first", 2, {"run": "resized", "epochs": 2, "cases": list(CASES), "refused": True}, keep=1)
        run("second", 1, {"run": "resized", "epochs": 4}, keep=1)
        run("killed", 2, {"epochs": 3, "at": {"what": "kill", "rank": 1, "step": 6}}, failures=1)
        run("raised", 2, {"epochs": 1, "at": {"what": "raise", "rank": 1, "step": 2}})
        trials = [
            threading.Thread(target=run, args=(f"trial{i}", 2, {"epochs": 1, "options": on_nvme(folder)}))
            for i in range(2)
        ]
        for each in trials:
            each.start()
        for each in trials:
            each.join()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    drive(sys.argv[1])
