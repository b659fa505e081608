"""`./dev bench --check`: limits that figures must keep, and an exit status that says whether they did."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import pytest

from benchmarks import __main__ as bench
from benchmarks.suites import BENCHMARKS, Limit


@pytest.mark.parametrize(
    ("limit", "kept", "missed"),
    [
        (Limit(">=", 0.5), (0.5, 1), (0.499, 0)),
        (Limit("<=", 5), (5, 0), (5.01,)),
        (Limit("<", 0.05), (0.049,), (0.05,)),
    ],
    ids=str,
)
def test_limits(limit: Limit, kept: tuple[float, ...], missed: tuple[float, ...]) -> None:
    assert all(limit.holds(value) for value in kept)
    assert not any(limit.holds(value) for value in missed)


def test_the_limits_are_those_that_were_promised() -> None:
    """One line each, so that loosening one is seen in review."""
    declared = {
        f"{name} {figure} {limit}" for name, each in BENCHMARKS.items() for figure, limit in each.limits.items()
    }
    assert declared == {
        "drain ratio_to_raw >= 0.5",
        "drain wal_bytes <= 2000",
        "drain hot_share >= 0.45",
        "drain round_trips <= 0.02",
        "publish ratio_to_raw >= 0.9",
        "publish_many ratio_to_raw >= 0.8",
        "latency p50_ms <= 5",
        "latency p99_ms <= 25",
        "latency flood_notifications_per_event < 0.05",
        "horizon last_to_first >= 0.8",
        "transactional ratio_to_raw >= 0.6",
        "fanout ratio_to_raw >= 0.8",
        "growth kept_to_empty >= 0.95",
        "memory rss_mb <= 150",
        "memory rss_mb_large <= 150",
    }


FIGURES = ("per_second", "python_us", "postgres_us", "wal_bytes", "hot_share", "round_trips", "rss_mb", "p50_ms")
FIGURES += ("p99_ms", "notifications", "last_to_first")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_limit_is_on_a_figure_of_the_summary(name: str) -> None:
    """A mistyped figure would be reported as not measured, after minutes of measuring."""
    benchmark = BENCHMARKS[name]
    summary = benchmark.summary({arm.label: [dict.fromkeys(FIGURES, 1.0)] for arm in benchmark.arms(True)})
    assert set(benchmark.limits) <= set(summary)
    assert not any("not measured" in miss for miss in benchmark.misses(summary))
    assert len(benchmark.misses({})) == len(benchmark.limits)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command with given summaries in place of measurements."""

    def run(summaries: dict[str, dict[str, float]], *arguments: str) -> int:
        def measure(_server: object, benchmark: Any, *_: object) -> dict[str, Any]:
            return {"bench": benchmark.name, **summaries[benchmark.name]}

        def write(*_: object) -> None:
            raise AssertionError("a check writes nothing")

        monkeypatch.setattr(bench, "EmbeddedPostgres", lambda **_: nullcontext())
        monkeypatch.setattr(bench, "measure", measure)
        monkeypatch.setattr(bench.report, "write", write)
        monkeypatch.setattr(sys, "argv", ["bench", *arguments])
        return bench.main()

    return run


def test_check_names_each_miss(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    slow = {"growth": {"kept_to_empty": 0.7}, "memory": {"rss_mb": 151.0}, "fanout": {"ratio_to_raw": 0.8}}
    assert run(slow, *slow, "--check") == 1
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("miss:")] == [
        "miss: growth: kept_to_empty is 0.7, and should be >= 0.95",
        "miss: memory: rss_mb is 151, and should be <= 150",
        "miss: memory: rss_mb_large was not measured, and should be <= 150",
    ]
    assert run(slow, *slow) == 0, "without --check nothing is judged"


def test_check_without_a_miss(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fine = {name: {figure: limit.bound for figure, limit in each.limits.items()} for name, each in BENCHMARKS.items()}
    fine["latency"]["flood_notifications_per_event"] = 0.01
    assert run(fine, "--check") == 0
    assert f"{sum(map(len, fine.values()))} limits kept" in capsys.readouterr().err
