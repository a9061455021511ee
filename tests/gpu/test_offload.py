"""Where states and activations are stored, and what is recomputed, changes no bit; with late streams neither.

Each fit is repeated with a pause of about a millisecond in front of every copy and update on a side stream, and with
one in front of every block: a wait that is missing cannot be hidden by a fast copy.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.ranks import assert_equal
from tests.gpu.programs import offload_programs, trusted
from tests.gpu.run import each, result, run
from tests.gpu.watch import LATE

LIMIT_S = 220
pytestmark = pytest.mark.timeout(LIMIT_S + 30)
PROGRAMS = offload_programs(None)


@pytest.fixture(scope="module")
def resident() -> dict[str, Any]:
    """Every fit without offload, in one process."""
    return run(each, {name: trusted(program) for name, program in PROGRAMS.items()}, timeout_s=LIMIT_S)


@pytest.fixture(scope="module", params=[None, *LATE], ids=["in time", *(f"late {kind}" for kind in LATE)])
def offloaded(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Every fit with offload, in one process."""
    return run(each, offload_programs(request.param), timeout_s=LIMIT_S)


@pytest.mark.parametrize("name", PROGRAMS)
def test_offload_changes_no_bit(name: str, offloaded: dict[str, Any], resident: dict[str, Any]) -> None:
    """Notices a copy that is used before it has arrived, or overwritten before it was used."""
    assert_equal(result(offloaded, name), result(resident, name), name)
