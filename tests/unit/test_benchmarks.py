"""`./dev bench`: what its summaries say, the limits that figures must keep, and what it prints and writes."""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import __main__ as bench
from benchmarks import report, runner, terminal
from benchmarks.benchmark import Arm, Benchmark, Limit, numbers, peer_arms
from benchmarks.databases import Databases, NoSpace, required_bytes
from benchmarks.suites import BENCHMARKS
from benchmarks.systems.process import arguments
from benchmarks.systems.tables import pace
from benchmarks.workload import payload_of

# --- limits ---


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
        "idle queries_20 <= 25",
        "idle connections_per_worker <= 3",
        "idle connections_of_one <= 3",
        "start first_event_ms <= 450",
        "start command_first_event_ms <= 450",
        "drain ratio_to_raw >= 0.75",
        "drain two_to_one >= 1",
        "drain ratio_to_fastest_peer >= 1.6",
        "drain ratio_to_faststream_outbox >= 4",
        "drain wal_bytes <= 2000",
        "drain hot_share >= 0.45",
        "drain round_trips <= 0.02",
        "publish ratio_to_raw >= 0.9",
        "publish when_idle_to_never >= 0.9",
        "publish when_idle_to_never_16 >= 0.8",
        "business with_to_without >= 0.42",
        "business ratio_to_fastest_peer >= 1.15",
        "business alone_round_trips <= 1.01",
        "publish_many ratio_to_raw >= 0.8",
        "http ratio_to_raw >= 0.87",
        "batch batch_to_single >= 1.3",
        "partitioned partitioned_to_plain >= 0.9",
        "partitioned longest_publish_s <= 2",
        "partitioned longest_gap_s <= 2",
        "partitioned failed_publishes <= 0",
        "partitioned lost_events <= 0",
        "partitioned drop_s <= 1",
        "limited concurrency_to_unlimited >= 0.7",
        "limited rate_to_unlimited >= 0.7",
        "latency p50_ms <= 3",
        "latency p99_ms <= 15",
        "latency busy_p99_ms <= 50",
        "latency flood_notifications_per_event < 0.05",
        "horizon last_to_first >= 0.8",
        "ordered ordered_to_unordered >= 0.5",
        "ordered inversions <= 0",
        "ordered hot_to_keyed <= 1.5",
        "fair before_single <= 1000",
        "brief brief_to_kept >= 1",
        "slow_disk unsettled_worst <= 1100",
        "slow_disk repeats_after_kill <= 1100",
        "observability traces_1_to_off >= 0.85",
        "transactional ratio_to_raw >= 0.75",
        "transactional ratio_to_raw_async_session >= 0.75",
        "transactional ratio_to_raw_session >= 0.75",
        "transactional ratio_to_raw_psycopg_async >= 0.75",
        "transactional ratio_to_raw_psycopg >= 0.75",
        "transactional ratio_to_raw_django >= 0.75",
        "fanout ratio_to_raw >= 0.8",
        "growth kept_to_empty >= 0.95",
        "growth claim_p99_to_empty <= 1.2",
        "observability log_metrics_to_off >= 0.9",
        "scrape ms_kept_to_empty <= 1.5",
        "scrape status_ms_kept_to_empty <= 1.5",
        "relay ratio_to_raw_nats >= 0.7",
        "relay ratio_to_raw_redis >= 0.7",
        "consume ratio_to_raw_nats >= 0.7",
        "consume ratio_to_raw_redis >= 0.7",
        "broker_latency p99_ms <= 50",
        "broker_latency p99_ms_redis <= 50",
        "memory rss_mb <= 150",
        "memory rss_mb_large <= 150",
        "failures ratio_to_fastest_peer >= 3",
        "io ratio_to_fastest_peer >= 2.5",
        "sync ratio_to_fastest_peer >= 2",
        "neighbour beside_to_alone >= 0.8",
        "neighbour ratio_to_fastest_peer >= 5",
        "steady p99_ms <= 15",
        "steady p99_to_best_peer <= 0.5",
    }


# --- summaries ---

FIGURES = ("per_second", "python_us", "postgres_us", "wal_bytes", "hot_share", "round_trips", "statements")
FIGURES += ("index_writes", "rss_mb", "p50_ms", "p99_ms", "ms", "claim_p50_ms", "claim_p99_ms", "notifications")
FIGURES += ("first_event_ms", "unsettled_worst", "repeats_after_kill", "bound")
FIGURES += ("queries", "per_worker")
FIGURES += ("conversion_s", "longest_publish_s", "longest_gap_s", "failed_publishes", "drop_s")
FIGURES += ("hot_per_second", "lost_events", "max_ms")
PEERS = ["pgqueuer", "faststream-outbox"]


