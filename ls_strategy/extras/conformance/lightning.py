"""Lightning, under the name that is installed: the suite needs nothing else beside torch."""

from __future__ import annotations

try:
    import lightning.pytorch as pl
    from lightning.pytorch import callbacks, strategies, tuner, utilities
except ModuleNotFoundError:
    import pytorch_lightning as pl
    from pytorch_lightning import callbacks, strategies, tuner, utilities

__all__ = ["callbacks", "pl", "strategies", "tuner", "utilities"]
