"""Which alerts fire, by promtool on the rules that ship, for scrapes that were really made.

A fault is caused and scraped; a step holds what was scraped for as long as the rules want it to last.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import asyncpg

from holdfast import Worker
from holdfast.observability import prometheus
from holdfast.observability.prometheus import Collector
from holdfast.postgres.operations.metrics import snapshot
from tests.docs.support import ROOT
from tests.observability.scraping import Scrape, read, scrape

RULES = ROOT / "ops" / "prometheus" / "alerts.yml"
WORKERS, OUTBOX = "holdfast-workers", "holdfast-outbox"


@dataclass(frozen=True)
class Step:
    """What Prometheus has of each job, or None for one that it could not scrape; for so many minutes."""

    jobs: Mapping[str, Scrape | None]
    minutes: int = 5

    def series(self) -> dict[str, float]:
        found = {}
        for job, samples in self.jobs.items():
            place = {"job": job, "instance": "a"}
            found[_series("up", place)] = float(samples is not None)
            for (name, labels), value in (samples or {}).items():
                found[_series(name, {**place, **dict(labels)})] = value
        return found


def _series(name: str, labels: Mapping[str, str]) -> str:
    return f"{name}{{{', '.join(f'{label}={json.dumps(value)}' for label, value in sorted(labels.items()))}}}"


def firing(*steps: Step, replace: Mapping[str, str] | None = None) -> set[str]:
    """The alerts that fire at the end of the steps. `replace` makes a limit one that a test can reach."""
    rules = RULES.read_text()
    for text, other in (replace or {}).items():
        assert text in rules, text
        rules = rules.replace(text, other)
    found = [step.series() for step in steps]
    values = {
        name: " ".join(_held(each.get(name), step.minutes) for each, step in zip(found, steps, strict=True))
        for each in found
        for name in each
    }
    test = {
        "rule_files": ["rules.yml"],
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": value} for name, value in values.items()],
                "promql_expr_test": [
                    {
                        "expr": 'max by (alertname) (ALERTS{alertstate="firing"})',
                        "eval_time": f"{sum(step.minutes for step in steps) - 1}m",
                        "exp_samples": [],
                    }
                ],
            }
        ],
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "rules.yml").write_text(rules)
        Path(folder, "test.yml").write_text(json.dumps(test))
        run = subprocess.run(["promtool", "test", "rules", "test.yml"], cwd=folder, capture_output=True, text=True)
    if run.returncode == 0:
        return set()
    _, got, names = run.stderr.partition("got:")
    assert got, run.stdout + run.stderr
    return set(re.findall(r'alertname="(\w+)"', names))


def _held(value: float | None, minutes: int) -> str:
    return f"_x{minutes}" if value is None else f"{value!r}+0x{minutes - 1}"


async def scraped_outbox(conn: asyncpg.Connection) -> Scrape:
    found = await snapshot(conn)
    return read(prometheus.exposition(lambda: prometheus.outbox_metrics(found))[0])


@dataclass
class Watch:
    """Takes scrapes of a worker and of an outbox, as Prometheus would."""

    conn: asyncpg.Connection
    worker: Worker | None = None
    steps: list[Step] = field(default_factory=list)

    async def take(self, minutes: int = 5) -> Step:
        jobs: dict[str, Scrape | None] = {OUTBOX: await scraped_outbox(self.conn)}
        if self.worker is not None:
            jobs[WORKERS] = scrape(Collector(self.worker))
        self.steps.append(Step(jobs, minutes))
        return self.steps[-1]

    async def firing(self, **options: Mapping[str, str]) -> set[str]:
        return await asyncio.to_thread(firing, *self.steps, **options)  # type: ignore[arg-type]
