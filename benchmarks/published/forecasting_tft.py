"""pytorch-forecasting: a temporal fusion transformer on made series (``lightning``)."""

# pyright: reportMissingImports=false

import sys
import warnings

import lightning.pytorch as pl
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.data import NaNLabelEncoder
from pytorch_forecasting.data.examples import generate_ar_data
from pytorch_forecasting.metrics import QuantileLoss

from benchmarks.published.losses import recorder


def main(strategy: str) -> None:
    """Train as the package's tutorial does."""
    warnings.filterwarnings("ignore")
    pl.seed_everything(1)
    frame = generate_ar_data(seasonality=10.0, timesteps=60, n_series=20, seed=1)
    frame["series"] = frame["series"].astype(str).astype("category")
    series = TimeSeriesDataSet(
        frame, time_idx="time_idx", target="value", group_ids=["series"],
        categorical_encoders={"series": NaNLabelEncoder().fit(frame["series"])},
        static_categoricals=["series"], time_varying_unknown_reals=["value"], max_encoder_length=20,
        max_prediction_length=5,
    )  # fmt: skip
    model = TemporalFusionTransformer.from_dataset(
        series, learning_rate=0.03, hidden_size=16, attention_head_size=2, dropout=0.0, loss=QuantileLoss(),
        optimizer="adam", log_interval=0,
    )  # fmt: skip
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, limit_train_batches=12, gradient_clip_val=0.1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, callbacks=[recorder(pl.Callback)],
    )  # fmt: skip
    trainer.fit(model, series.to_dataloader(train=True, batch_size=32, num_workers=0))


if __name__ == "__main__":
    main(sys.argv[1])