def summary_of(benchmark: Benchmark, quick: bool, peers: list[str], **values: float) -> dict[str, Any]:
    """With every figure 1, but for those of the arms that are named."""
    arms = benchmark.arms(quick) + peer_arms(benchmark, quick, peers)
    same: dict[str, Any] = dict.fromkeys(FIGURES, 1.0) | {
        "last_to_first": 1.0,
        "pace": [1.0, 2.0],
        "inversions": 1.0,
        "before_single": 1,
    }
    results = {arm.label: [same | {benchmark.figure: values.get(arm.label, 1.0)}] for arm in arms}
    summary = benchmark.summary(results, [arm.label for arm in arms if arm.system in peers])
    options = {arm.label: dict(arm.options) for arm in arms}
    targets = {figure: str(limit) for figure, limit in benchmark.limits.items()}
    machine = {"postgres": "18.0", "python": "3.11", "cores": 2}
    return summary | machine | {"options": options, "targets": targets}


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_summary_has_its_figures(name: str, quick: bool) -> None:
    """A mistyped figure would be reported as not measured, after minutes of measuring."""
    benchmark = BENCHMARKS[name]
    summary = summary_of(benchmark, quick, PEERS)
    assert {"bench", "unit", "holdfast", "arms"} <= set(summary)
    assert ("raw" in summary) == ("ratio_to_raw" in summary) == ("raw" in summary["arms"])
    assert set(benchmark.limits) <= set(summary)
    assert not any("not measured" in miss for miss in benchmark.misses(summary))
    without_peers = summary_of(benchmark, quick, [])
    assert not any("not measured" in miss for miss in benchmark.misses(without_peers))
    assert len(benchmark.misses({})) == sum(not limit.if_measured for limit in benchmark.limits.values())
    assert json.dumps(summary)


def test_a_figure_that_one_run_lacks_is_left_out() -> None:
    """A run without an update has no share of heap-only ones; what was measured for minutes is not lost for it."""
    whole = {"per_second": 3.0, "hot_share": 1.0, "round_trips": 4.0}
    runs = {label: [whole, {"per_second": 1.0, "round_trips": 4.0}] for label in ("holdfast", "raw")}
    assert numbers(runs["holdfast"]) == ["per_second", "round_trips"]
    benchmark = replace(BENCHMARKS["fanout"], also=lambda results: {})
    summary = benchmark.summary(runs)
    assert summary["round_trips"] == 4.0
    assert "hot_share" not in summary and "hot_share" not in summary["arms"]["raw"]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_quick_does_some_of_what_is_done_in_full(name: str) -> None:
    quick, full = ({arm.label: arm for arm in BENCHMARKS[name].arms(quick)} for quick in (True, False))
    assert {"holdfast"} <= set(quick) <= set(full)
    assert ("raw" in quick) == ("raw" in full)
    assert all((arm.system, arm.verb) == (full[label].system, full[label].verb) for label, arm in quick.items())


def test_ratios_are_above_one_where_holdfast_is_better() -> None:
    """Higher rates, shorter waits, less memory."""
    drain = summary_of(BENCHMARKS["drain"], True, PEERS, holdfast=200.0, raw=250.0, pgqueuer=100.0)
    assert drain["ratio_to_raw"] == 0.8
    assert drain["ratio_to_peers"] == {"pgqueuer": 2.0, "faststream-outbox": 200.0}
    assert drain["ratio_to_fastest_peer"] == 2.0
    assert drain["ratio_to_faststream_outbox"] == 200.0
    assert drain["peers"] == {"pgqueuer": 100.0, "faststream-outbox": 1.0}
    latency = summary_of(BENCHMARKS["latency"], True, PEERS, holdfast=2.0, raw=1.0, pgqueuer=3.0)
    assert (latency["unit"], latency["p50_ms"], latency["ratio_to_raw"]) == ("ms", 2.0, 0.5)
    assert latency["ratio_to_peers"]["pgqueuer"] == 1.5
    memory = summary_of(BENCHMARKS["memory"], True, [], holdfast=50.0, raw=60.0)
    assert (memory["unit"], memory["rss_mb"], memory["ratio_to_raw"]) == ("MB", 50.0, 1.2)


def test_the_ratios_of_busy_producers() -> None:
    busy = {"busy": 90.0, "busy never": 100.0, "busy 16": 80.0, "busy never 16": 100.0}
    summary = summary_of(BENCHMARKS["publish"], True, [], **busy)
    assert (summary["when_idle_to_never"], summary["when_idle_to_never_16"]) == (0.9, 0.8)


