"""Writes what was measured: `report/results.json`, a table, plots, and the measured parts of two pages of docs."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.environments import ROOT, interpreter_for
from benchmarks.suites import BENCHMARKS

REPORT = Path(__file__).resolve().parent / "report"
PAGE, COMPARISON = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "comparison.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
PLOTS = {
    "ratios": "Every ratio that has a target, and the target",
    "peers": "Rates beside those of peers",
    "latency": "From commit to handler",
    "kept": "With events kept, and with a snapshot held open",
    "cost": "CPU per event",
}

Summary = dict[str, Any]


def write(summaries: list[Summary], command: str) -> list[Path]:
    """Everything under `report/` and the measured part of the page; returns what was written."""
    REPORT.mkdir(exist_ok=True)
    for old in REPORT.glob("*.png"):
        old.unlink()
    results, table = REPORT / "results.json", REPORT / "table.md"
    summaries = merged(
        results, [{**each, "command": command, "day": str(datetime.now(UTC).date())} for each in summaries]
    )
    results.write_text(json.dumps({"summaries": summaries}, indent=2) + "\n")
    python = interpreter_for("plots", Path(__file__).resolve().parent / "plots" / "requirements.txt")
    subprocess.run([python, str(Path(__file__).parent / "plots" / "draw.py"), str(results), str(REPORT)], check=True)
    text = "\n".join(measured(summaries)) + "\n"
    table.write_text(text)
    shown = "\n".join(images()) + "\n"
    replace(PAGE, f"{text}{shown}")
    replace(COMPARISON, "\n".join(beside_peers(summaries)) + "\n")
    return [results, table, *sorted(REPORT.glob("*.png")), PAGE, COMPARISON]


def replace(page: Path, text: str) -> None:
    """Put a text into the measured part of a page."""
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{text}{END}{rest.partition(END)[2]}")


def merged(results: Path, new: list[Summary]) -> list[Summary]:
    """What was measured now takes the place of what was measured before; the rest of the report stays."""
    known = json.loads(results.read_text())["summaries"] if results.exists() else []
    found = {each["bench"]: each for each in [*known, *new]}
    return [found[name] for name in BENCHMARKS if name in found]


def images() -> Iterator[str]:
    for name, title in PLOTS.items():
        if (REPORT / f"{name}.png").exists():
            yield f"\n![{title}]({os.path.relpath(REPORT / f'{name}.png', PAGE.parent)})"


def measured(summaries: list[Summary]) -> Iterator[str]:
    machine = summaries[0]
    yield (
        f"Postgres {machine['postgres']}, Python {machine['python']}, {machine['cores']} cores, fsync on. Medians of "
        "runs in turn, measured with"
    )
    yield ""
    for day, command in dict.fromkeys((each["day"], each["command"]) for each in summaries):
        names = [each["bench"] for each in summaries if (each["day"], each["command"]) == (day, command)]
        yield f"- `{command}` ({day}): {', '.join(names)}"
    yield ""
    yield "| Benchmark | Unit | Holdfast | Raw control | Ratio to raw | Figures with a target |"
    yield "|---|---|---:|---:|---:|---|"
    for each in summaries:
        control = (amount(each, each["raw"]), f"{each['ratio_to_raw']:.2f}") if "raw" in each else ("", "")
        cells = (each["bench"], each["unit"], amount(each, each["holdfast"]), *control, targets(each))
        yield f"| {' | '.join(cells)} |"
    yield from costs(summaries)
    yield from peers(summaries)
    yield from publishing(summaries)


def amount(summary: Summary, value: float) -> str:
    return f"{value:,.0f}" if summary["unit"].endswith("/s") else f"{value:,.1f}"


def targets(summary: Summary) -> str:
    found = []
    for figure, limit in BENCHMARKS[summary["bench"]].judged(summary).items():
        value = summary.get(figure)
        met = value is not None and limit.holds(value)
        shown = "not measured" if value is None else f"{value:g}"
        found.append(f"{figure} {shown} ({limit}{'' if met else ', missed'})")
    return ", ".join(found)


COSTS = {
    "python_us": "Python µs",
    "postgres_us": "Postgres µs",
    "round_trips": "round trips",
    "statements": "statements",
    "wal_bytes": "WAL bytes",
    "index_writes": "index writes",
    "hot_share": "heap-only share of updates",
}


def costs(summaries: list[Summary]) -> Iterator[str]:
    """Per event, of Holdfast and of the control."""
    yield from ("", "Per event, Holdfast / raw control:", "")
    yield "| Benchmark | " + " | ".join(COSTS.values()) + " |"
    yield "|---|" + "---|" * len(COSTS)
    for each in summaries:
        ours, theirs = each["arms"]["holdfast"], each["arms"].get("raw", {})
        if "wal_bytes" in ours:
            cells = [f"{both(ours.get(figure), theirs.get(figure))}" for figure in COSTS]
            yield f"| {each['bench']} | " + " | ".join(cells) + " |"


def both(ours: float | None, theirs: float | None) -> str:
    shown = ["–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in (ours, theirs)]
    return "" if shown == ["–", "–"] else " / ".join(shown)


def peers(summaries: list[Summary]) -> Iterator[str]:
    beside = [each for each in summaries if "peers" in each]
    if not beside:
        return
    names = list(dict.fromkeys(name for each in beside for name in each["peers"]))
    yield from ("", "Beside peers, and how many times better Holdfast is:", "")
    yield "| Benchmark | Unit | Holdfast | " + " | ".join(names) + " |"
    yield "|---|---|---:|" + "---:|" * len(names)
    for each in beside:
        cells = [
            f"{amount(each, each['peers'][name])} ({each['ratio_to_peers'][name]:.1f} ×)"
            if name in each["peers"]
            else ""
            for name in names
        ]
        yield f"| {each['bench']} | {each['unit']} | {amount(each, each['holdfast'])} | " + " | ".join(cells) + " |"
        if "peers_p99_ms" in each:
            waits = [f"{each['peers_p99_ms'][name]:,.1f}" if name in each["peers"] else "" for name in names]
            yield f"| {each['bench']}, p99 | ms | {each['p99_ms']:,.1f} | " + " | ".join(waits) + " |"


def beside_peers(summaries: list[Summary]) -> Iterator[str]:
    """Every figure that peers have too, with the command that measured it: for the page that compares."""
    beside = [each for each in summaries if "peers" in each]
    names = list(dict.fromkeys(name for each in beside for name in each["peers"]))
    yield "| | Unit | Holdfast | " + " | ".join(names) + " | Measured by |"
    yield "|---|---|---:|" + "---:|" * len(names) + "---|"
    for each in beside:
        figures = [amount(each, each["peers"][name]) if name in each["peers"] else "" for name in names]
        measured_by = f"`{re.sub(' --(report|json)', '', each['command'])}`, {each['day']}"
        cells = (
            BENCHMARKS[each["bench"]].question,
            each["unit"],
            amount(each, each["holdfast"]),
            *figures,
            measured_by,
        )
        yield f"| {' | '.join(cells)} |"


def publishing(summaries: list[Summary]) -> Iterator[str]:
    """The grid of publish: too much for a line of the first table."""
    for each in summaries:
        if each["bench"] == "publish":
            yield from (
                "",
                "Every arm of publish:",
                "",
                "| Arm | Commits/s | Python µs | Postgres µs |",
                "|---|---:|---:|---:|",
            )
            for label, values in each["arms"].items():
                cells = [f"{values[figure]:,.0f}" if figure in values else "" for figure in PUBLISHING]
                yield f"| {label} | " + " | ".join(cells) + " |"


PUBLISHING = ("per_second", "python_us", "postgres_us")
