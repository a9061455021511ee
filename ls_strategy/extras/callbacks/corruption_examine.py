"""One check: run a step again until two runs agree on all ranks, and find out who was wrong.

::

    run 2               one message of five numbers: does anything differ on any rank?
    it does             ranks exchange their digests; damaged weights are restored, and then no earlier run counts
    run 3, ...          `judge` decides from all runs

The one invariant: every rank takes the same way, as all decide from what all have exchanged.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ls_strategy.extras.callbacks.corruption_digest import GradientWatch, StoredWeights, Tables, WeightReport, fold
from ls_strategy.extras.callbacks.corruption_repeat import RecordedStep
from ls_strategy.extras.callbacks.corruption_verdict import Repetition, Verdict, judge

_MOST_RUNS = 7  # runs of one step, the first one included, after which it is given up
_Run = tuple[list[int], Tables]  # the virtual ranks that a rank has computed, and the digests


@dataclass
class _Local:
    """What one rank exchanges when something differs."""

    weights: WeightReport
    runs: list[_Run]  # since the weights were right
    host: str


@dataclass
class Finding:
    """What a check has found: buffers, by rank."""

    # Weights that were wrong; as `_Own.buffer` has them, optimizers whose states were. Restored, unless `unknown`.
    weights: dict[int, set[int]] = field(default_factory=dict)
    gradients: dict[int, set[int]] = field(default_factory=dict)  # gradients, or averages, that were wrong in one run
    # Ranks of which one or more are wrong, where no right value is known.
    unknown: set[int] = field(default_factory=set)
    unknown_buffers: set[int] = field(default_factory=set)
    # Gradients that are others in every run, on more than one rank.
    not_repeatable: set[int] = field(default_factory=set)
    hosts: list[str] = field(default_factory=list)  # by rank
    repeated: bool = False  # whether the step uses the values of a later run than the first one

    @property
    def culprits(self) -> list[int]:
        """Return the ranks that were wrong."""
        return sorted({*self.weights, *self.gradients})

    def __bool__(self) -> bool:
        """Return whether there is anything."""
        return bool(self.hosts)


class Examination:
    """The check of one step."""

    def __init__(
        self,
        step: RecordedStep,
        watch: GradientWatch,
        stored: StoredWeights | None,
        index: int,
        ignored: set[int],
        *,
        after_backward: Callable[[], None],
    ) -> None:
        """Keep what it needs.

        Args:
            step: what ran.
            watch: takes the digests.
            stored: the weights after the step before. None: they are not compared.
            index: of the optimizer.
            ignored: buffers whose gradients do not repeat; more are added.
            after_backward: called after every backward that runs again.
        """
        self._step, self._watch, self._stored, self._index = step, watch, stored, index
        self._ignored, self._after_backward = ignored, after_backward
        self._world = step.engine.mesh.world

    def run(self, buffers: int, before_each: Callable[[], object]) -> Finding:
        """Run the step again, and return what was found. Collective; equal on all ranks.

        Args:
            buffers: the digest of the module's buffers after the first run.
            before_each: called before every run.
        """
        step, finding = self._step, Finding()
        runs: list[_Run] = [self._digests(0, buffers)]
        first, right, verdict = True, {0}, Verdict()
        for number in range(1, _MOST_RUNS):
            before_each()
            shift = number % self._world.world_size if step.moves else 0
            step.run(self._index, shift, self._after_backward)
            runs.append(self._digests(shift, step.buffers()))
            if number == 1 and not self._differs(runs, shift):
                break
            all_ranks = self._exchange(runs, finding)
            if self._restore(all_ranks, finding):
                runs, first, right = [], False, set()
                if finding.unknown:
                    break
                continue
            verdict = self._judge(all_ranks, finding)
            right = verdict.right
            # With virtual ranks, a run on other ranks leaves their buffers here: it can confirm, but not replace.
            if len(runs) - 1 in right and (not shift or (first and 0 in right)):
                finding.gradients = verdict.wrong
                break
        else:
            finding.unknown = set(verdict.wrong) | set(verdict.unsteady) or verdict.suspects
            finding.unknown_buffers = set().union(*verdict.wrong.values(), *verdict.unsteady.values())
        finding.repeated = not (first and 0 in right)
        step.end(wrong=finding.repeated)
        return finding

    def _digests(self, shift: int, buffers: int) -> _Run:
        leaves = self._step.leaves(shift)
        return leaves, self._watch.take(leaves, buffers)

    def _differs(self, runs: Sequence[_Run], shift: int) -> bool:
        """Return whether anything differs on any rank. Collective: one message of five numbers."""
        (_, first), (_, second) = runs
        tables = [(first[1], second[1]), (first[2], second[2])]
        if not shift:
            tables += [(first[0][leaf], second[0][leaf]) for leaf in first[0]]
        differs = any(self._counted(a) != self._counted(b) for a, b in tables)
        weights = held = 0
        if self._stored is not None:
            differs = differs or bool(self._stored.changed())
            weights = self._stored.replicas()
        if not self._step.engine.policy.optimizer:  # all ranks hold all averages
            held = fold(self._counted(second[2]))
        said = torch.tensor([differs, weights, ~weights, held, ~held], dtype=torch.int64)
        found, *pairs = self._world.agree(said).tolist()  # the largest, and by ~ the least of each
        return bool(found) or pairs[0] != ~pairs[1] or pairs[2] != ~pairs[3]

    def _counted(self, row: Sequence[int]) -> list[int]:
        return [0 if i in self._ignored else value for i, value in enumerate(row)]

    def _exchange(self, runs: list[_Run], finding: Finding) -> list[_Local]:
        weights = WeightReport() if self._stored is None else self._stored.report()
        found = self._world.exchange_objects(_Local(weights, runs, socket.gethostname()))
        finding.hosts = [each.host for each in found]
        return found

    def _restore(self, all_ranks: Sequence[_Local], finding: Finding) -> bool:
        """Restore damaged weights. Return whether there were any, so that earlier runs do not count. Collective."""
        if self._stored is None:
            return False
        wrong, lost = self._stored.repair({rank: each.weights for rank, each in enumerate(all_ranks)})
        for rank, buffers in wrong.items():
            finding.weights.setdefault(rank, set()).update(buffers)
        finding.unknown |= set(lost)
        finding.unknown_buffers |= set().union(*lost.values())
        return bool(wrong or lost)

    def _judge(self, all_ranks: Sequence[_Local], finding: Finding) -> Verdict:
        """Decide from all runs. What does not repeat on several ranks is the operation's doing, and is left out."""
        runs = [_combined([each.runs[i] for each in all_ranks]) for i in range(len(all_ranks[0].runs))]
        verdict = judge(runs, self._ignored)
        for found in (verdict.wrong, verdict.unsteady):
            if len(found) > 1 or (found is verdict.unsteady and found and self._world.world_size == 1):
                buffers = set().union(*found.values())
                finding.not_repeatable |= buffers
                self._ignored |= buffers
        return judge(runs, self._ignored) if finding.not_repeatable else verdict


def _combined(of_ranks: Sequence[_Run]) -> Repetition:
    """Return what a run has come to on all ranks."""
    return Repetition(
        by={leaf: rank for rank, (leaves, _) in enumerate(of_ranks) for leaf in leaves},
        sent={leaf: row for _, (sent, _, _) in of_ranks for leaf, row in sent.items()},
        averaged={rank: averaged for rank, (_, (_, averaged, _)) in enumerate(of_ranks)},
        held={rank: held for rank, (_, (_, _, held)) in enumerate(of_ranks)},
    )
