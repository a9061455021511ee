"""pytorch-tabular: a network for tables (``pytorch_lightning``)."""

# pyright: reportMissingImports=false

import sys
from typing import Any

import pandas as pd
import pytorch_lightning as pl
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import CategoryEmbeddingModelConfig
from sklearn.datasets import load_breast_cancer

from benchmarks.published.losses import recorder


def main(strategy: str) -> None:
    """Train on scikit-learn's table of tumours."""
    found: Any = load_breast_cancer(as_frame=True)
    table: pd.DataFrame = found.frame.rename(columns=lambda name: name.replace(" ", "_"))
    names = [name for name in table.columns if name != "target"]
    model = TabularModel(
        data_config=DataConfig(target=["target"], continuous_cols=names, num_workers=0),
        model_config=CategoryEmbeddingModelConfig(task="classification", layers="64-32", dropout=0.0, seed=1),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(
            accelerator="cpu", devices=2, batch_size=32, max_epochs=2, early_stopping=None, checkpoints=None,
            load_best=False, progress_bar="none", trainer_kwargs={"strategy": strategy, "num_sanity_val_steps": 0},
        ),
        verbose=False,
    )  # fmt: skip
    model.fit(train=table, validation=table[:64], callbacks=[recorder(pl.Callback)])


if __name__ == "__main__":
    main(sys.argv[1])
