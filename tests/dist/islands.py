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

from ls_strategy import DiLoCo
from ls_strategy.islands.hub import Hub, HubServer
from ls_strategy.testing import free_port, spawn
from tests.dist.ranks import Net, quiet, samples


@contextmanager
def hub(islands: int = 2, *, patience_s: float = 20.0, port: int = 0, secret: str = "") -> Iterator[str]:
    """A hub in a thread of this process; yields its address."""
    server = HubServer(Hub(islands, patience_s), host="127.0.0.1", port=port, secret=secret)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        server.close()
        thread.join()


def on_islands(ranks: int, body: Callable[..., Any], *args: Any, islands: int = 2, timeout_s: float = 100) -> list[list[Any]]:
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


class Momentum(Net):
    """Inner AdamW, with moments that the outer step leaves alone."""


class PlainSgd(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


def diloco(meet: str, island: int, **options: Any) -> DiLoCo:
    return DiLoCo(meet, **{"island": island, "islands": 2, "patience_s": 20.0, **options})


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
    buffers: bool = False,
) -> list[dict[str, Tensor]]:
    """DiLoCo in one process: the weights of every island after ``steps`` steps, and a last exchange of everything.

    Args:
        fragments: names of the parameters in each; default: one with all.
    """
    x, y = samples(numel)
    models = [copy.deepcopy(module) for _ in range(islands)]
    inner: list[Any] = [m.configure_optimizers() for m in models]
    shared = {n: nn.Parameter(p.detach().clone()) for n, p in module.named_parameters() if p.requires_grad}
    fragments = fragments or [set(shared)]
    nesterov = {"nesterov": True} if momentum else {}
    outer = [torch.optim.SGD([shared[n] for n in sorted(f)], lr=lr, momentum=momentum, **nesterov) for f in fragments]
    waiting: tuple[int, int] | None = None

    def outer_step(numbers: list[int]) -> None:
        for number in numbers:
            for name in fragments[number]:
                deltas = [shared[name].detach() - dict(m.named_parameters())[name].detach() for m in models]
                shared[name].grad = sum(deltas[1:], deltas[0].clone()) / islands
            outer[number].step()

    def merge(number: int, keep: float) -> None:
        with torch.no_grad():
            for model in models:
                for name, p in model.named_parameters():
                    if name in fragments[number]:
                        p.copy_(keep * p + (1 - keep) * shared[name])

    number, per_epoch = 0, numel // (islands * ranks * batch)
    for step in range(steps):
        at = step % per_epoch * batch
        for island, model in enumerate(models):
            mine = [torch.arange(island * ranks + r, numel, islands * ranks)[at : at + batch] for r in range(ranks)]
            inner[island].zero_grad()
            (sum(model.loss((x[i], y[i])) for i in mine) / ranks).backward()
            inner[island].step()
        done = step + 1
        if waiting is not None and done == waiting[0]:
            merge(waiting[1], mixing)
            waiting = None
        if done % (every // len(fragments)) == 0:
            outer_step([number % len(fragments)])
            waiting = (done + delay, number % len(fragments))
            number += 1
            if not delay:
                merge(waiting[1], mixing)
                waiting = None
    if waiting is not None:
        merge(waiting[1], mixing)
    if len(fragments) > 1 or steps % every:
        outer_step(list(range(len(fragments))))
    for number in range(len(fragments)):
        merge(number, 0.0)
    return [{n: p.detach().clone() for n, p in m.named_parameters()} for m in models]
