"""Draws docs/images/dashboard.png: the panels of ops/grafana/dashboard.json, with data of workers under load.

`./dev docs dashboard` runs a database, worker processes, a publisher and a real Prometheus for a few minutes, asks
Prometheus the dashboard's own queries, and photographs the page with Chromium. There are failures in the load: another
system is away for a while, some orders are refused, and a burst is larger than the workers.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any, Final

import asyncpg

from holdfast import NewEvent, Publisher
from holdfast.embedded import EmbeddedPostgres
from holdfast.observability import http
from holdfast.observability.endpoint import PATH, process_page
from holdfast.observability.prometheus import Collector
from tests.observability.alerting import RULES
from tests.observability.prometheus_server import ask, prometheus
from tests.observability.scraping import command
from tests.servers import apply_schema

ROOT: Final = Path(__file__).parents[2]
PICTURE: Final = ROOT / "docs" / "images" / "dashboard.png"
SECONDS: Final = 240
STEP: Final = 2
LONGEST_GAP: Final = 2 * STEP  # four scrapes: what spanNulls of the dashboard is to scrapes of 30 s
WINDOW: Final = "20s"  # of rates: some scrapes long

HANDLERS = """
import asyncio, random
from pathlib import Path
from holdfast import HandlerRegistry, Reject, RetryPolicy, TerminalHandlerError

registry = HandlerRegistry()

@registry.handler("order.placed", name="billing.charge_card", retry=RetryPolicy(base_delay=0.5))
async def charge_card(event):
    await asyncio.sleep(random.lognormvariate(-5.2, 0.5))
    if event.payload["n"] % 250 == 7:
        raise TerminalHandlerError("the card was refused")

@registry.handler("order.placed", name="mail.confirm", retry=RetryPolicy(base_delay=1.0, max_attempts=12))
async def confirm(event):
    await asyncio.sleep(random.lognormvariate(-3.6, 0.4))
    if Path("away").exists() and random.random() < 0.7:
        raise ConnectionError("the mail server is away")

@registry.handler("order.placed", name="stock.reserve")
async def reserve(event, tx):
    await asyncio.sleep(random.lognormvariate(-4.4, 0.3))
    await tx.execute("SELECT 1")

@registry.handler("order.shipped", name="shipping.track")
def track(event):
    import time
    time.sleep(random.lognormvariate(-3.0, 0.6))
    return Reject("no such parcel") if event.payload["n"] % 90 == 11 else None
"""


@asynccontextmanager
async def running() -> AsyncIterator[str]:
    """Everything, under load; yields the address of Prometheus when the time is over."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "shop.py").write_text(HANDLERS)
        server = stack.enter_context(EmbeddedPostgres(settings={"fsync": "off", "autovacuum_naptime": "10s"}))
        dsn = server.create_database("shop")
        apply_schema(dsn)
        arguments = ("worker", "shop:registry", "--processes", "2", "--metrics", "127.0.0.1:0", "--concurrency", "8")
        worker = await stack.enter_async_context(command(dsn, folder, *arguments))
        outbox = await stack.enter_async_context(command(dsn, folder, "metrics", "--listen", "127.0.0.1:0"))
        site = http.Site("127.0.0.1", 0, {PATH: process_page(Collector().collect)})
        (shop,) = await stack.enter_async_context(http.serve([site]))
        targets = {"holdfast-workers": await worker.port(), "holdfast-outbox": await outbox.port(), "shop": shop}
        address = await stack.enter_async_context(prometheus(folder, targets, RULES.read_text()))
        await load(dsn, folder)
        yield address


async def load(dsn: str, folder: Path) -> None:
    """Orders in waves, a burst, another system that is away for a while, an event that nobody wants."""
    connection = await asyncpg.connect(dsn)
    publisher, started, n = Publisher("shop"), time.monotonic(), 0
    while (passed := time.monotonic() - started) < SECONDS:
        count = max(1, round(9 + 6 * math.sin(passed / 18) + random.uniform(-2, 2)))
        if 150 <= passed < 151:
            count = 3_000
        if 80 <= passed < 115:
            (folder / "away").touch()
        else:
            (folder / "away").unlink(missing_ok=True)
        events = [NewEvent("order.placed", {"n": n + i}) for i in range(count)]
        events += [NewEvent("order.shipped", {"n": n + i}) for i in range(0, min(count, 9), 3)]
        if 200 <= passed < 200.2:
            events += [NewEvent("order.lost", {"n": n})]
        async with connection.transaction():
            await publisher.publish_many(connection, events)
        n += count
        await asyncio.sleep(0.2 if count < 100 else 1.0)
    await connection.close()


# --- the dashboard's queries ---


@dataclass(frozen=True)
class Line:
    name: str
    points: list[tuple[float, float]]


