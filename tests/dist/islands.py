"""Two islands in one `spawn`, their hub, and DiLoCo in plain torch as the trusted run."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from ls_strategy import DiLoCo
from ls_strategy.extras.islands.hub import Hub
from ls_strategy.extras.islands.server import HubServer
from ls_strategy.testing import free_port, spawn
from tests.dist.ranks import Net, quiet, samples
from tests.limits import wall

PATIENCE_S = 20.0


@contextmanager
def hub(islands: int = 2, *, patience_s: float | None = None, port: int = 0, secret: str = "") -> Iterator[str]:
    """A hub in a thread of this process; yields its address. It waits as long as a busy machine may take."""
    server = HubServer(
        Hub(islands, wall(PATIENCE_S) if patience_s is None else patience_s), host="127.0.0.1", port=port, secret=secret
    )
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        server.close()
        thread.join()


def on_islands(
    ranks: int, body: Callable[..., Any], *args: Any, islands: int = 2, timeout_s: float = 100
) -> list[list[Any]]:
    """Call ``body(island, rank, *args)`` on every rank of every island; return the results by island and rank."""
    ports = [free_port() for _ in range(islands)]
    results = spawn(_call, islands * ranks, ranks, ports, body, args, init_process_group=False, timeout_s=timeout_s)
    return [results[i * ranks : (i + 1) * ranks] for i in range(islands)]


def _call(place: int, _: int, ranks: int, ports: list[int], body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    quiet()
    island, rank = divmod(place, ranks)
    become(rank, ranks, ports[island])
    return body(island, rank, *args)


def become(rank: int, ranks: int, port: int) -> None:
    """Make this process a rank of a world of its own."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    os.environ.update(zip(names, map(str, (rank, rank, ranks, ranks, port)), strict=True))


def diloco(meet: str, island: int, **options: Any) -> DiLoCo:
    return DiLoCo(meet, **{"island": island, "islands": 2, "patience_s": wall(PATIENCE_S), **options})


class Reference:
    """The islands' models, and what they share, in one process."""

    def __init__(self, module: Net, islands: int, fragments: list[set[str]] | None, lr: float, momentum: float) -> None:
        self.models = [copy.deepcopy(module) for _ in range(islands)]
        self.inner: list[Any] = [m.configure_optimizers() for m in self.models]
        trains = {n: p.detach().clone() for n, p in module.named_parameters() if p.requires_grad}
        self.shared = {n: nn.Parameter(value) for n, value in trains.items()}
        self.fragments = fragments or [set(trains)]
        nesterov = {"nesterov": True} if momentum else {}
        self.outer = [
            torch.optim.SGD([self.shared[n] for n in sorted(f)], lr=lr, momentum=momentum, **nesterov)
            for f in self.fragments
        ]

    def train(self, island: int, batches_of_ranks: list[tuple[Tensor, Tensor]]) -> None:
        self.inner[island].zero_grad()
        loss: Any = sum(self.models[island].loss(batch) for batch in batches_of_ranks) / len(batches_of_ranks)
        loss.backward()
        self.inner[island].step()

    def outer_step(self, fragment: int) -> None:
        for name in self.fragments[fragment]:
            deltas = [self.shared[name].detach() - dict(m.named_parameters())[name].detach() for m in self.models]
            self.shared[name].grad = sum(deltas[1:], deltas[0].clone()) / len(deltas)
        self.outer[fragment].step()

    @torch.no_grad()
    def merge(self, fragment: int, keep: float) -> None:
        for model in self.models:
            for name, p in model.named_parameters():
                if name in self.fragments[fragment]:
                    p.copy_(keep * p + (1 - keep) * self.shared[name])


def in_plain_torch(
    module: Net,
    steps: int,
    *,
    numel: int,
    batch: int,
    ranks: int,
    every: int,
    islands: int = 2,
    fragments: list[set[str]] | None = None,
    delay: int = 0,
    mixing: float = 0.0,
    lr: float = 0.7,
    momentum: float = 0.9,
) -> list[dict[str, Tensor]]:
    """DiLoCo in one process: the weights of every island after ``steps`` steps, and a last exchange of everything.

    Args:
        fragments: names of the parameters in each; default: one with all.
    """
    run = Reference(module, islands, fragments, lr, momentum)
    parts = len(run.fragments)
    (x, y), per_epoch = samples(numel), numel // (islands * ranks * batch)
    samplers = [DistributedSampler(range(numel), islands * ranks, r) for r in range(islands * ranks)]  # type: ignore[arg-type]
    due: dict[int, int] = {}
    for done in range(1, steps + 1):
        at = (done - 1) % per_epoch * batch
        for sampler in samplers:
            sampler.set_epoch((done - 1) // per_epoch)
        for island in range(islands):
            own = samplers[island * ranks : (island + 1) * ranks]
            mine = [list(sampler)[at : at + batch] for sampler in own]
            run.train(island, [(x[i], y[i]) for i in mine])
        if done in due:
            run.merge(due.pop(done), mixing)
        if done % (every // parts) == 0:
            fragment = (done * parts // every - 1) % parts
            run.outer_step(fragment)
            due[done + delay] = fragment
        if done in due:
            run.merge(due.pop(done), mixing)
    for fragment in due.values():
        run.merge(fragment, mixing)
    for fragment in range(parts):
        if parts > 1 or steps % every:
            run.outer_step(fragment)
        run.merge(fragment, 0.0)
    return [{n: p.detach().clone() for n, p in m.named_parameters()} for m in run.models]
