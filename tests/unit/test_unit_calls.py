"""How long a unit stays gathered in backward: until the calls of its modules that have begun have ended."""

from __future__ import annotations

from ls_strategy.zero.flat.units import Unit


def unit() -> Unit:
    return Unit("block", [], [], is_root=False)


def test_a_unit_may_go_when_its_last_open_call_has_ended() -> None:
    block = unit()
    block.begin_call(closable=True)
    block.begin_call(closable=True)
    assert [block.end_call(), block.end_call()] == [False, True]


def test_a_call_that_no_gradient_of_an_input_ends_is_ended_by_the_last_gradient_of_a_parameter() -> None:
    block = unit()
    block.begin_call(closable=False)
    assert block.open_backwards == 1
    assert block.end_unclosable()


def test_the_last_gradient_of_a_parameter_ends_no_call_that_an_input_still_ends() -> None:
    block = unit()
    block.begin_call(closable=True)
    block.begin_call(closable=False)
    assert not block.end_unclosable()
    assert block.end_call()


def test_an_end_without_a_beginning_opens_nothing() -> None:
    block = unit()
    assert block.end_call()
    block.begin_call(closable=True)
    assert block.open_backwards == 1


def test_unpinned_a_unit_has_no_open_call_and_may_be_released() -> None:
    block = unit()
    block.begin_call(closable=False)
    block.pin()
    block.unpin()
    assert (block.pinned, block.open_backwards, block.end_unclosable()) == (False, 0, True)
