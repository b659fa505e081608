"""The benchmarks of loads as applications have them: handlers that wait or block, neighbours, a steady stream."""

from typing import Any

from benchmarks.benchmark import Arm, Benchmark, Limit, Results, middle, ratio

# The peers that have what is asked for here: handlers of several kinds beside each other, in one process.
PEERS = ("pgqueuer", "faststream-outbox")


def io(quick: bool) -> list[Arm]:
    options = {"count": 60_000 if quick else 100_000, "pause": 0.005}
    return [
        Arm("holdfast", "holdfast", "drain", options),
        Arm("fixed", "holdfast", "drain", options | {"concurrency": 100}),
    ]


def io_also(results: Results) -> dict[str, Any]:
    return {"auto_to_fixed": ratio(results, "holdfast", "fixed")}


def sync(quick: bool) -> list[Arm]:
    return [Arm("holdfast", "holdfast", "drain", {"count": 10_000 if quick else 50_000, "kind": "sync"})]


# Of the slow handler; its events are older, and each takes so many seconds.
BACKLOG = {"open": 20_000, "pause": 1.0}


def neighbour(quick: bool) -> list[Arm]:
    options = {"count": 10_000 if quick else 30_000}
    return [
        Arm("holdfast", "holdfast", "neighbour", options | BACKLOG),
        Arm("alone", "holdfast", "neighbour", options | {"open": 0}),
    ]


def neighbour_also(results: Results) -> dict[str, Any]:
    return {"beside_to_alone": ratio(results, "holdfast", "alone")}


def steady(quick: bool) -> list[Arm]:
    options = {"seconds": 4 if quick else 60, "connections": 8, "rate": 2_000}
    return [
        Arm("holdfast", "holdfast", "steady", options | {"each": 10}),
        Arm("one", "holdfast", "steady", options | {"each": 1}),
    ]


def steady_also(results: Results) -> dict[str, Any]:
    """`one_…`: of one event per transaction. A machine that does not manage 2,000 of these a second is measured so."""
    found: dict[str, Any] = {
        "max_ms": middle(results, "holdfast", "max_ms"),
        "rate": middle(results, "holdfast"),
        "one_p50_ms": middle(results, "one", "p50_ms"),
        "one_p99_ms": middle(results, "one", "p99_ms"),
        "one_max_ms": middle(results, "one", "max_ms"),
        "one_rate": middle(results, "one"),
    }
    best = min((middle(results, peer, "p99_ms") for peer in PEERS if peer in results), default=None)
    if best is not None:
        found["p99_to_best_peer"] = round(middle(results, "holdfast", "p99_ms") / best, 3)
    return found


def types(quick: bool) -> list[Arm]:
    options = {"count": 500 if quick else 2_500, "handlers": 20}
    return [
        Arm("holdfast", "holdfast", "types", options),
        Arm("few", "holdfast", "fanout", options),
    ]


def types_also(results: Results) -> dict[str, Any]:
    return {"many_to_few": ratio(results, "holdfast", "few")}


LOADS = (
    Benchmark(
        "io",
        "How fast are handlers that await for 5 ms, at default settings?",
        io,
        io_also,
        repeats=3,
        quick_repeats=1,
        peers="drain",
        able=PEERS,
        limits={"ratio_to_fastest_peer": Limit(">=", 2.5, if_measured=True)},
    ),
    Benchmark(
        "sync",
        "How fast are handlers that are plain functions, in threads?",
        sync,
        quick_repeats=3,
        peers="drain",
        able=PEERS,
        limits={"ratio_to_fastest_peer": Limit(">=", 2, if_measured=True)},
    ),
    Benchmark(
        "neighbour",
        "How fast is a handler beside one that takes a second and has a backlog?",
        neighbour,
        neighbour_also,
        peers="neighbour",
        able=PEERS,
        limits={
            "beside_to_alone": Limit(">=", 0.8),
            "ratio_to_fastest_peer": Limit(">=", 5, if_measured=True),
        },
    ),
    Benchmark(
        "steady",
        "How long from commit to handler at 2,000 events a second, ten and one per transaction?",
        steady,
        steady_also,
        figure="p99_ms",
        unit="ms",
        repeats=1,
        quick_repeats=1,
        peers="steady",
        able=PEERS,
        limits={"p99_ms": Limit("<=", 15), "p99_to_best_peer": Limit("<=", 0.5, if_measured=True)},
    ),
    Benchmark(
        "types",
        "How fast are 50 event types with 20 handlers each, beside one type with 20?",
        types,
        types_also,
        unit="deliveries/s",
        quick_repeats=3,
        peers="types",
        able=("pgqueuer",),
    ),
)
