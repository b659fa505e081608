"""What is measured: each benchmark is a set of arms that are run in turn, and what to make of their medians."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

Options = Mapping[str, Any]
Results = Mapping[str, list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Arm:
    """One process to run: a system, a verb of it, and options."""

    label: str
    system: str
    verb: str
    options: Options = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Limit:
    """What a figure of a summary must keep to with `--check`."""

    relation: Literal[">=", "<=", "<"]
    bound: float

    def holds(self, value: float) -> bool:
        if self.relation == ">=":
            return value >= self.bound
        return value < self.bound or (self.relation == "<=" and value == self.bound)

    def __str__(self) -> str:
        return f"{self.relation} {self.bound:g}"


@dataclass(frozen=True, slots=True)
class Benchmark:
    name: str
    question: str
    arms: Callable[[bool], list[Arm]]  # the argument: quick
    summary: Callable[[Results], dict[str, Any]]
    repeats: int = 5
    quick_repeats: int = 2
    peers: str = ""  # the verb with which peers can take part
    limits: Mapping[str, Limit] = field(default_factory=dict)  # by the name of the figure in the summary

    def misses(self, summary: Mapping[str, Any]) -> list[str]:
        """Each figure that is beyond its limit, or that was not measured, in words."""
        found = []
        for figure, limit in self.limits.items():
            value = summary.get(figure)
            if value is None:
                found.append(f"{self.name}: {figure} was not measured, and should be {limit}")
            elif not limit.holds(value):
                found.append(f"{self.name}: {figure} is {value:g}, and should be {limit}")
        return found


def to_raw(bound: float) -> dict[str, Limit]:
    return {"ratio_to_raw": Limit(">=", bound)}


def middle(results: Results, label: str, figure: str = "per_second") -> float:
    return float(median(run[figure] for run in results[label]))


def ratio(results: Results, one: str, other: str, figure: str = "per_second") -> float:
    """Of the medians. The arms ran in turn, so what slowed the machine slowed both."""
    return round(middle(results, one, figure) / middle(results, other, figure), 3)


def against_raw(results: Results) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "holdfast": middle(results, "holdfast"),
        "raw": middle(results, "raw"),
        "ratio_to_raw": ratio(results, "holdfast", "raw"),
    }
    for figure in ("python_us", "postgres_us", "wal_bytes", "hot_share", "round_trips", "rss_mb"):
        if figure in results["holdfast"][0]:
            summary[figure] = round(middle(results, "holdfast", figure), 4)
    return summary


# Peers that take so much longer per event get a share of the events; their rate hardly depends on the number.
SHARE = {"procrastinate": 0.1, "dbos": 0.1, "awa": 0.2, "chancy": 0.25, "oban": 0.25}


def peer_arms(benchmark: Benchmark, quick: bool, peers: Sequence[str]) -> list[Arm]:
    """The peers do what the benchmark's first arm does."""
    options = benchmark.arms(quick)[0].options
    arms = []
    for peer in peers if benchmark.peers else ():
        own = dict(options)
        if "count" in own:
            own["count"] = int(own["count"] * SHARE.get(peer, 1))
        arms.append(Arm(peer, peer, benchmark.peers, own))
    return arms


def against_peers(results: Results, peers: Sequence[str]) -> dict[str, Any]:
    """Rates and their ratios; at a fixed rate the waits are what counts."""
    summary: dict[str, Any] = {"peers": {peer: middle(results, peer) for peer in peers}}
    if "p99_ms" in results["holdfast"][0]:
        for figure in ("p50_ms", "p99_ms"):
            summary[f"peers_{figure}"] = {peer: middle(results, peer, figure) for peer in peers}
    else:
        summary["ratio_to_peers"] = {peer: ratio(results, "holdfast", peer) for peer in peers}
    return summary


def drain(quick: bool) -> list[Arm]:
    options = {"count": 20_000 if quick else 50_000}
    return [Arm("holdfast", "holdfast", "drain", options), Arm("raw", "raw", "drain", options)]


def publish(quick: bool) -> list[Arm]:
    options = {"seconds": 3 if quick else 8, "connections": 8}
    return [
        Arm("holdfast", "holdfast", "publish", options),
        Arm("never", "holdfast", "publish", options | {"notify": "never"}),
        Arm("raw", "raw", "publish", options),
    ]


def publish_many(quick: bool) -> list[Arm]:
    options = {"count": 20_000 if quick else 100_000}
    return [
        Arm("holdfast", "holdfast", "publish_many", options),
        Arm("raw", "raw", "publish_many", options),
        Arm("copy", "raw", "publish_many", options | {"kind": "copy"}),
    ]


def latency(quick: bool) -> list[Arm]:
    seconds = 6 if quick else 20
    return [
        Arm("holdfast", "holdfast", "latency", {"seconds": seconds, "connections": 2, "rate": 50}),
        Arm("busy", "holdfast", "latency", {"seconds": seconds, "connections": 8, "rate": 1_000}),
        Arm("flood", "holdfast", "latency", {"seconds": seconds, "connections": 8, "rate": 0}),
    ]


def latency_summary(results: Results) -> dict[str, Any]:
    return {
        "holdfast": middle(results, "holdfast"),
        "p50_ms": middle(results, "holdfast", "p50_ms"),
        "p99_ms": middle(results, "holdfast", "p99_ms"),
        "busy_per_second": middle(results, "busy"),
        "busy_p50_ms": middle(results, "busy", "p50_ms"),
        "busy_p99_ms": middle(results, "busy", "p99_ms"),
        "flood_per_second": middle(results, "flood"),
        "flood_notifications_per_event": middle(results, "flood", "notifications"),
    }


