"""The overview: is anything wrong, and where?"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from starlette.responses import Response

from holdfast.console import charts, verdict
from holdfast.console.handler_view import HandlerView
from holdfast.console.page import Call, Page
from holdfast.operator import FailureGroups, Flow, HandlerRates, HandlerStatus, Operator, Status

WINDOWS: Final = {"1h": (60, 1), "6h": (360, 6), "24h": (1440, 24)}
_SELDOM = 10.0  # seconds: groups, handlers and long windows change slowly, and cost more to read
_MOST_HANDLERS = 12


@dataclass(frozen=True, slots=True)
class Overview:
    """What the overview and the counts of the navigation are made of."""

    at: datetime
    status: Status
    rates: Sequence[HandlerRates]
    flow: Sequence[Flow]
    window: str
    groups: FailureGroups
    handlers: Sequence[HandlerStatus]
    failing: Mapping[str, Mapping[datetime, int]]
    plans: int
    set_aside: int
    read_seldom_at: float

    @property
    def failed_lately(self) -> int:
        """How many deliveries failed in the last hour."""
        return sum(each.tally.counts["failed"] for each in self.rates)

    @property
    def worst(self) -> list[HandlerView]:
        """The handlers, those with most failures of the last hour first."""
        rates = {each.handler_name: each for each in self.rates}
        rows = [
            HandlerView(each, rates.get(each.handler_name), self.failing.get(each.handler_name, {}))
            for each in self.handlers
        ]
        shown = (row for row in rows if not row.handler.retired)
        return sorted(
            shown,
            key=lambda row: (-row.counted("failed"), -row.handler.failed, -row.attempts, row.handler.handler_name),
        )


class OverviewFeed:
    """The live parts of the overview; behind the colon stands the window of the chart."""

    def normal(self, argument: str) -> str | None:
        """Return the window; an hour is not named."""
        return "" if argument in ("", "1h") else argument if argument in WINDOWS else None

    async def read(self, operator: Operator, argument: str, before: Any) -> Overview:
        """Read the overview. What is slow and changes slowly is read every ten seconds."""
        window = argument if argument in WINDOWS else "1h"
        minutes, step = WINDOWS[window]
        status = await operator.status()
        rates = await operator.rates(60)
        now, old = time.monotonic(), before if isinstance(before, Overview) else None
        if old is not None and now - old.read_seldom_at < _SELDOM:
            flow = await operator.flow(minutes, step=step) if window == "1h" else old.flow
            return Overview(
                datetime.now(UTC), status, rates, flow, window,
                old.groups, old.handlers, old.failing, old.plans, old.set_aside, old.read_seldom_at,
            )  # fmt: skip
        flow = await operator.flow(minutes, step=step)
        groups = await operator.failed.groups()
        handlers = await operator.handlers.all()
        failing = await operator.failing(limit=_MOST_HANDLERS)
        plans = await operator.plans.page(finished=False, limit=50)
        aside = await operator.failed.count_discarded()
        return Overview(
            datetime.now(UTC), status, rates, flow, window, groups, handlers, failing, len(plans), aside, now
        )

    def fragments(self, value: Overview) -> Mapping[str, tuple[str, dict[str, Any]]]:
        """Return the live parts."""
        shown = _shown(value)
        return {
            name: (f"overview/{name}.html", shown) for name in ("verdict", "states", "flow", "look", "handlers")
        } | {"nav-counts": ("nav_counts.html", {"nav": counts(value)})}


def counts(value: Overview | None) -> dict[str, Any]:
    """Return the counts of the navigation, and whether something is bad."""
    if value is None:
        return {}
    found = value.status
    workers = sum(each.living for each in found.workers)
    bad = verdict.of(found, value.groups.groups, value.rates).tone == "bad"
    return {"open": found.open, "failed": found.failed, "plans": value.plans, "workers": workers, "bad": bad}


async def show(call: Call) -> Response:
    """Show the overview."""
    window = call.query.get("window", "1h")
    feed = f"overview:{window}" if window in WINDOWS and window != "1h" else "overview"
    snapshot = await call.console.hub.latest(feed)
    return call.render(
        "overview.html",
        active="overview",
        title="Overview",
        cli="holdfast status",
        feed=feed,
        snapshot=snapshot,
        windows=WINDOWS,
        **_shown(snapshot.value),
    )


def _shown(value: Overview) -> dict[str, Any]:
    minutes, step = WINDOWS[value.window]
    return {
        "found": value,
        "status": value.status,
        "verdict": verdict.of(value.status, value.groups.groups, value.rates),
        "concerns": verdict.concerns(value.status, value.groups.groups, value.rates),
        "steps": charts.steps(value.flow, minutes, step, value.at),
        "step": step,
        "rows": value.worst[:_MOST_HANDLERS],
        "now": value.at,
    }


PAGES = (Page("/", "overview", get=show),)
