"""How many elements the references in plain torch take at a time, where there is no kernel.

On a host, intermediate results should stay in the cache. On an accelerator each operation is a launch of about 5 us, so
few large portions cost less; the bits do not depend on it.
"""

from __future__ import annotations

import torch

ON_DEVICE = 1 << 25
"""Elements at a time on an accelerator: at most 5,000 launches for 1e9 elements. Intermediate results take 12 bytes per
element in a norm, 0.4 GiB, and up to 49 in an update, 1.6 GiB (8-bit AdamW)."""


def portion(device: torch.device, on_host: int) -> int:
    """Return the elements to take at a time, which are ``on_host`` in host memory."""
    return on_host if device.type == "cpu" else ON_DEVICE
