"""What a benchmark is: arms that are run in turn, what to make of their medians, and the limits for that."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

Options = Mapping[str, Any]
Results = Mapping[str, list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Arm:
    """One process to run: a system, a verb of it, and options.

    Arms that only read (`reads`) share a database. One that is only reported may run in `every` fifth turn.
    """

    label: str
    system: str
    verb: str
    options: Options = field(default_factory=dict)
    reads: bool = False
    every: int = 1


@dataclass(frozen=True, slots=True)
class Limit:
    """What a figure of a summary must keep to with `--check`."""

    relation: Literal[">=", "<=", "<"]
    bound: float
    if_measured: bool = False  # a figure that is only there when peers take part

    def holds(self, value: float) -> bool:
        if self.relation == ">=":
            return value >= self.bound
        return value < self.bound or (self.relation == "<=" and value == self.bound)

    def __str__(self) -> str:
        return f"{self.relation} {self.bound:g}"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """The arms `holdfast` and `raw`, where there is a control, give the ratio; the others, and `also`, tell more."""

    name: str
    question: str
    arms: Callable[[bool], list[Arm]]  # the argument: quick
    also: Callable[[Results], dict[str, Any]] = lambda results: {}
    figure: str = "per_second"
    unit: Literal["events/s", "deliveries/s", "requests/s", "ms", "MB", "queries a second"] = "events/s"
    repeats: int = 5
    quick_repeats: int = 2
    peers: str = ""  # the verb with which peers can take part
    able: tuple[str, ...] = ()  # those that can; empty: all
    limits: Mapping[str, Limit] = field(default_factory=dict)  # by the name of the figure in the summary

    def summary(self, results: Results, peers: Sequence[str] = ()) -> dict[str, Any]:
        """What the runs come to. Every ratio to a control or a peer is above one where Holdfast is better."""
        summary: dict[str, Any] = {
            "bench": self.name,
            "unit": self.unit,
            "holdfast": middle(results, "holdfast", self.figure),
        }
        if "raw" in results:
            summary |= {"raw": middle(results, "raw", self.figure), "ratio_to_raw": self.advantage(results, "raw")}
        summary |= self.also(results)
        for figure in COSTS:
            if figure not in summary and figure in numbers(results["holdfast"]):
                summary[figure] = middle(results, "holdfast", figure)
        if peers:
            summary |= self._beside(results, peers)
        summary["arms"] = {
            label: {figure: middle(results, label, figure) for figure in numbers(runs)}
            for label, runs in results.items()
        }
        return summary

    def advantage(self, results: Results, other: str) -> float:
        """How many times better Holdfast is: higher rates, or shorter waits, or less memory."""
        if self.unit.endswith("/s"):
            return ratio(results, "holdfast", other, self.figure)
        return ratio(results, other, "holdfast", self.figure)

    def _beside(self, results: Results, peers: Sequence[str]) -> dict[str, Any]:
        ratios = {peer: self.advantage(results, peer) for peer in peers}
        found: dict[str, Any] = {
            "peers": {peer: middle(results, peer, self.figure) for peer in peers},
            "ratio_to_peers": ratios,
            "ratio_to_fastest_peer": min(ratios.values()),
        }
        found |= {f"ratio_to_{peer.replace('-', '_')}": value for peer, value in ratios.items()}
        if "p99_ms" in results["holdfast"][0]:
            found["peers_p99_ms"] = {peer: middle(results, peer, "p99_ms") for peer in peers}
        return found

    def judged(self, summary: Mapping[str, Any]) -> dict[str, Limit]:
        return {figure: limit for figure, limit in self.limits.items() if not limit.if_measured or figure in summary}

    def misses(self, summary: Mapping[str, Any]) -> list[str]:
        """Each figure that is beyond its limit, or that was not measured, in words."""
        found = []
        for figure, limit in self.judged(summary).items():
            value = summary.get(figure)
            if value is None:
                found.append(f"{self.name}: {figure} was not measured, and should be {limit}")
            elif not limit.holds(value):
                found.append(f"{self.name}: {figure} is {value:g}, and should be {limit}")
        return found


# What is told of the arm `holdfast` wherever it was counted.
COSTS = (
    *("p50_ms", "p99_ms", "python_us", "postgres_us", "wal_bytes", "round_trips", "statements", "index_writes"),
    *("commits", "hot_share", "rss_mb"),
)


def middle(results: Results, label: str, figure: str = "per_second") -> float:
    return round(float(median(run[figure] for run in results[label])), 4)


def numbers(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The figures that every run has: a share of updates, for one, is only there if there was an update."""
    return [figure for figure in runs[0] if all(isinstance(run.get(figure), int | float) for run in runs)]


def course(results: Results, label: str, figure: str) -> list[float]:
    """The median of each part of a figure that has several."""
    return [float(median(parts)) for parts in zip(*(run[figure] for run in results[label]), strict=True)]


def ratio(results: Results, one: str, other: str, figure: str = "per_second") -> float:
    """Of the medians. The arms ran in turn, so what slowed the machine slowed both."""
    return round(middle(results, one, figure) / middle(results, other, figure), 3)


def paired(results: Results, one: str, other: str, figure: str = "per_second") -> float:
    """The median of the ratios within each turn: closer than a ratio of medians where turns are short and many."""
    ratios = [a[figure] / b[figure] for a, b in zip(results[one], results[other], strict=True)]
    return round(float(median(ratios)), 3)


def to_raw(bound: float) -> dict[str, Limit]:
    return {"ratio_to_raw": Limit(">=", bound)}


# Peers that take so much longer per event get a share of the events; their rate hardly depends on the number.
SHARE = {"procrastinate": 0.1, "dbos": 0.1, "awa": 0.2, "chancy": 0.25, "oban": 0.25}


def peer_arms(benchmark: Benchmark, quick: bool, peers: Sequence[str]) -> list[Arm]:
    """The peers do what the benchmark's first arm does."""
    options = benchmark.arms(quick)[0].options
    arms = []
    for peer in peers if benchmark.peers else ():
        if benchmark.able and peer not in benchmark.able:
            continue
        own = dict(options)
        if "count" in own:
            own["count"] = int(own["count"] * SHARE.get(peer, 1))
        arms.append(Arm(peer, peer, benchmark.peers, own))
    return arms
