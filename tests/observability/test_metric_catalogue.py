"""One list of metrics (OBS-2, OBS-3): what is scraped, what is documented, and what rules and dashboard ask for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import asyncpg
import pytest

from holdfast.observability.prometheus import ProcessFamilies
from tests.docs.support import ROOT
from tests.observability.alerting import RULES, scraped_outbox
from tests.observability.test_measurements import busy, scrape

DASHBOARD = json.loads((ROOT / "ops" / "grafana" / "dashboard.json").read_text())
PAGE = (ROOT / "docs" / "metrics.md").read_text()
NAME = re.compile(r"\bholdfast_[a-z_]+\b")
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


@pytest.fixture
async def exported(dsn: str, conn: asyncpg.Connection) -> set[str]:
    """The names of all families of a worker with several processes, and of an outbox."""
    families = {**scrape(ProcessFamilies(), busy(2, 2)).families, **(await scraped_outbox(conn)).families}
    return {f"{name}_total" if family.type == "counter" else name for name, family in families.items()}


async def test_every_metric_is_documented(exported: set[str]) -> None:
    """And nothing else is (OBS-2)."""
    tables = "\n".join(line for line in PAGE.splitlines() if line.startswith("| `"))
    assert set(NAME.findall(tables)) == exported


async def test_rules_and_dashboard_ask_for_metrics_that_exist(exported: set[str]) -> None:
    """Also in the texts of alerts and of their runbook (OBS-3)."""
    parts = {f"{name}_{part}" for name in exported if name.endswith("_seconds") for part in ("bucket", "count", "sum")}
    for text in (RULES.read_text(), "\n".join(expressions()), (ROOT / "docs" / "runbooks" / "alerts.md").read_text()):
        asked = {name for name in NAME.findall(text) if not name.startswith(("holdfast_operator", "holdfast_("))}
        assert asked - exported - parts == set()


def expressions() -> Iterator[str]:
    for panel in PANELS:
        yield from (target["expr"] for target in panel["targets"])


def test_the_labels_that_are_asked_for_exist() -> None:
    """`by (handler)` of a metric that has no such label would be one line for everything (OBS-3)."""
    known = {
        "broker",
        "event_type",
        "exception_type",
        "handler",
        "le",
        "mode",
        "outcome",
        "reason",
        "route",
        "schedule",
        "table",
    }
    for text in (*expressions(), RULES.read_text()):
        for labels in re.findall(r"\b(?:by|without) \(([^)]*)\)", text):
            assert {label.strip() for label in labels.split(",")} <= known


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_panels_say_what_they_show(panel: dict[str, Any]) -> None:
    """A description, a unit, a legend for each line, the data source of the variable, no place taken twice (OBS-3)."""
    assert panel["description"].endswith(".") and panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"]["uid"] == "${datasource}"
    for target in panel["targets"]:
        assert target["datasource"]["uid"] == "${datasource}"
        assert target["legendFormat"] or panel["type"] == "stat"


def test_panels_do_not_overlap() -> None:
    """Each has its own cells of the grid, which is 24 wide (OBS-3)."""
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


async def test_a_scrape_of_an_outbox_has_a_bound(dsn: str, conn: asyncpg.Connection) -> None:
    """Whoever may publish names types and channels as it likes, and may not fill Prometheus with them (OBS-2)."""
    await conn.execute(
        """
        INSERT INTO core.outbox (event_type, source, payload, channel)
        SELECT 'order.t' || n % 3000, 'shop', '{}', 'c' || n % 50 FROM generate_series(1, 3000) n
        """
    )
    await conn.execute(
        """
        INSERT INTO core.outbox (event_type, source, payload, status, settled_at, failed_at, failure_reason,
                                 handler_name)
        SELECT 'order.bad', 'shop', '{}', 'failed', now(), now(), 'rejected', 'shop.h' || n
        FROM generate_series(1, 1000) n
        """
    )
    await conn.execute("SELECT core.subscribe('shop', 'shop.all' || n, '{order.*}') FROM generate_series(1, 20) n")
    found = await scraped_outbox(conn)
    assert len(found) <= 4_000
    failed = found.by("handler", "holdfast_handler_failed")
    assert len(failed) == 201 and failed["other"] == 800
    assert found.of("holdfast_routes_left_out") == 2_800
    assert found.of("holdfast_outbox_pending") == 3_000


async def test_what_is_owed_to_a_handler(dsn: str, conn: asyncpg.Connection) -> None:
    """Pending, failed and the oldest age, by channel, handler and generation (OBS-3)."""
    await conn.execute(
        "SELECT core.subscribe('shop', 'shop.' || name, '{order.placed}') FROM unnest('{a,b}'::text[]) name"
    )
    await conn.execute(
        """
        INSERT INTO core.outbox (event_type, source, payload, created_at, available_at)
        SELECT 'order.placed', 'shop', '{}', now() - interval '1 min', now() - interval '1 min'
        FROM generate_series(1, 3)
        """
    )
    found = await scraped_outbox(conn)
    for handler in ("shop.a", "shop.b"):
        labels = {"channel": "outbox_default", "generation": "0", "handler": handler}
        assert found.of("holdfast_handler_pending", **labels) == 3
        assert 60 <= found.of("holdfast_handler_oldest_seconds", **labels) < 120
    assert found.of("holdfast_table_rows", table="outbox") >= 0
    assert found.of("holdfast_table_size_bytes", table="event_handled") >= 0
    assert 0 < found.of("holdfast_server_connections") < found.of("holdfast_server_connections_limit")