def test_the_grid_of_publish() -> None:
    """1, 8 and 16 connections, with a business row and without, three ways to notify, each beside raw."""
    arms = BENCHMARKS["publish"].arms(False)
    grid = {
        (arm.system, arm.options["connections"], arm.options.get("bare"), arm.options.get("notify", "when_idle"))
        for arm in arms
        if not arm.options.get("busy")
    }
    assert len(grid) == 3 * 2 * (3 + 1)
    assert [arm.label for arm in arms if arm.options.get("busy")] == ["busy", "busy never", "busy 16", "busy never 16"]


def test_kept_events_grow_to_ten_million() -> None:
    kept = [arm.options.get("kept", 0) for arm in BENCHMARKS["growth"].arms(False) if arm.system == "holdfast"]
    assert kept == [0, 1_000_000, 10_000_000]


def test_the_pace_of_a_drain() -> None:
    """Half as fast in the second half."""
    marks = [(float(n), 100 * n) for n in range(9)] + [(8.0 + 2 * n, 800 + 100 * n) for n in range(1, 9)]
    found = pace(marks)
    assert found["pace"] == [100.0] * 4 + [50.0] * 4
    assert found["last_to_first"] == 0.5
    assert pace(marks[:1]) == {}


def test_payloads_have_their_size_and_do_not_compress() -> None:
    import zlib

    for size in (10_000, 262_000):
        text = json.dumps(payload_of(size)).encode()
        assert 0.98 * size < len(text) < 1.02 * size
        assert len(zlib.compress(text)) > 0.7 * len(text)


def test_options_become_arguments() -> None:
    assert arguments({"count": 5, "busy": True, "bare": False}) == ["--count", "5", "--busy"]


def test_a_run_that_does_not_end_is_ended_with_what_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is told as failed, so that the other benchmarks go on; a server that it has started ends with it."""
    monkeypatch.setattr(runner, "LONGEST_RUN", 0.5)
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho stands still >&2\nsleep 20 &\nsleep 20\n")
    program.chmod(0o755)
    begun = time.monotonic()
    with pytest.raises(runner.RunFailed, match=r"kafka \(holdfast relay\) did not end within 0.5 s:\nstands still"):
        runner.process(str(program), Arm("kafka", "holdfast", "relay"), "")
    assert time.monotonic() - begun < 15


def test_too_small_a_disk_is_said_before_it_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    free = required_bytes(10_000_000) - 1
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    databases = Databases.__new__(Databases)
    databases._server = SimpleNamespace(data_dir=Path("/data"))  # type: ignore[assignment]
    databases._filled = set()
    with pytest.raises(NoSpace, match=r"10,000,000 kept events.* GB in /data"):
        databases.fresh("holdfast", 10_000_000)


# --- the command ---


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command with given summaries in place of measurements."""

    def run(summaries: dict[str, dict[str, float]], *arguments: str) -> int:
        def measure(_server: object, benchmark: Any, _quick: bool, _repeats: int, peers: list[str]) -> dict[str, Any]:
            if benchmark.name not in summaries:
                raise bench.RunFailed("out of luck")
            return {"bench": benchmark.name, "peers": dict.fromkeys(peers, 1.0), **summaries[benchmark.name]}

        def write(*_: object) -> None:
            raise AssertionError("a check writes nothing")

        server = SimpleNamespace(version="18.0")
        monkeypatch.setattr(bench, "EmbeddedPostgres", lambda **_: nullcontext(server))
        monkeypatch.setattr(bench, "Databases", lambda _: None)
        monkeypatch.setattr(bench, "measure", measure)
        monkeypatch.setattr(bench.report, "write", write)
        monkeypatch.setattr(sys, "argv", ["bench", *arguments])
        return bench.main()

    return run


def test_check_names_each_miss(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    slow = {"horizon": {"last_to_first": 0.7}, "memory": {"rss_mb": 151.0}, "fanout": {"ratio_to_raw": 0.8}}
    assert run(slow, *slow, "--check") == 1
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("miss:")] == [
        "miss: horizon: last_to_first is 0.7, and should be >= 0.8",
        "miss: memory: rss_mb is 151, and should be <= 150",
        "miss: memory: rss_mb_large was not measured, and should be <= 150",
    ]
    assert run(slow, *slow) == 0, "without --check nothing is judged"


