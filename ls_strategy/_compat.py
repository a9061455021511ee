"""The one place that touches private API of torch and lightning, so that a new release breaks one file at most."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def default_store() -> Any:
    """Rendezvous store of the default process group. Raises if there is none."""
    return dist.distributed_c10d._get_default_store()


def sync_batch_norm_error() -> str | None:
    """Why ``torch.nn.SyncBatchNorm`` cannot run here, or None where it can."""
    return None if torch.cuda.is_available() else "torch.nn.SyncBatchNorm has no CPU implementation"
