"""`DiLoCo`: groups of ranks (islands) that train alone and exchange every H optimizer steps."""

from __future__ import annotations

import os
import time
import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ls_strategy.checked import above, at_least, between, checked
from ls_strategy.distributed.comm import Comm
from ls_strategy.engine import Engine
from ls_strategy.errors import ConfigError, StateError
from ls_strategy.extras._lightning import before_iterators
from ls_strategy.extras.callbacks import island_data, outer_state
from ls_strategy.extras.callbacks.during_fit import zero_strategy
from ls_strategy.extras.islands import buffers, fingerprint
from ls_strategy.extras.islands.client import HubClient, parse_address, read_secret
from ls_strategy.extras.islands.member import Contribution, Member, Result
from ls_strategy.extras.islands.outer import Outer, Place, flats_of
from ls_strategy.extras.islands.wire import WireFormat
from ls_strategy.host.pytorch import pl, rank_zero_info, rank_zero_warn
from ls_strategy.lightning.connection import ConnectedCallback
from ls_strategy.lightning.strategy import ZeROStrategy


def _settled(world: Comm, result: Result) -> Result:
    """Return the result of a round if it is of one kind on all ranks. Collective.

    Otherwise connections of single ranks have broken: StateError on all ranks.
    """
    kinds = world.exchange_objects(result.what)
    if len(set(kinds)) > 1:
        raise StateError(
            f"the ranks of this island have lost the hub one by one: a round is {', '.join(map(repr, kinds))} on ranks "
            f"0 to {len(kinds) - 1}. Start the island again from its last checkpoint; the others go on meanwhile."
        )
    return result


def _refused(world: Comm, member: Member, result: Result) -> set[int]:
    """Report the islands whose contribution did not count, and return them. Collective."""
    found = dict(pair for each in world.exchange_objects(result.refused) for pair in each)
    for island, why in sorted(found.items()):
        rank_zero_warn(
            f"DiLoCo: round {member.round} went on without the contribution of island {island}, which has sent "
            f"{why}. Look for a divergence there: its learning rate, its data, its hardware."
        )
    return set(found)


def _log_round(trainer: pl.Trainer, world: Comm, member: Member, result: Result, waited: float) -> None:
    """Give the loggers the figures of a round. Collective."""
    square, longest = (list(each) for each in zip(*world.exchange_objects((result.square, waited)), strict=True))
    values = {
        "diloco/outer_norm": sum(square) ** 0.5,
        "diloco/islands": float(len(result.islands)),
        "diloco/wait_s": max(longest),
        "diloco/round_s": result.seconds,
        "diloco/round": float(member.round),
        "diloco/sent_mib": member.client.sent_bytes / 2**20,
    }
    for logger in trainer.loggers:
        logger.log_metrics(values, step=trainer.global_step)


_MOST_ATTEMPTS = 5  # to take part in the last round
_COMPARED_BATCHES = 2  # batches of a run whose digests islands compare: equal ones mean equal data


