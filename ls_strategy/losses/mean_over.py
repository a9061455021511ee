"""Let users declare what a loss is a mean over, where a pipeline cannot find it."""

from __future__ import annotations

from torch import Tensor
from torch.overrides import handle_torch_function

from ls_strategy._torch import function_mode


def loss_is_mean_over(number: Tensor | float) -> None:
    """Declare in ``training_step`` that its loss is a mean over ``number`` tokens, samples or weights.

    The micro-batches of a pipeline then have shares of the loss in proportion to their numbers. This is needed only
    where an error says so; without a pipeline it has no effect. Call it before the model, which it must not depend on::

        loss_is_mean_over((batch["labels"] != -100).sum())
        loss = fused_loss(self.head(self(batch)), batch["labels"])

    Args:
        number: a scalar that is computed from the batch.
    """
    if function_mode() is not None:  # that of a pipeline, which notes it
        handle_torch_function(loss_is_mean_over, (), number)
