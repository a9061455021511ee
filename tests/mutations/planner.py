"""What the planner counts."""

from __future__ import annotations

from tests.mutations import Mutation

PLANNER = (
    Mutation(
        "the plan counts states on a drive once, not read and written",
        "ls_strategy/plan.py",
        "read, written = read + moved, written + moved",
        "read = read + moved",
        ("tests/unit/test_plan.py::test_bytes_of_a_drive_per_step",),
    ),
    Mutation(
        "the traffic of gradients over the bus ignores accumulation",
        "ls_strategy/extras/planner/traffic.py",
        ".averages * micro_batches + shard_bytes",
        ".averages + shard_bytes",
        ("tests/unit/test_planner_forecast.py::test_offloaded_gradients_cross_the_bus_in_every_micro_batch",),
    ),
    Mutation(
        "on CPUs, states in host memory do not count towards fitting",
        "ls_strategy/extras/planner/forecast.py",
        'memory = [("host memory", peak.device + host, hardware.device_room)]',
        'memory = [("host memory", peak.device, hardware.device_room)]',
        ("tests/unit/test_planner_forecast.py::test_on_cpus_what_is_offloaded_takes_the_same_memory",),
    ),
    Mutation(
        "the upper bound of a step's time ignores what is sent",
        "ls_strategy/extras/planner/forecast.py",
        "compute / EFFICIENCY + sum(others)",
        "compute / EFFICIENCY",
        ("tests/unit/test_planner_forecast.py::test_both_bounds_of_the_time_count_what_is_sent",),
    ),
)
