"""Exchange and log what the ranks of an island know of a round: its result, metrics and refused contributions."""

from __future__ import annotations

from ls_strategy.distributed.comm import Comm
from ls_strategy.errors import StateError
from ls_strategy.extras.islands.member import Member, Result
from ls_strategy.host.pytorch import pl, rank_zero_warn


def settled(world: Comm, result: Result) -> Result:
    """Return the result of a round if it is of one kind on all ranks. Collective.

    Raises:
        StateError: it is not: connections of single ranks have broken. On all ranks.
    """
    kinds = world.exchange_objects(result.what)
    if len(set(kinds)) > 1:
        raise StateError(
            f"the ranks of this island have lost the hub one by one: a round is {', '.join(map(repr, kinds))} on ranks "
            f"0 to {len(kinds) - 1}. Start the island again from its last checkpoint; the others go on meanwhile."
        )
    return result


def refused(world: Comm, member: Member, result: Result) -> set[int]:
    """Report the islands whose contribution did not count, and return them. Collective."""
    found = dict(pair for each in world.exchange_objects(result.refused) for pair in each)
    for island, why in sorted(found.items()):
        rank_zero_warn(
            f"DiLoCo: round {member.round} went on without the contribution of island {island}, which has sent "
            f"{why}. Look for a divergence there: its learning rate, its data, its hardware."
        )
    return set(found)


def log(trainer: pl.Trainer, world: Comm, member: Member, result: Result, waited: float) -> None:
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
