"""The benchmarks of workers as they are run: how they start, and what they cost while nothing happens."""

from typing import Any

from benchmarks.benchmark import Arm, Benchmark, Limit, Results, middle


def start(quick: bool) -> list[Arm]:
    options = {"count": 3 if quick else 10}
    return [
        Arm("holdfast", "holdfast", "start", options),
        Arm("command", "holdfast", "start", options | {"kind": "command"}),
    ]


def start_also(results: Results) -> dict[str, Any]:
    return {
        "first_event_ms": middle(results, "holdfast", "first_event_ms"),
        "command_first_event_ms": middle(results, "command", "first_event_ms"),
    }


WORKERS = (
    Benchmark(
        "start",
        "How long does a program take from its start to its first event?",
        start,
        start_also,
        figure="first_event_ms",
        unit="ms",
        repeats=3,
        quick_repeats=2,
        peers="start",
        limits={"first_event_ms": Limit("<=", 450), "command_first_event_ms": Limit("<=", 450)},
    ),
)
