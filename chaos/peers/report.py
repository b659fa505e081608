"""What a run has shown: `chaos/report/peers.json`, and the section of docs/reliability.md that is made from it."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from chaos.peers.crew import RESTART_AFTER, WORKERS
from chaos.peers.faults import FAULTS, Figures
from chaos.peers.story import CONCURRENCY
from chaos.peers.systems import SYSTEMS, System
from chaos.report import PAGE, RUNS
from holdfast.embedded import find_binaries

RESULT = RUNS.with_name("peers.json")
BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"

Run = dict[str, Any]


def summary(seed: int, systems: Sequence[System], found: Mapping[str, Mapping[str, Figures]], seconds: float) -> Run:
    return {
        "seed": seed,
        "seconds": round(seconds),
        "day": str(datetime.now(UTC).date()),
        "postgres": find_binaries().version,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "systems": {
            each.name: {"version": each.version(), "settings": each.settings, "effect": each.effect} for each in systems
        },
        "faults": found,
    }


def is_complete(run: Run) -> bool:
    return list(run["systems"]) == list(SYSTEMS) and list(run["faults"]) == list(FAULTS)


def broken(run: Run) -> list[str]:
    """What Holdfast has promised and not kept."""
    problems = []
    for fault, figures in run["faults"].items():
        ours = figures.get("holdfast", {})
        if ours.get("delivered", 0) != ours.get("events", 0):
            problems.append(f"{fault}: {ours['delivered']} of {ours['events']} delivered")
        if ours.get("twice"):
            problems.append(f"{fault}: {ours['twice']} effects twice")
    return problems


def write(run: Run) -> Path:
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(run, indent=2) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{section(run)}{END}{rest.partition(END)[2]}")
    return PAGE


def section(run: Run) -> str:
    lines = [
        f"One run of {run['seconds'] / 60:.0f} minutes on {run['day']}: Postgres {run['postgres']} with fsync, Python "
        f"{run['python']}, {run['cores']} cores, seed {run['seed']}. {WORKERS} workers of each system, with "
        f"{CONCURRENCY} handlers at once; one that ends is started again after {RESTART_AFTER:g} s. Made by",
        "",
        "```text",
        f"./dev chaos --peers --seed {run['seed']} --report",
        "```",
        "",
        *table(run),
    ]
    return "\n".join(lines) + "\n"


def table(run: Run) -> list[str]:
    systems = run["systems"]
    rows = [
        ["", *(f"{name} {facts['version']}" for name, facts in systems.items())],
        ["---"] * (1 + len(systems)),
        ["Settings", *(facts["settings"] for facts in systems.values())],
        ["The handler's effect", *(facts["effect"] for facts in systems.values())],
    ]
    for name, figures in run["faults"].items():
        rows.append([FAULTS[name].title, *(FAULTS[name].tell(figures[system]) for system in systems)])
    return [f"| {' | '.join(row)} |" for row in rows]
