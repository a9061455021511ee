"""How many elements the references in plain torch take at a time, where there is no kernel.

On a host, intermediate results should stay in the cache. On an accelerator each operation is a launch of about 5 us, so
few large portions cost less; the bits do not depend on it.
"""

from __future__ import annotations

import torch

ON_DEVICE = 40 << 20
"""Elements at a time on an accelerator. Intermediate results of an update take up to 49 bytes per element, 1.9 GiB
(8-bit AdamW). With `NORM_ON_DEVICE`, a step is at most 5,000 launches for 1e9 elements."""

NORM_ON_DEVICE = 128 << 20
"""The same for norms, where they take 12 bytes per element, 1.5 GiB."""


def portion(device: torch.device, on_host: int, on_device: int = ON_DEVICE) -> int:
    """Return the elements to take at a time: ``on_host`` in host memory, ``on_device`` on an accelerator."""
    return on_host if device.type == "cpu" else on_device
