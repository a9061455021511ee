"""Small models of transformers with random weights, the same in every process."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
"""All in the small vocabularies."""


def built(model: str, config: str, options: dict[str, Any], *, spread: float = 0.1, **private: Any) -> nn.Module:
    """Return a model whose logits are far apart: no token is chosen by the last bit.

    Args:
        model: name of its class.
        config: name of its configuration's class.
        options: of the configuration.
        spread: of what is added to every parameter, so that no bias is zero and no norm is one.
        **private: attributes of the configuration, set afterwards.
    """
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    made = getattr(transformers, config)(**{**IDS, **options})
    for name, value in private.items():
        setattr(made, name, value)
    torch.manual_seed(0)
    result: nn.Module = getattr(transformers, model)(made)
    with torch.no_grad():
        for parameter in result.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=spread)
    return result
