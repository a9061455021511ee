"""`DiLoCo` on two islands: against DDP and against plain torch, and what happens when islands do not fit or are lost."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Callback
from torch import Tensor

from ls_strategy.islands import wire
from tests.dist.islands import PlainSgd, diloco, hub, in_plain_torch, on_islands
from tests.dist.ranks import Net, assert_close, batches, fit, trainer_of, weights

pytestmark = pytest.mark.dist

NUMEL, BATCH = 96, 2


def train(
    island: int, rank: int, meet: str, strategies: list[Any], kind: type[Net], steps: int, options: dict[str, Any]
) -> list[dict[str, Any]]:
    results = []
    for strategy in strategies:
        module, callback = kind(), diloco(meet, island, **options)
        trainer = trainer_of(strategy, max_steps=steps, max_epochs=-1, callbacks=[callback, sent := Sent()])
        trainer.fit(module, batches(NUMEL, BATCH))
        results.append({"weights": weights(module), "losses": module.losses, **sent.found})
    return results


class Sent(Callback):
    """Remembers what `DiLoCo` has sent, before its end."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        callback, engine = trainer.callbacks[0], trainer.strategy.engine
        names = {id(p): n for n, p in pl_module.named_parameters()}
        self.found = {
            "sent": callback.sent_bytes,
            "received": callback.received_bytes,
            "rounds": callback.round,
            "units": [{names[id(p)] for f in u.flats for p in f.params} for u in engine.units],
            "owned": sum(f.owned[1] - f.owned[0] for f in engine.stepper.flats_that_train),
        }


def ddp(rank: int, world_size: int, steps: int) -> dict[str, Tensor]:
    module = PlainSgd()
    fit("ddp", module, batches(NUMEL, BATCH), max_steps=steps, max_epochs=-1)
    return weights(module)


def test_an_exchange_in_every_step_is_ddp_on_all_ranks():
    from ls_strategy.testing import spawn

    options = {"every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
    with hub() as meet:
        islands = on_islands(2, train, meet, [1, 3], PlainSgd, 10, options)
    trusted = spawn(ddp, 4, 10, init_process_group=False)[0]
    for ranks in islands:
        for stage in ranks[0]:
            assert_close(stage["weights"], trusted, "DDP")