class DiLoCo(ConnectedCallback):
    """Trains one model on several islands, which exchange only every ``every`` optimizer steps.

    An island is an ordinary run with ranks, stage and parallelism of its own, and all islands run the same program,
    each with its own ``island``. They meet at a hub, which ``ls-strategy meet --islands N --port PORT`` starts on a
    host that all of them reach. DiLoCo: arXiv:2311.08105. With ``fragments`` and ``delay`` it is Streaming DiLoCo:
    arXiv:2501.18512.

    ::

        every H optimizer steps   each rank sends its shards of (global - local weights), and gets the other islands'
                                  outer step: Nesterov momentum on their mean; local weights = global weights
        an island is lost         the others go on without it
        it is started again       it gets global weights and momentum after the next round, and is in from then on
        the first one ends        all islands exchange a last time and end with the same weights

    The loggers get, under ``diloco/``: ``outer_norm`` (of the mean pseudo-gradient), ``islands`` in the round,
    ``wait_s`` (that training has waited for it), ``round_s``, ``round`` and ``sent_mib`` of this rank in all.
    """

    # One argument per option, as parsers read them off the signature.
    @checked(
        islands=at_least(1, 1024), island=at_least(0, 1023), every=at_least(1), fragments=at_least(1),
        delay=at_least(0), mixing=between(0, 1), outer_lr=above(0), outer_momentum=between(0, 1), patience_s=above(0),
    )  # fmt: skip
    def __init__(
        self,
        meet: str,
        *,
        island: int,
        islands: int,
        every: int = 100,
        fragments: int = 1,
        delay: int = 0,
        mixing: float | None = None,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        wire: WireFormat = "exact",
        secret: str | os.PathLike[str] | None = None,
        patience_s: float = 300.0,
    ) -> None:
        """Set the options. All islands need the same, but for ``island``.

        Args:
            meet: ``host:port`` of the hub.
            island: number of this island, from 0.
            islands: how many there are.
            every: optimizer steps between two exchanges of a parameter (H).
            fragments: parts of the model that take turns, so that one is exchanged every ``every / fragments`` steps.
            delay: optimizer steps between sending and using what was received, during which training goes on.
            mixing: the share of the local weights in what they become. Default: 0, and 0.5 with a delay.
            outer_lr: learning rate of the outer step.
            outer_momentum: its Nesterov momentum.
            wire: ``exact``, or ``bf16``, ``int8`` or ``int4`` for fewer bytes with rounded pseudo-gradients.
            secret: file with the hub's secret, if it was started with one.
            patience_s: how long to try to reach the hub, and how long it may be silent (20 s at least). How long a
                round waits for islands is an option of the hub.

        Raises:
            ConfigError: a value is out of its range, or does not fit to another one.
        """
        self._address = parse_address(meet)
        if island >= islands:
            raise ConfigError(
                f"Got island={island} of islands={islands}, but they are numbered from 0. Set a lower island."
            )
        if every % fragments:
            raise ConfigError(
                f"Got every={every} with fragments={fragments}, but fragments take turns at equal intervals. Set every "
                f"to a multiple, such as {max(every // fragments, 1) * fragments}."
            )
        if delay >= every // fragments:
            raise ConfigError(
                f"Got delay={delay} with an exchange every {every // fragments} steps (every={every}, fragments="
                f"{fragments}), but one has to end before the next one begins. Set delay to at most "
                f"{every // fragments - 1}."
            )
        self.meet, self.island, self.islands, self.secret = meet, island, islands, secret
        self.every, self.fragments, self.delay = every, fragments, delay
        self.mixing = (0.5 if delay else 0.0) if mixing is None else mixing
        self.outer_lr, self.outer_momentum, self.patience_s = outer_lr, outer_momentum, patience_s
        self.wire: WireFormat = wire
        self._loaded: dict[str, Any] = {}
        self._engine: weakref.ref[Engine] | None = None
        self._forget()

    def _forget(self) -> None:
        self._member: Member | None = None
        self._sent: Contribution | None = None  # what the round in flight is about
        # A round whose result waits: the step after which it is used, and its buffers.
        self._merge: tuple[int, list[Place]] | None = None
        self._buffers_change: Tensor | None = None
        self._begun = self._first = self._last_step = 0
        self._batches: list[int] = []
        self._ended = False

    @property
    def sent_bytes(self) -> int:
        """The bytes that this rank has sent to other islands in this fit."""
        return 0 if self._member is None else self._member.client.sent_bytes

    @property
    def received_bytes(self) -> int:
        """The bytes that it has received from them."""
        return 0 if self._member is None else self._member.client.received_bytes

    @property
    def round(self) -> int:
        """The number of rounds that the run has had."""
        return 0 if self._member is None else self._member.round

    # start -----------------------------------------------------------------------------------------------------------

    @override
    def connecting(self, trainer: pl.Trainer) -> None:
        """Give every island its own part of the training data."""
        zero_strategy(trainer, self).islands = (self.island, self.islands)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start from the weights, or from the outer state of the checkpoint."""
        self._close()
        strategy = zero_strategy(trainer, self)
        if sum(isinstance(c, DiLoCo) for c in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ConfigError("Got DiLoCo twice in callbacks. Keep one.")
        engine = strategy.require_engine()
        outer = Outer(
            engine, lr=self.outer_lr, momentum=self.outer_momentum, fragments=self.fragments, form=self.wire
        )  # fmt: skip
        who = {"island": self.island, "rank": strategy.global_rank, "ranks": strategy.world_size}
        given = self.secret
        secret = "" if given is None else strategy.on_all_ranks(lambda: read_secret(given))
        self._member = Member(HubClient(self._address, secret, who, self.patience_s, rank_zero_warn), outer)
        self._load(pl_module, engine, list(outer.shards))
        self._follow(engine, pl_module)
        if self.island and strategy.virtual is None:
            before_iterators(trainer, partial(self._draw_other_numbers, strategy))

    def _draw_other_numbers(self, strategy: ZeROStrategy) -> None:
        """Draw other random numbers than island 0, from the workers of the first iterator on.

        What the user's code has drawn to make the data is equal on all islands, as it is on all ranks.
        """
        if not strategy.resume.makes_iterators:
            island_data.draw_other_numbers(self.island)

    def _follow(self, engine: Engine, module: pl.LightningModule) -> None:
        """Be informed about parameters that begin to train."""
        self._engine = weakref.ref(engine)
        known = weakref.ref(engine)

        def admitted(_: Any) -> None:
            now, member = known(), self._member
            if now is not None and member is not None:
                self._load(module, now, member.outer.admit(now))

        engine.stepper.unfreezing.on_admitted.append(admitted)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Join the other islands. Collective; waits for them."""
        strategy, member = zero_strategy(trainer, self), self._member
        assert member is not None
        engine = strategy.require_engine()
        engine.stepper.unfreezing.follow()
        strategy.on_all_ranks(lambda: island_data.check_loaders(trainer, strategy))
        engine.wait()
        names = ("islands", "every", "fragments", "delay", "mixing", "outer_lr", "outer_momentum", "wire")
        options = {name: getattr(self, name) for name in names}
        member.fingerprint = {**options, **member.outer.fingerprint(engine), **island_data.own_folder(trainer)}
        self._begun = self._first = self._last_step = trainer.global_step
        saved = self._loaded.get("diloco")
        if saved is not None:
            member.run, member.round, self._begun = saved["run"], saved["round"], saved["begun"]
            self._buffers_change = saved["buffers_change"]
            self._merge = None if saved["merge"] is None else (saved["merge"][0], [tuple(p) for p in saved["merge"][1]])
        rank_zero_info(f"DiLoCo: island {self.island} of {self.islands} joins the others at the hub {self.meet}")
        self._join(trainer, pl_module)
        member.present = set(range(self.islands))
        rank_zero_info(f"DiLoCo: island {self.island} is in, after {member.round} rounds")

    def _join(self, trainer: pl.Trainer, module: pl.LightningModule, *, again: bool = False) -> None:
        strategy, member = zero_strategy(trainer, self), self._member
        assert member is not None
        own = buffers.read(module)
        if strategy.on_all_ranks(lambda: member.join(own, again=again)):
            self._take_over(trainer, module)

    def _take_over(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Continue from the global weights. Collective."""
        member = self._member
        assert member is not None
        self._begun = self._first = trainer.global_step
        self._merge, self._buffers_change = None, None
        member.outer.merge(zero_strategy(trainer, self).require_engine(), list(member.outer.shards), 0.0)
        if member.buffers is not None:
            buffers.write(module, member.buffers)

    # steps -----------------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note which data the island sees first."""
        if len(self._batches) < _COMPARED_BATCHES:
            self._batches.append(island_data.digest(batch))

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Exchange if it is due. Collective then."""
        step = trainer.global_step
        if step == self._last_step:
            return
        self._last_step = step
        if self._ended:
            raise StateError(
                "another island has come to the end of its training, and this one trains on, because of min_steps or "
                "min_epochs. Give all islands the same limits."
            )
        self._use_due(trainer, pl_module)
        if not self._ended and step - self._begun >= self.every // self.fragments:
            self._begin(trainer, pl_module, ends=False)
            self._use_due(trainer, pl_module)

    def _use_due(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Use the result of the last round, if that is due."""
        member, step = self._member, trainer.global_step
        assert member is not None
        if self._sent is not None and step - self._begun >= self.delay:
            self._settle(trainer, module)
        if self._merge is not None and step >= self._merge[0]:
            due, self._merge = self._merge[1], None
            member.outer.merge(zero_strategy(trainer, self).require_engine(), due, self.mixing)
            self._write_buffers(module)

    def _write_buffers(self, module: pl.LightningModule) -> None:
        change, self._buffers_change = self._buffers_change, None
        if change is not None:
            buffers.write(module, buffers.read(module) + change)

    def _begin(self, trainer: pl.Trainer, module: pl.LightningModule, *, ends: bool) -> None:
        strategy, member = zero_strategy(trainer, self), self._member
        assert member is not None
        engine, outer = strategy.require_engine(), member.outer
        if self._engine is None or self._engine() is not engine:
            self._follow(engine, module)
        outer.check(engine)
        engine.wait()
        everything = ends or self.fragments == 1
        places = list(outer.shards) if everything else outer.fragment(member.round)
        steps = trainer.global_step - (self._begun if self.fragments == 1 else self._first)
        with_buffers = everything or member.round % self.fragments == 0
        about = {"parameters that train": outer.trains(), fingerprint.OWN + "first batches": self._new_digests()}
        self._sent = Contribution(
            places,
            steps,
            outer.pseudo_gradient(engine, places),
            buffers.read(module) if with_buffers else torch.empty(0, dtype=buffers.DTYPE),
            about,
            ends,
        )
        self._begun = trainer.global_step
        member.begin(self._sent)

    def _new_digests(self) -> str | None:
        """Return digests of the first batches, once."""
        if len(self._batches) != _COMPARED_BATCHES:
            return None
        found = " ".join(f"{each:08x}" for each in self._batches)
        self._batches.append(0)
        return found

    def _settle(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Wait for the round in flight, and do what it calls for. Collective."""
        strategy, member, sent = zero_strategy(trainer, self), self._member, self._sent
        assert member is not None
        assert sent is not None
        started = time.perf_counter()
        world = strategy.require_engine().mesh.world
        result = _settled(world, strategy.on_all_ranks(member.settle))
        waited = time.perf_counter() - started
        self._sent = None
        if result.what == "done":
            self._merge = self._begun + self.delay, sent.places
            self._buffers_change = None if result.buffers is None else buffers.change(sent.buffers, result.buffers)
            _log_round(trainer, world, member, result, waited)
            if self.island in _refused(world, member, result):
                self._start_afresh(trainer, module)
        elif result.what == "ends":
            self._end(trainer, module)
            trainer.should_stop = True
        else:
            self._come_back(trainer, module, result)

    def _come_back(self, trainer: pl.Trainer, module: pl.LightningModule, result: Result) -> None:
        """Continue after a round in which this island was not. Collective."""
        member = self._member
        assert member is not None
        rank_zero_warn(
            f"DiLoCo: island {self.island} was not in round {member.round}: the others did not wait so long, or its "
            "connection was lost. It continues from the global weights; its last steps are lost."
        )
        if result.what == "fetch":
            self._take_over(trainer, module)
        else:
            self._join(trainer, module, again=True)
        if member.over:
            trainer.should_stop = True  # steps that count nowhere

    def _start_afresh(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Continue from the global weights without optimizer states, which may not be finite either. Collective."""
        self._take_over(trainer, module)
        for state in zero_strategy(trainer, self).require_engine().stepper.optimizers:
            state.sharded.states.reset()

    # end -------------------------------------------------------------------------------------------------------------

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Exchange a last time, so that all islands have the global weights. Collective."""
        if self._member is None or self._ended:
            return
        if self._sent is not None:
            self._settle(trainer, pl_module)
        if not self._ended:
            self._end(trainer, pl_module)

    def _end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        strategy, member = zero_strategy(trainer, self), self._member
        assert member is not None
        if self._merge is not None:
            due, self._merge = self._merge[1], None
            member.outer.merge(strategy.require_engine(), due, self.mixing)
            self._write_buffers(module)
        result = self._last_round(trainer, module)
        self._ended = True
        if self.island not in result.islands:
            rank_zero_warn(
                f"DiLoCo: island {self.island} was too late for the last round. It ends with the global weights; its "
                "last steps are lost."
            )
        member.outer.merge(strategy.require_engine(), list(member.outer.shards), 0.0)
        if result.buffers is not None:
            buffers.write(module, result.buffers)
        self._begun = trainer.global_step
        world = strategy.require_engine().mesh.world
        _log_round(trainer, world, member, result, 0.0)
        _refused(world, member, result)

    def _last_round(self, trainer: pl.Trainer, module: pl.LightningModule) -> Result:
        """Exchange everything; come back and repeat it if the others were faster. Collective.

        Raises:
            StateError: this island cannot end with the weights of the others.
        """
        strategy, member = zero_strategy(trainer, self), self._member
        assert member is not None
        for _ in range(_MOST_ATTEMPTS):
            self._begin(trainer, module, ends=True)
            self._sent = None
            world = strategy.require_engine().mesh.world
            result = _settled(world, strategy.on_all_ranks(member.settle))
            if result.what == "done":
                return result
            self._come_back(trainer, module, result)
        raise StateError(
            f"island {self.island} was not in the last round, in {_MOST_ATTEMPTS} attempts, so its weights are not "
            "those of the other islands. Give `ls-strategy meet` a longer --patience, and start all islands from their "
            "last checkpoints."
        )

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave, so that the other islands do not wait."""
        if self._member is not None:
            self._member.client.close()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        if self._member is not None:
            self._member.close()
        self._forget()

    # checkpoints -----------------------------------------------------------------------------------------------------

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add global weights, outer momentum and the place in the rounds. Collective; waits for a round in flight."""
        strategy, member = zero_strategy(trainer, self), self._member
        if member is None or member.run is None:
            return
        strategy.on_all_ranks(member.wait)
        merge, change = self._merge, self._buffers_change
        if self._sent is not None and member.peek().what == "done":
            merge, means = (self._begun + self.delay, self._sent.places), member.peek().buffers
            change = None if means is None else buffers.change(self._sent.buffers, means)
        checkpoint["diloco"] = {
            "run": member.run, "round": member.round, "begun": self._begun, "merge": merge, "buffers_change": change,
        }  # fmt: skip
        checkpoint.update(outer_state.collect(strategy, pl_module, member.outer.shards))

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the outer state until the shards exist."""
        self._loaded = {key: checkpoint[key] for key in outer_state.KEYS if key in checkpoint}

    def _load(self, module: pl.LightningModule, engine: Engine, places: list[Place]) -> None:
        """Give buffers their global weights and momentum of the checkpoint, if it has them."""
        assert self._member is not None
        if "diloco" in self._loaded:
            outer_state.load(self._loaded, module, flats_of(engine), self._member.outer.shards, places)