def lines(address: str, panel: dict[str, Any], start: float, end: float) -> list[Line]:
    found = []
    for target in panel["targets"]:
        query = target["expr"].replace("$__rate_interval", WINDOW)
        for each in ask(address, "query_range", query=query, start=start, end=end, step=STEP):
            name = target["legendFormat"]
            for label, value in each["metric"].items():
                name = name.replace(f"{{{{{label}}}}}", value)
            name = name.replace("{{exception_type}}", "").strip()
            points = [(float(at), float(value)) for at, value in each["values"] if value != "NaN"]
            found.append(Line(name, points))
    return found


# --- drawing ---

COLORS = ["#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#37872d", "#8ab8ff"]
OUTCOMES = {
    "delivered": "#73bf69", "duplicate": "#8ab8ff", "retried": "#ff9830", "failed": "#f2495c", "snoozed": "#b877d9",
    "released": "#5794f2", "lost_lease": "#f2cc0c", "expired": "#8e8e8e", "cancelled": "#8e8e8e",
}  # fmt: skip
WIDTH, CELL_H, GAP = 1560, 30, 8
COLUMN = WIDTH / 24


def shown(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value * 1000:.3g} ms" if 0 < value < 1 else f"{value:.3g} s"
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    text = f"{value / 1000:.3g} k" if value >= 10_000 else f"{value:,.4g}"
    return f"{text}/s" if unit == "ops" else text


def ticks(top: float) -> list[float]:
    """A few round numbers from 0 to at least `top`."""
    raw = top / 4
    size = 10 ** math.floor(math.log10(raw))
    step = next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= raw * 0.999)
    return [step * n for n in range(math.ceil(top / step - 1e-9) + 1)]


def card(panel: dict[str, Any], inner: str) -> str:
    place = panel["gridPos"]
    x, y = place["x"] * COLUMN + GAP / 2, place["y"] * CELL_H + GAP / 2
    width, height = place["w"] * COLUMN - GAP, place["h"] * CELL_H - GAP
    return (
        f'<g transform="translate({x:.1f},{y:.1f})">'
        f'<rect class="card" width="{width:.1f}" height="{height:.1f}" rx="4"/>'
        f'<text class="title" x="12" y="21">{escape(panel["title"])}</text>{inner}</g>'
    )