def test_check_without_a_miss(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fine = {name: {figure: limit.bound for figure, limit in each.limits.items()} for name, each in BENCHMARKS.items()}
    fine["latency"]["flood_notifications_per_event"] = 0.01
    assert run(fine, "--check") == 0
    assert f"{sum(map(len, fine.values()))} limits kept" in capsys.readouterr().err
    del fine["drain"]["ratio_to_fastest_peer"]
    assert run(fine, "--check") == 0, "no peer took part"
    assert f"{sum(map(len, fine.values()))} limits kept" in capsys.readouterr().err


def test_the_last_line_is_json(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run({"large": {"holdfast": 5.0}}, "large", "--quick", "--json") == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["bench"], last["holdfast"], last["postgres"]) == ("large", 5.0, "18.0")


def test_a_benchmark_that_fails_does_not_end_the_others(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run({"large": {"holdfast": 5.0}}, "drain", "large", "--json") == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["bench"] == "large"
    assert "drain: out of luck" in err


def test_a_peer_that_cannot_be_made_is_left_out(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are measured; the JSON and the screen say which peer is missing, and why."""
    monkeypatch.setitem(bench.environments.NEEDS, "oban", (3, 99))
    monkeypatch.setattr(bench.environments, "interpreter_for", interpreter_without_installing)
    reason = "oban needs Python 3.99 or later: put a python3.99 on the path"
    assert run({"drain": {}, "large": {}}, "drain", "large", "--against", "oban,pgqueuer", "--json", "--report") == 1
    out, err = capsys.readouterr()
    drain, large = map(json.loads, out.splitlines())
    assert (drain["peers"], drain["peers_left_out"]) == ({"pgqueuer": 1.0}, {"oban": reason})
    assert "peers_left_out" not in large, "it has no peers"
    assert f"left out: {reason}\n" in err and "no report will be written" in err


def interpreter_without_installing(peer: str, _lock: Path) -> str:
    return bench.environments.base_python(peer)


# --- what is shown and written ---


@pytest.mark.parametrize("name", BENCHMARKS)
@pytest.mark.parametrize("quick", [True, False])
def test_nothing_is_cut_in_a_narrow_terminal(name: str, quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 columns."""
    from io import StringIO

    from rich.console import Console

    screen = StringIO()
    monkeypatch.setattr(terminal, "console", Console(file=screen, width=80))
    benchmark = BENCHMARKS[name]
    summary = summary_of(benchmark, quick, PEERS)
    summary["arms"]["holdfast"] |= {"events": 1_000_000, "per_second": 123_456.7}
    terminal.show(benchmark, summary)
    assert "…" not in screen.getvalue()
    compared = [each for each in ("ratio_to_raw", "ratio_to_fastest_peer") if each in summary]
    assert all(f"{each} 1" in screen.getvalue() for each in compared[:1])
    assert all(arm.label in screen.getvalue() for arm in benchmark.arms(quick))


def test_the_report_has_every_benchmark() -> None:
    told = {"command": "./dev bench", "day": "2026-11-15"}
    summaries = [summary_of(each, False, PEERS) | told for each in BENCHMARKS.values()]
    text = "\n".join(report.measured(summaries))
    assert f"- `./dev bench` (2026-11-15): {', '.join(BENCHMARKS)}\n" in text
    for name, benchmark in BENCHMARKS.items():
        assert f"| {name} | {benchmark.unit} | " in text
        assert all(f"{figure} 1 ({limit}" in text for figure, limit in benchmark.limits.items())
    assert "ratio_to_raw 1 (>= 0.75)" in text and "ratio_to_fastest_peer 1 (>= 1.6, missed)" in text
    for table in text.split("\n\n"):
        rows = [line.count("|") for line in table.splitlines() if line.startswith("|")]
        assert len(set(rows)) <= 1, "a row has as many cells as its head"


def test_each_figure_of_a_peer_has_its_command() -> None:
    """The page that compares tells what was asked, every peer's figure, and how to measure it again."""
    told = {"command": "./dev bench drain --against all", "day": "2026-11-15"}
    drain = BENCHMARKS["drain"]
    summaries = [summary_of(drain, False, PEERS) | told, summary_of(BENCHMARKS["large"], False, []) | told]
    head, _, *rows = report.beside_peers(summaries)
    assert all(f" {peer} |" in head for peer in summaries[0]["peers"])
    [row] = rows
    assert row.startswith(f"| {drain.question} | events/s | ") and row.endswith(
        "| `./dev bench drain --against all`, 2026-11-15 |"
    )
    assert row.count("|") == head.count("|")


def test_a_report_keeps_what_was_not_measured_again(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    drain, large = ({"bench": name, "day": "2026-11-14"} for name in ("drain", "large"))
    assert report.merged(results, [large, drain]) == [drain, large]
    results.write_text(json.dumps({"summaries": [drain, large]}))
    again = {"bench": "drain", "day": "2026-11-15"}
    assert report.merged(results, [again]) == [again, large]


def test_the_workload_of_peers_is_that_of_the_first_arm() -> None:
    (arm,) = peer_arms(BENCHMARKS["drain"], True, ["procrastinate"])
    assert arm == Arm("procrastinate", "procrastinate", "drain", {"count": 2_000})
    assert peer_arms(BENCHMARKS["memory"], True, PEERS) == []