def horizon(quick: bool) -> list[Arm]:
    options = {"count": 150_000 if quick else 200_000, "hold": True}
    return [Arm("holdfast", "holdfast", "drain", options), Arm("raw", "raw", "drain", options)]


def horizon_summary(results: Results) -> dict[str, Any]:
    return against_raw(results) | {"last_to_first": middle(results, "holdfast", "last_to_first")}


def transactional(quick: bool) -> list[Arm]:
    options = {"count": 4_000 if quick else 20_000}
    return [Arm("holdfast", "holdfast", "transactional", options), Arm("raw", "raw", "transactional", options)]


def failures(quick: bool) -> list[Arm]:
    options = {"count": 10_000 if quick else 30_000}
    return [
        Arm("holdfast", "holdfast", "failures", options),
        Arm("retried", "holdfast", "failures", options | {"kind": "retried"}),
        Arm("raw", "raw", "failures", options),
    ]


def fanout(quick: bool) -> list[Arm]:
    options = {"count": 6_000 if quick else 20_000, "handlers": 3}
    return [Arm("holdfast", "holdfast", "fanout", options), Arm("raw", "raw", "fanout", options)]


def large(quick: bool) -> list[Arm]:
    options = {"count": 3_000 if quick else 10_000, "size": 10_000}
    return [Arm("holdfast", "holdfast", "drain", options), Arm("raw", "raw", "drain", options)]


def growth(quick: bool) -> list[Arm]:
    count, kept = (10_000, 200_000) if quick else (50_000, 10_000_000)
    return [
        Arm("holdfast", "holdfast", "drain", {"count": count}),
        Arm("kept", "holdfast", "drain", {"count": count, "kept": kept}),
        Arm("raw", "raw", "drain", {"count": count}),
    ]


def memory(quick: bool) -> list[Arm]:
    # `kept` is how many of the backlog are handled before the peak is read.
    many = {"count": 200_000 if quick else 1_000_000, "kept": 20_000}
    big = {"count": 500 if quick else 2_000, "size": 260_000}
    return [Arm("holdfast", "holdfast", "memory", many), Arm("large", "holdfast", "memory", big)]


# What no noise of a machine can move. Of an event's two updates the claim should be heap-only.
DRAIN_COUNTERS = {
    "wal_bytes": Limit("<=", 2_000),
    "hot_share": Limit(">=", 0.45),
    "round_trips": Limit("<=", 0.02),
}

BENCHMARKS = {
    each.name: each
    for each in (
        Benchmark(
            "drain",
            "How fast does one process deliver what is waiting?",
            drain,
            against_raw,
            peers="drain",
            limits=to_raw(0.5) | DRAIN_COUNTERS,
        ),
        Benchmark(
            "publish",
            "What does publishing add to a business transaction, with 8 connections?",
            publish,
            lambda results: against_raw(results) | {"when_idle_to_never": ratio(results, "holdfast", "never")},
            peers="publish",
            limits=to_raw(0.9),
        ),
        Benchmark(
            "publish_many",
            "How fast is bulk publishing, beside the fastest insert of the same rows?",
            publish_many,
            lambda results: against_raw(results) | {"ratio_to_copy": ratio(results, "holdfast", "copy")},
            peers="publish_many",
            limits=to_raw(0.8),
        ),
        Benchmark(
            "latency",
            "How long from commit to handler, idle and busy?",
            latency,
            latency_summary,
            quick_repeats=1,
            peers="latency",
            limits={
                "p50_ms": Limit("<=", 5),
                "p99_ms": Limit("<=", 25),
                "flood_notifications_per_event": Limit("<", 0.05),
            },
        ),
        Benchmark(
            "horizon",
            "Does a snapshot that is held open slow the drain down?",
            horizon,
            horizon_summary,
            repeats=3,
            quick_repeats=1,
            limits={"last_to_first": Limit(">=", 0.8)},
        ),
        Benchmark(
            "transactional",
            "How fast are handlers that write in the same transaction?",
            transactional,
            against_raw,
            limits=to_raw(0.6),
        ),
        Benchmark(
            "failures", "How fast do events fail for good, and after a retry?", failures, against_raw, peers="failures"
        ),
        Benchmark(
            "fanout",
            "How fast are three handlers per event, in deliveries?",
            fanout,
            against_raw,
            limits=to_raw(0.8),
        ),
        Benchmark("large", "How fast are payloads of 10 KB?", large, against_raw),
        Benchmark(
            "growth",
            "Do the events that are kept slow the drain down?",
            growth,
            lambda results: against_raw(results) | {"kept_to_empty": ratio(results, "kept", "holdfast")},
            repeats=2,
            quick_repeats=1,
            limits={"kept_to_empty": Limit(">=", 0.95)},
        ),
        Benchmark(
            "memory",
            "How much memory does a worker need with a backlog of many, and of large, events?",
            memory,
            lambda results: {
                "holdfast": 0.0,
                "rss_mb": middle(results, "holdfast", "rss_mb"),
                "rss_mb_large": middle(results, "large", "rss_mb"),
            },
            repeats=1,
            quick_repeats=1,
            limits={"rss_mb": Limit("<=", 150), "rss_mb_large": Limit("<=", 150)},
        ),
    )
}
