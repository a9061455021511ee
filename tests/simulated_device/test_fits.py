"""Whole fits on the simulated device: the same bits as on the CPU, and nothing that is used before it is there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.marks import wide as wide_case
from tests.simulated_device.device import Outcome, run
from tests.simulated_device.programs import (
    FITS,
    all_parts,
    fit,
    fit_all,
    in_chunks,
    order_of_chunks,
    places_of_updates,
    saved,
    saved_through_device,
    streamed,
    streams_of_copies,
    trained,
    wide,
)


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == expected["losses"]
    for name, value in expected["weights"].items():
        assert torch.equal(found["weights"][name], value), name


@pytest.fixture(scope="module")
def on_cpu(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """Every fit that this session compares, on the CPU, in one process."""
    same = test_a_fit_is_that_of_the_cpu
    names = [item.callspec.params["name"] for item in request.session.items if getattr(item, "function", None) is same]
    return run(fit_all, names, simulated=False).result


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", FITS)
def test_a_fit_is_that_of_the_cpu(name: str, on_cpu: dict[str, dict[str, Any]]) -> None:
    on_device = run(fit, *FITS[name])
    assert on_device.hazards == []
    assert_equal(on_device.result, on_cpu[name])


@pytest.mark.parametrize(
    "name",
    [
        "stage 3, all on cpu, stops early",
        *(wide_case(name) for name in FITS if not name.startswith("activations on cpu")),
    ],
)
def test_memory_of_copies_is_used_again_in_the_order_of_the_device(name: str) -> None:
    """Else buffers that were gathered from the host pile up, since the host runs ahead of the device."""
    assert run(fit, *FITS[name]).delayed == 0


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_streamed_inference_is_that_of_the_cpu(tier: str) -> None:
    on_device = run(streamed, tier)
    assert on_device.hazards == []
    assert torch.equal(on_device.result, streamed(torch.device("cpu"), tier))


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize("program", [(saved, 2), (saved, 3), (saved, 2, "file"), (saved_through_device,)])
def test_a_save_in_the_background_is_that_of_its_step(program: tuple[Any, ...]) -> None:
    on_device = run(*program)
    assert on_device.hazards == []
    end, *resumed = on_device.result
    for weights in resumed:
        assert all(torch.equal(weights[name], value) for name, value in end.items())


@pytest.fixture(scope="module")
def parts() -> Outcome:
    """What parts of the package return that are driven directly, in one process."""
    found = run(all_parts)
    assert found.hazards == []
    return found


def test_a_target_is_freed_when_its_copy_is_over(parts: Outcome) -> None:
    assert not parts.result["dropped"].any()


def test_a_save_that_an_update_overtakes_has_the_values_of_its_call(parts: Outcome) -> None:
    assert parts.result["overtaken"].tolist() == list(range(1, 13))


def test_memory_for_results_is_used_again_when_they_have_arrived(parts: Outcome) -> None:
    assert parts.result["crowded"] == (1, [0.0, 1.0, 2.0])


@pytest.mark.parametrize("name", ["given up", "given up, sent again"])
def test_a_region_that_nobody_needed_leaves_its_memory_when_its_copy_is_over(name: str, parts: Outcome) -> None:
    assert (parts.result[name] == 4.0).all()


@pytest.mark.sample(1)
@pytest.mark.parametrize("parameters", ["cpu", None])
def test_the_host_pins_what_is_planned(parameters: str | None) -> None:
    """And two units on their way to the device. Torch's own blocks would take 1.45 times as much here."""
    offload = {"optimizer": "cpu", "gradients": "cpu", "parameters": parameters, "step_on": "cpu"}
    found = run(wide, {"stage": 3 if parameters else 2, "offload": offload})
    planned, unit = found.result
    assert found.hazards == []
    assert planned <= found.peak_pinned_bytes <= planned + 2 * unit + 64 * 4096


@pytest.mark.wide
@pytest.mark.parametrize(("step_on", "kind"), [("cpu", "cpu"), ("device", "sim")])
def test_updates_run_where_they_should_also_while_backward_runs(step_on: str, kind: str) -> None:
    on_device = run(places_of_updates, step_on)
    assert on_device.hazards == []
    assert on_device.result == {kind}


def test_updates_on_the_device_in_chunks_are_those_of_the_cpu() -> None:
    on_device = run(in_chunks)
    assert on_device.hazards == []
    assert_equal(on_device.result, in_chunks(torch.device("cpu")))


def test_the_host_waits_for_a_chunk_when_two_more_are_on_their_way() -> None:
    """Else nothing goes to the device while results come back, and half of the bus is idle."""
    on_device = run(order_of_chunks, 5)
    order, states = on_device.result
    assert on_device.hazards == []
    assert order == ["send"] * 3 + ["wait", "send"] * 2 + ["wait"] * 3
    assert torch.equal(states, torch.arange(5 << 12) + 1.0)


ALL_ON_HOST = {"optimizer": "cpu", "parameters": "cpu", "gradients": "cpu", "step_on": "cpu"}

ALL_ON_DRIVE = {"optimizer": "nvme", "parameters": "nvme", "gradients": "nvme", "step_on": "cpu"}


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("options", "precision", "allowed"),
    [
        ({"stage": 2}, "32-true", 0),
        ({"stage": 3}, "16-true", 1),
        ({"stage": 2, "offload": {"optimizer": "cpu", "step_on": "device"}}, "32-true", 1),
        ({"stage": 3, "offload": ALL_ON_HOST}, "16-true", 1),
        ({"stage": 3, "offload": ALL_ON_DRIVE}, "32-true", 1),
    ],
)
def test_training_waits_for_the_device_once_a_step(options: dict[str, Any], precision: str, allowed: int) -> None:
    """For the scale of the loss, or for the factor that clips where the host updates; not once for every unit."""
    trainer = {"precision": precision, "gradient_clip_val": 0.1}
    options = {**options, "precision": {"loss_scale": {"static": 256}}}  # a skipped step would wait less
    short, long = (run(trained, options, {**trainer, "max_steps": steps}, 6).waits for steps in (4, 9))
    assert sum((long - short).values()) <= 5 * allowed, long - short


@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_reads_from_a_drive_have_a_stream_of_their_own(precision: str) -> None:
    """In the stream of the model they would wait for all of its work, and it for them."""
    offload = {"optimizer": "nvme", "parameters": "nvme", "step_on": "cpu"}
    found = run(streams_of_copies, {"stage": 3, "offload": offload}, precision)
    assert found.hazards == []
    assert found.result
    assert all(stream != 0 for stream, _ in found.result), found.result


def test_rows_are_put_in_order_without_waiting(parts: Outcome) -> None:
    sorted_rows, back = parts.result["reordered"]
    assert sorted_rows[:, 0].tolist() == [0, 2, 6, 8, 10, 12, 4]
    assert back[:, 0].tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert not [line for line in parts.waits if line.startswith("moe/")]
