"""neuralforecast: NHITS on made series (``pytorch_lightning``)."""

# pyright: reportMissingImports=false

import sys

import numpy as np
import pandas as pd
import pytorch_lightning as pl
from neuralforecast import NeuralForecast
from neuralforecast.models import NHITS

from benchmarks.published.losses import recorder


def main(strategy: str) -> None:
    """Train as the package's introduction does."""
    steps = np.arange(200)
    frame = pd.concat(
        pd.DataFrame({"unique_id": i, "ds": steps, "y": np.sin(steps / (3 + i)) + 0.01 * steps}) for i in range(8)
    )
    model = NHITS(
        h=12, input_size=24, max_steps=20, batch_size=4, windows_batch_size=32, random_seed=1, strategy=strategy,
        accelerator="cpu", devices=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        callbacks=[recorder(pl.Callback)],
    )  # fmt: skip
    NeuralForecast(models=[model], freq=1).fit(df=frame)


if __name__ == "__main__":
    main(sys.argv[1])
