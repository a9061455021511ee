"""A train function of Ray Train, and the trainer that runs it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from docs.examples.model import Model, data  # a small GPT, random tokens
from ls_strategy.extras.ray import RayReportCallback, RayZeROStrategy, latest_checkpoint


def train(config: dict[str, Any]) -> None:
    """Run on every worker."""
    trainer = pl.Trainer(
        strategy=RayZeROStrategy(stage=3, offload="cpu"),
        callbacks=[RayReportCallback()],
        max_epochs=config["epochs"],
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(Model(), data(), ckpt_path=latest_checkpoint())


if __name__ == "__main__":
    run = RunConfig(
        name="my-run",
        storage_path="/shared/runs",
        failure_config=FailureConfig(max_failures=3),
        checkpoint_config=CheckpointConfig(num_to_keep=2),
    )
    workers = ScalingConfig(num_workers=8, use_gpu=True)
    TorchTrainer(train, train_loop_config={"epochs": 2}, scaling_config=workers, run_config=run).fit()