def graph(panel: dict[str, Any], found: Sequence[Line], start: float, end: float) -> str:
    place, unit = panel["gridPos"], panel["fieldConfig"]["defaults"]["unit"]
    width, height = place["w"] * COLUMN - GAP, place["h"] * CELL_H - GAP
    left, right, top, bottom = 62.0, width - 14, 36.0, height - 48
    stacked = "stacking" in panel["fieldConfig"]["defaults"]["custom"]
    found = [line for line in found if line.points]
    if stacked:
        found = list(stack(found))
    peak = max((value for line in found for _, value in line.points), default=0) or 1
    peak = min(peak * 1.05, panel["fieldConfig"]["defaults"].get("max", math.inf))
    marks = ticks(peak)

    def at(moment: float, value: float) -> str:
        x = left + (moment - start) / (end - start) * (right - left)
        return f"{x:.1f},{bottom - value / marks[-1] * (bottom - top):.1f}"

    parts = []
    for mark in marks:
        _, y = at(start, mark).split(",")
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>')
        spot = f'x="{left - 8}" y="{float(y) + 4:.1f}" text-anchor="end"'
        parts.append(f'<text class="axis" {spot}>{shown(mark, unit)}</text>')
    for minute in range(math.ceil(start / 60), math.floor(end / 60) + 1):
        x, _ = at(minute * 60, 0).split(",")
        label = datetime.fromtimestamp(minute * 60, UTC).strftime("%H:%M")
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>')
        parts.append(f'<text class="axis" x="{x}" y="{bottom + 15}" text-anchor="middle">{label}</text>')
    legend, x = [], 12.0
    drawn = list(zip(found, [color(line.name, n) for n, line in enumerate(found)], strict=True))
    floor = [(moment, 0.0) for moment, _ in found[0].points] if found else []
    for line, stroke in drawn:
        for points in [line.points] if stacked else unbroken(line.points):
            path = " ".join(at(*point) for point in points)
            below = " ".join(at(*point) for point in reversed(floor if stacked else [(m, 0.0) for m, _ in points]))
            opacity = 0.28 if stacked else 0.08
            parts.append(f'<polygon points="{path} {below}" fill="{stroke}" opacity="{opacity}"/>')
            parts.append(f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="1.6"/>')
        floor = line.points
        width_of = 26 + 6.6 * len(line.name)
        if x + width_of > width:
            break
        legend.append(
            f'<rect x="{x}" y="{height - 17}" width="12" height="4" rx="2" fill="{stroke}"/>'
            f'<text class="legend" x="{x + 17}" y="{height - 11}">{escape(line.name)}</text>'
        )
        x += width_of
    return card(panel, "".join(parts + legend))


def unbroken(points: Sequence[tuple[float, float]]) -> Iterator[list[tuple[float, float]]]:
    """The parts of a line: where there was nothing for longer than four scrapes, nothing is drawn, as in Grafana."""
    part: list[tuple[float, float]] = []
    for point in points:
        if part and point[0] - part[-1][0] > LONGEST_GAP:
            yield part
            part = []
        part.append(point)
    if part:
        yield part


def color(name: str, number: int) -> str:
    return OUTCOMES.get(name, COLORS[number % len(COLORS)])


def stack(found: Sequence[Line]) -> Iterator[Line]:
    """Each on top of those before it."""
    moments = sorted({moment for line in found for moment, _ in line.points})
    sums = dict.fromkeys(moments, 0.0)
    for line in found:
        own = dict(line.points)
        for moment in moments:
            sums[moment] += own.get(moment, 0.0)
        yield Line(line.name, [(moment, sums[moment]) for moment in moments])


def number(panel: dict[str, Any], value: float, trend: Sequence[tuple[float, float]]) -> str:
    place, defaults = panel["gridPos"], panel["fieldConfig"]["defaults"]
    width, height = place["w"] * COLUMN - GAP, place["h"] * CELL_H - GAP
    steps = defaults["thresholds"]["steps"]
    named = [each["color"] for each in steps if each["value"] is None or value >= each["value"]][-1]
    fill = {"green": "#56a64b", "orange": "#e0752d", "red": "#c4162a", "blue": "#3274d9"}[named]
    peak = max((each for _, each in trend), default=0) or 1
    spark = " ".join(
        f"{n / max(1, len(trend) - 1) * width:.1f},{height - each / peak * height * 0.4:.1f}"
        for n, (_, each) in enumerate(trend)
    )
    text = shown(value, defaults["unit"]) if defaults["unit"] == "s" else shown(round(value), defaults["unit"])
    inner = (
        f'<rect width="{width:.1f}" height="{height:.1f}" rx="4" fill="{fill}"/>'
        f'<polygon points="0,{height} {spark} {width},{height}" fill="#fff" opacity="0.18"/>'
        f'<text class="title on" x="12" y="21">{escape(panel["title"])}</text>'
        f'<text class="big" x="{width / 2:.1f}" y="{height / 2 + 22:.1f}" text-anchor="middle">{text}</text>'
    )
    return card(panel, inner)


STYLE = """
body { margin: 0; background: #111217; }
text { font-family: Inter, "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; fill: #ccccdc; }
.card { fill: #181b1f; stroke: #25282e; }
.title { font-size: 13.5px; font-weight: 600; } .title.on, .big { fill: #fff; }
.row { font-size: 15px; font-weight: 600; fill: #9fa7b3; }
.big { font-size: 36px; font-weight: 600; }
.axis, .legend { font-size: 11.5px; fill: #9fa7b3; } .legend { fill: #ccccdc; }
.grid { stroke: #25282e; stroke-width: 1; }
"""


def page(address: str, dashboard: dict[str, Any], start: float, end: float) -> tuple[str, int]:
    """The dashboard as HTML, and its height."""
    parts, bottom = [], 0
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        bottom = max(bottom, place["y"] + place["h"])
        if panel["type"] == "row":
            parts.append(f'<text class="row" x="6" y="{place["y"] * CELL_H + 21}">{escape(panel["title"])}</text>')
            continue
        found = lines(address, panel, start, end)
        if panel["type"] == "stat":
            (latest,) = ask(address, "query", query=panel["targets"][0]["expr"], time=end) or [{"value": [0, "0"]}]
            parts.append(number(panel, float(latest["value"][1]), found[0].points if found else []))
        else:
            parts.append(graph(panel, found, start, end))
    head = 58
    height = bottom * CELL_H + head + 8
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + 24}" height="{height}">'
        f'<text x="18" y="36" style="font-size:22px;font-weight:600;fill:#fff">{dashboard["title"]}</text>'
        f'<text x="{WIDTH + 6}" y="36" text-anchor="end" class="axis" style="font-size:13px">'
        f"two worker processes under load, scraped every second</text>"
        f'<g transform="translate(12,{head})">{"".join(parts)}</g></svg>'
    )
    return f"<!doctype html><meta charset=utf-8><style>{STYLE}</style>{svg}", height


def photograph(html: str, height: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "dashboard.html")
        file.write_text(html)
        subprocess.run(
            ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             f"--user-data-dir={folder}/profile", f"--screenshot={folder}/dashboard.png",
             f"--window-size={WIDTH + 24},{height}", file.as_uri()],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip
        shutil.copy(f"{folder}/dashboard.png", PICTURE)


async def main() -> None:
    dashboard = json.loads((ROOT / "ops" / "grafana" / "dashboard.json").read_text())
    async with running() as address:
        end = time.time()
        html, height = await asyncio.to_thread(page, address, dashboard, end - SECONDS + 25, end)
    if kept := os.environ.get("KEEP_HTML"):
        Path(kept).write_text(html)
    photograph(html, height)
    print(f"wrote {PICTURE.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(main())
