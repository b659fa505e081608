"""Writes what was measured: `report/results.json`, a table, plots, and the section of docs/benchmarks.md."""

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.environments import ROOT, interpreter_for

REPORT = Path(__file__).resolve().parent / "report"
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def write(summaries: list[dict[str, Any]], command: str) -> list[Path]:
    """Everything under `report/` and the measured part of the page; returns what was written."""
    REPORT.mkdir(exist_ok=True)
    results = REPORT / "results.json"
    results.write_text(json.dumps({"command": command, "summaries": summaries}, indent=2) + "\n")
    table = REPORT / "table.md"
    table.write_text(measured(summaries, command))
    python = interpreter_for("plots", Path(__file__).resolve().parent / "plots" / "requirements.txt")
    subprocess.run([python, str(Path(__file__).parent / "plots" / "draw.py"), str(results), str(REPORT)], check=True)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{measured(summaries, command)}{END}{rest.partition(END)[2]}")
    return [results, table, *sorted(REPORT.glob("*.png")), PAGE]


def measured(summaries: list[dict[str, Any]], command: str) -> str:
    machine = summaries[0]
    lines = [
        f"Measured {datetime.now(UTC).date()} with `{command}`: Postgres {machine['postgres']}, Python "
        f"{machine['python']}, {machine['cores']} cores, fsync on. Medians of runs in turn; rates are per second.",
        "",
        "| Benchmark | Holdfast | Raw control | Ratio | Python / Postgres µs per event | Also |",
        "|---|---|---|---|---|---|",
    ]
    for each in summaries:
        cost = f"{each['python_us']:g} / {each['postgres_us']:g}" if "python_us" in each else ""
        raw = f"{each['raw']:,.0f}" if "raw" in each else ""
        share = f"{each['ratio_to_raw']:.2f}" if "ratio_to_raw" in each else ""
        lines.append(f"| {each['bench']} | {each['holdfast']:,.0f} | {raw} | {share} | {cost} | {also(each)} |")
    rivals = [each for each in summaries if "peers" in each]
    if rivals:
        lines += ["", *peers(rivals)]
    return "\n".join(lines) + "\n"


ALSO = (
    "two_to_one",
    "when_idle_to_never",
    "when_idle_to_never_16",
    "ratio_to_copy",
    "last_to_first",
    "kept_to_empty",
    "p50_ms",
    "p99_ms",
    "busy_p99_ms",
    "flood_notifications_per_event",
    "retried",
    "rss_mb",
    "rss_mb_large",
    "ms_empty",
    "ms_kept",
)


def also(summary: dict[str, Any]) -> str:
    return ", ".join(f"{name} {summary[name]:g}" for name in ALSO if name in summary)


def peers(summaries: list[dict[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for each in summaries for name in each["peers"]))
    lines = ["| Benchmark | Holdfast | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
    for each in summaries:
        cells = [f"{each['peers'][name]:,.0f}" if name in each["peers"] else "" for name in names]
        lines.append(f"| {each['bench']}, per second | {each['holdfast']:,.0f} | " + " | ".join(cells) + " |")
        if "ratio_to_peers" in each:
            times = [f"{each['ratio_to_peers'].get(name, 0):.1f} ×" for name in names]
            lines.append("| Holdfast is faster by | | " + " | ".join(times) + " |")
        for figure in ("p50_ms", "p99_ms"):
            if f"peers_{figure}" in each:
                waits = [f"{each[f'peers_{figure}'].get(name, 0):g}" for name in names]
                lines.append(f"| {each['bench']}, {figure} | {each[figure]:g} | " + " | ".join(waits) + " |")
    return lines
