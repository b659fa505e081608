"""What many runs have shown: one line each in `report/runs.jsonl`, and the section of docs/reliability.md."""

import json
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from chaos.scenarios import SCENARIOS, SETUP
from holdfast.embedded import find_binaries

ROOT = Path(__file__).resolve().parent.parent
RUNS = Path(__file__).resolve().parent / "report" / "runs.jsonl"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"

Run = dict[str, Any]


def append(summary: Run) -> None:
    machine = {
        "day": str(datetime.now(UTC).date()),
        "postgres": find_binaries().version,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    RUNS.parent.mkdir(exist_ok=True)
    with RUNS.open("a") as file:
        file.write(json.dumps(summary | machine) + "\n")


def recorded() -> list[Run]:
    """Every run on record, also those that went wrong."""
    return [json.loads(line) for line in RUNS.read_text().splitlines()] if RUNS.exists() else []


def is_recorded(runs: Iterable[Run], scenario: str, seed: int, seconds: float) -> bool:
    return any((run["scenario"], run["seed"], run["seconds"]) == (scenario, seed, seconds) for run in runs)


def write() -> Path:
    """Renew the measured part of the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{measured(recorded())}{END}{rest.partition(END)[2]}")
    return PAGE


def measured(runs: Sequence[Run]) -> str:
    if not runs:
        return ""
    seen = {name: " and ".join(sorted({str(run[name]) for run in runs})) for name in ("postgres", "python", "cores")}
    lines = [
        f"{len(runs)} runs until {max(run['day'] for run in runs)}, on Postgres {seen['postgres']}, Python "
        f"{seen['python']}, {seen['cores']} cores, with fsync: {SETUP.workers} workers, lease {SETUP.lease:g} s, poll "
        f"interval {SETUP.poll_interval:g} s, grace {SETUP.grace:g} s, where a scenario does not need others. Made by",
        "",
        "```text",
        *commands(runs),
        "```",
        "",
        *promises(runs),
        "",
        *scenarios(runs),
    ]
    return "\n".join(lines) + "\n"


def commands(runs: Sequence[Run]) -> list[str]:
    """What makes these runs again: one line for the scenarios that were run with the same seeds for the same time."""
    seeds: dict[tuple[str, float, bool], set[int]] = {}
    for run in runs:
        kind = run["scenario"], float(run["seconds"]), bool(run.get("busy"))
        seeds.setdefault(kind, set()).add(int(run["seed"]))
    names: dict[tuple[bool, float, bool, str], list[str]] = {}
    for (name, seconds, busy), every in seeds.items():
        for options in _options(every):
            names.setdefault((name != "mix", seconds, busy, options), []).append(name)
    return [
        " ".join(("./dev chaos", *_chosen(found), f"{options} --for {seconds:g}{' --busy' * busy} --report"))
        for (_, seconds, busy, options), found in sorted(names.items(), key=lambda item: item[0][:3])
    ]


def _options(seeds: Iterable[int]) -> list[str]:
    """The option for each row of neighbouring seeds."""
    every = sorted(seeds)
    firsts = [seed for seed in every if seed - 1 not in every]
    lasts = [seed for seed in every if seed + 1 not in every]
    return [
        f"--seed {first}" if first == last else f"--seeds {first}..{last}"
        for first, last in zip(firsts, lasts, strict=True)
    ]


def _chosen(names: Sequence[str]) -> Iterator[str]:
    return (f"--scenario {name}" for name in names if name != "mix")


# What must not happen on a busy machine either.
NEVER = ("violations",)


def total(runs: Iterable[Run], name: str) -> int:
    return sum(run[name] for run in runs)


def worst(runs: Iterable[Run], figure: str, scenario: str | None = None) -> str:
    """The largest; times without those of runs that had the machine not to themselves."""
    chosen = [run for run in runs if scenario in (None, run["scenario"]) and (figure in NEVER or not run.get("busy"))]
    found = [run["figures"][figure] for run in chosen if figure in run["figures"]]
    return f"{max(found):g}" if found else "not measured"


def promises(runs: Sequence[Run]) -> list[str]:
    """The published promises, with what was measured for each."""
    kept = ("lost", "unexpected", "effect_duplicates", "stuck_in_flight", "idle_in_transaction", "leaked_connections")
    counts = {name: total(runs, name) for name in kept}
    poison = [
        f"{name.removeprefix('throughput_')} {min(run['figures'][name] for run in found):g}"
        for name in SCENARIOS["poison"].floors
        if (found := [run for run in runs if name in run["figures"]])
    ]

    def limited(what: str, scenario: str, figure: str, unit: str = "") -> tuple[str, str, str]:
        limit = f"{SCENARIOS[scenario].limits[figure]:g}{unit}"
        return what, limit, worst(runs, figure, scenario)

    def least(what: str, scenario: str, figure: str) -> tuple[str, str, str]:
        found = [run["figures"][figure] for run in runs if run["scenario"] == scenario and not run.get("busy")]
        return what, f"{SCENARIOS[scenario].floors[figure]:g}", f"{min(found):g}" if found else "not measured"

    ordered = [run for run in runs if "inversions" in run]
    watched = [run for run in runs if "overdue_s" in run["figures"] and not run.get("busy")]
    reclaim, stops = SCENARIOS["kill_workers"].limits["reclaim_p99_s"], SCENARIOS["deploy"].limits
    rows = [
        ("Acknowledged events, in runs, with faults", "1,000,000 in 200", (
            f"{total(runs, 'acknowledged'):,} in {len(runs)}, with {total(runs, 'strikes'):,} faults")),
        ("P1 lost, unexpected", "0, 0", f"{counts['lost']}, {counts['unexpected']}"),
        ("P1 commits without an answer that had happened, and came out", "", f"{total(runs, 'recovered'):,}"),
        ("P2 effects that happened twice", "0", f"{counts['effect_duplicates']}"),
        ("P2 deliveries that happened twice", f"{total(runs, 'in_flight_at_kill'):,} in flight at a fault", (
            f"{total(runs, 'delivery_duplicates'):,}")),
        ("LSN-9 events out of order within a key", "0", (
            f"{total(ordered, 'inversions')} of {total(ordered, 'in_order'):,}" if ordered else "not measured")),
        ("P3 claimed again after a SIGKILL, p99", f"{reclaim:g} s", worst(runs, "reclaim_p99_s", "kill_workers")),
        ("P4 commit to handler, p99", "50 ms", worst(runs, "wake_p99_ms", "terminate_listener")),
        ("P4 after the listener was ended", "5 s", worst(runs, "wake_after_fault_s", "terminate_listener")),
        ("P4 after half-open", "15 s", worst(runs, "wake_after_fault_s", "half_open")),
        ("P5 SIGTERM to exit, idle", f"{stops['stop_idle_s']:g} s", worst(runs, "stop_idle_s")),
        ("P5 busy (grace 2 s)", f"{stops['stop_busy_s']:g} s", worst(runs, "stop_busy_s", "deploy")),
        ("P5 with a database that does not answer", f"{stops['stop_half_open_s']:g} s", (
            worst(runs, "stop_half_open_s", "deploy"))),
        ("P6 share of the throughput with one poisoned row in 1,000", "0.95", ", ".join(poison) or "not measured"),
        ("P7 server accepts to first handler", "5 s", worst(runs, "first_claim_s", "restart_postgres")),
        ("P7 attempts to connect, per second and worker", "1", worst(runs, "connects_per_s", "restart_postgres")),
        ("P8 rows in flight for 2 poll intervals beyond their lease, once the faults were over", "0", (
            f"{total(watched, 'stuck_in_flight')} in {len(watched)} runs" if watched else "not measured")),
        ("P8 the longest that one was", "2 s", worst(runs, "overdue_s")),
        limited("T12 plain handlers run again after refused logins", "failed_logins", "repeats"),
        limited("T12 login is back to first handler", "failed_logins", "first_claim_s", " s"),
        limited("T14 overlapping runs, with clock steps", "clock_steps", "overlaps"),
        limited("T14 claimed again after a SIGKILL, with clock steps, p99", "clock_steps", "reclaim_p99_s", " s"),
        limited("T15 commit to handler with 3,300 handlers, p99", "many_handlers", "wake_p99_ms", " ms"),
        limited("T16 SIGTERM to exit with an unread log", "blocked_log", "stop_unread_s", " s"),
        limited("LSN-16 handlers run again after a SIGKILL, slow commits", "slow_commits", "repeats_of_one"),
        limited("LSN-17 lone event beside slow handlers, p50", "slow_neighbours", "lone_p50_ms", " ms"),
        limited("LSN-17 fast handler beside slow ones, p99", "slow_neighbours", "fast_p99_s", " s"),
        limited("LSN-9 calls that a model of an ordering key forbids, 10,000 keys", "ordered", "violations"),
        limited("LSN-10 at once, where the fleet may run 7", "fleet_limits", "at_once"),
        least("LSN-10 share of the slots that was used, but for those of killed workers", "fleet_limits", "slots_used"),
        limited("LSN-10 begun per second for a minute, where 100 may", "fleet_limits", "rate_per_s"),
        limited("LSN-15 a single event beside 200,000 of another tenant", "fairness", "single_max_s", " s"),
        limited("LSN-17 calls of a partner that is down for two minutes, 10,000 events due", "breaker", "calls"),
        limited("LSN-17 dead letters of that", "breaker", "dead_letters"),
        limited("LSN-17 partner is back to the last of them handled", "breaker", "handled_after_s", " s"),
        limited("LSN-12 others that failed with 10 poisoned events of 10,000", "poisoned_batch", "others_failed"),
        ("OBS-2 runs in which begun = delivered + duplicates + failed + expired + cancelled + open", "all", sums(runs)),
        ("Connections leaked, transactions left idle", "0, 0", (
            f"{counts['leaked_connections']}, {counts['idle_in_transaction']}")),
        ("Runs in which something of this was broken", "0", f"{sum(bool(run['problems']) for run in runs)}"),
    ]  # fmt: skip
    return ["| Promise | Limit | Measured, the worst |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]


def sums(runs: Sequence[Run]) -> str:
    """In how many runs the counts of the roll-up add up, and of how many deliveries."""
    counted = [run["counted"] for run in runs if run.get("counted")]
    even = sum(each["begun"] == sum(each.values()) - each["begun"] for each in counted)
    return (
        f"{even} of {len(counted)}, {sum(each['begun'] for each in counted):,} deliveries"
        if counted
        else "not measured"
    )


def scenarios(runs: Sequence[Run]) -> list[str]:
    lines = [
        "| Scenario | Runs | Faults | Acknowledged | Lost | Unexpected | Recovered | Twice: effects | deliveries |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    columns = ("strikes", "acknowledged", "lost", "unexpected", "recovered", "effect_duplicates", "delivery_duplicates")
    for name in SCENARIOS:
        some = [run for run in runs if run["scenario"] == name]
        cells = [f"{total(some, column):,}" for column in columns] if some else ["not run"] + [""] * (len(columns) - 1)
        lines.append(f"| {name} | {len(some)} | " + " | ".join(cells) + " |")
    return lines
