"""All tables of mutations together."""

from __future__ import annotations

from tests.mutations import Mutation
from tests.mutations.checkpoints import CHECKPOINTS
from tests.mutations.collectives import COLLECTIVES
from tests.mutations.gradients import GRADIENTS
from tests.mutations.layout import LAYOUT
from tests.mutations.offload import OFFLOAD
from tests.mutations.parallel import PARALLEL
from tests.mutations.planner import PLANNER
from tests.mutations.steps import STEPS

MUTATIONS: tuple[Mutation, ...] = (
    *COLLECTIVES, *GRADIENTS, *LAYOUT, *STEPS, *OFFLOAD, *CHECKPOINTS, *PARALLEL, *PLANNER,
)  # fmt: skip
