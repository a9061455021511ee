"""Random number streams of regions: what is equal on all ranks, what differs, and what recomputation restores."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ls_strategy.parallel.random import Streams, fork_seed, forked


@given(st.integers(1, 2**31 - 1), st.integers(0, 63), st.integers(0, 1023))
def test_a_seed_says_which_fork_it_is(number: int, phase: int, rank: int) -> None:
    seed = fork_seed(number, phase, rank)
    assert 0 <= seed < 2**63
    assert forked(seed) == (number, phase)
    assert (seed == fork_seed(number, phase, rank + 1)) == (phase % 2 == 1 or rank == rank + 1)


@given(st.integers(0, 2**32 - 1))
def test_seeds_of_32_bits_are_no_forks(seed: int) -> None:
    assert forked(seed) is None


def test_regions_leave_one_draw_behind_and_nothing_else() -> None:
    cpu = torch.device("cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        outer = torch.randint(1, 1 << 31, ()), torch.rand(3)
        first, second = Streams(0), Streams(1)
        drawn = []
        for streams, numbers in ((first, 3), (second, 5)):
            torch.manual_seed(1)
            assert streams.open(cpu)
            assert not streams.open(cpu)
            own = torch.rand(numbers)
            streams.common(cpu)
            common = torch.rand(2)
            streams.own(cpu)
            again = torch.rand(2)
            assert streams.is_open(cpu)
            streams.close(cpu)
            streams.close_all()
            assert torch.equal(torch.rand(3), outer[1])
            drawn.append((own[:3], common, again))
        (own0, common0, again0), (own1, common1, again1) = drawn
        assert torch.equal(common0, common1)
        assert not torch.equal(own0, own1)
        assert not torch.equal(again0, again1)
        assert not torch.equal(own0[:2], again0)


def test_a_region_restored_with_the_generator_goes_on() -> None:
    """What recomputation does: the state of inside a region comes back, long after the region was closed."""
    cpu = torch.device("cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        streams = Streams(1)
        streams.open(cpu)
        inside = torch.random.get_rng_state()
        streams.common(cpu)
        common = torch.rand(2)
        streams.own(cpu)
        own = torch.rand(2)
        streams.close(cpu)
        torch.random.set_rng_state(inside)
        assert streams.is_open(cpu)
        streams.common(cpu)
        assert torch.equal(torch.rand(2), common)
        streams.own(cpu)
        assert torch.equal(torch.rand(2), own)
