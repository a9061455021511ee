"""chemprop: a message-passing network predicts a property of molecules (``lightning``)."""

# pyright: reportMissingImports=false

import sys

import numpy as np
from chemprop import data, models, nn
from lightning import pytorch as pl
from rdkit.Chem import Descriptors, MolFromSmiles

from benchmarks.published.losses import recorder

PIECES = ("C", "CC", "CO", "CN", "C(=O)O", "c1ccccc1", "C(F)(F)F", "CCl", "C#N", "CS")


def main(strategy: str) -> None:
    """Train on made molecules whose property RDKit computes."""
    pl.seed_everything(1)
    smiles = [a + b + c for a in ("C", "CC", "N") for b in PIECES[:7] for c in PIECES]
    molecules = [s for s in smiles if MolFromSmiles(s) is not None]
    values = np.array([[Descriptors.MolLogP(MolFromSmiles(s))] for s in molecules])  # type: ignore[attr-defined]
    points = [data.MoleculeDatapoint.from_smi(s, y) for s, y in zip(molecules, values, strict=True)]
    dataset = data.MoleculeDataset(points)
    dataset.normalize_targets()
    loader = data.build_dataloader(dataset, batch_size=16, shuffle=True, seed=1, drop_last=True)
    model = models.MPNN(
        nn.BondMessagePassing(d_h=64), nn.MeanAggregation(), nn.RegressionFFN(input_dim=64), batch_norm=True,
        warmup_epochs=1,
    )  # fmt: skip
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=3, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, callbacks=[recorder(pl.Callback)],
    )  # fmt: skip
    trainer.fit(model, loader)


if __name__ == "__main__":
    main(sys.argv[1])
