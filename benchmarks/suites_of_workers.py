"""The benchmarks of workers as they are run: how they start, and what they hold when the database is slow."""

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


def slow_disk(quick: bool) -> list[Arm]:
    options = {"count": 10_000 if quick else 50_000}
    return [
        Arm("holdfast", "holdfast", "slow_disk", options),
        Arm("killed", "holdfast", "slow_disk_killed", {"count": 10_000}),
    ]


def slow_disk_also(results: Results) -> dict[str, Any]:
    """The worst run counts, not the median."""
    return {
        "unsettled_worst": max(run["unsettled_worst"] for run in results["holdfast"]),
        "repeats_after_kill": max(run["repeats_after_kill"] for run in results["killed"]),
        "bound": middle(results, "holdfast", "bound"),
    }


def idle(quick: bool) -> list[Arm]:
    seconds = 6 if quick else 120  # in full, with a round of each worker's maintenance
    return [
        Arm("holdfast", "holdfast", "idle", {"processes": 20, "seconds": seconds}),
        Arm("one", "holdfast", "idle", {"processes": 1, "seconds": seconds}),
    ]


def idle_also(results: Results) -> dict[str, Any]:
    return {
        "queries_20": middle(results, "holdfast", "queries"),
        "queries_1": middle(results, "one", "queries"),
        "connections_per_worker": middle(results, "holdfast", "per_worker"),
        "connections_of_one": middle(results, "one", "per_worker"),
    }


WORKERS = (
    Benchmark(
        "slow_disk",
        "How much is handled and not settled when commits take 60 ms, and how much runs again after a kill?",
        slow_disk,
        slow_disk_also,
        repeats=3,
        # Two batches and what runs, at default settings.
        limits={"unsettled_worst": Limit("<=", 1_100), "repeats_after_kill": Limit("<=", 1_100)},
    ),
    Benchmark(
        "idle",
        "What do 20 workers, and one, cost while nothing happens?",
        idle,
        idle_also,
        figure="queries",
        unit="queries a second",
        repeats=1,
        quick_repeats=1,
        peers="idle",
        limits={
            "queries_20": Limit("<=", 25),
            "connections_per_worker": Limit("<=", 3),
            "connections_of_one": Limit("<=", 3),
        },
    ),
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
