"""Handlers: who is owed what, and does it work?"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from starlette.responses import Response

from holdfast.characters import shell_word
from holdfast.console import charts
from holdfast.console.handler_view import HandlerView, flow_of, one_sentence, sentence
from holdfast.console.page import Call, Page
from holdfast.operator import FailureGroup, Flow, Operator

WINDOWS: Final = {"1h": (60, 1), "6h": (360, 6), "24h": (1440, 24)}
_SELDOM: Final = 5.0  # seconds
_MOST_CHARTED: Final = 200


@dataclass(frozen=True, slots=True)
class FoundHandlers:
    """All handlers."""

    views: Sequence[HandlerView]
    left_out: int
    at: datetime
    read_at: float


@dataclass(frozen=True, slots=True)
class FoundHandler:
    """One handler, with its flow."""

    view: HandlerView
    flow: Sequence[Flow]
    window: str
    groups: Sequence[FailureGroup]
    at: datetime
    read_at: float


class HandlersFeed:
    """The live list."""

    def normal(self, argument: str) -> str | None:
        """It is one for all."""
        return None if argument else ""

    async def read(self, operator: Operator, argument: str, before: Any) -> FoundHandlers:
        """Read all handlers, every few seconds."""
        now = time.monotonic()
        if isinstance(before, FoundHandlers) and now - before.read_at < _SELDOM:
            return before
        found = await operator.handlers.all()
        rates = {each.handler_name: each for each in await operator.rates(60, limit=1_000)}
        failing = await operator.failing(limit=_MOST_CHARTED)
        views = [HandlerView(each, rates.get(each.handler_name), failing.get(each.handler_name, {})) for each in found]
        return FoundHandlers(sorted(views, key=lambda view: view.order), found.left_out, datetime.now(UTC), now)

    def fragments(self, value: FoundHandlers) -> Mapping[str, tuple[str, dict[str, Any]]]:
        """Return the list, and the sentence about it."""
        return {name: (f"handlers/{name}.html", _listed(value)) for name in ("handlers-list", "handlers-line")}


class HandlerFeed:
    """The live parts of one handler: its name stands behind the colon, and after a slash the window."""

    def normal(self, argument: str) -> str | None:
        """Return the name with the window; an hour is not named."""
        name, slash, window = argument.partition("/")
        if not name or (slash and window not in WINDOWS):
            return None
        return name if window in ("", "1h") else argument

    async def read(self, operator: Operator, argument: str, before: Any) -> FoundHandler:
        """Read one handler, every few seconds."""
        name, _, window = argument.partition("/")
        window = window if window in WINDOWS else "1h"
        now = time.monotonic()
        if isinstance(before, FoundHandler) and now - before.read_at < _SELDOM:
            return before
        handler = await operator.handlers.show(name)
        rates = await operator.rates(60, handler=name)
        minutes, step = WINDOWS[window]
        series = await operator.series(name, minutes // 60)
        groups = [each for each in (await operator.failed.groups()).groups if each.handler_name == name]
        view = HandlerView(handler, rates[0] if rates else None, {})
        return FoundHandler(view, flow_of(series, step), window, groups[:5], datetime.now(UTC), now)

    def fragments(self, value: FoundHandler) -> Mapping[str, tuple[str, dict[str, Any]]]:
        """Return the live parts. What may be done stands outside of them: it depends on who looks."""
        shown = _one(value)
        return {f"handler-{name}": (f"handler/{name}.html", shown) for name in ("head", "numbers", "flow")}


async def show(call: Call) -> Response:
    """Show all handlers, those that need a look first."""
    snapshot = await call.console.hub.latest("handlers")
    return call.render(
        "handlers.html",
        active="handlers",
        title="Handlers",
        cli="holdfast handlers list",
        feed="handlers",
        snapshot=snapshot,
        **_listed(snapshot.value),
    )


async def show_one(call: Call) -> Response:
    """Show one handler."""
    name, window = call.request.path_params["name"], call.query.get("window", "1h")
    feed = f"handler:{name}/{window}" if window in WINDOWS and window != "1h" else f"handler:{name}"
    snapshot = await call.console.hub.latest(feed)
    return call.render(
        "handler.html",
        active="handlers",
        title=name,
        cli=f"holdfast handlers show {shell_word(name)}",
        feed=feed,
        snapshot=snapshot,
        windows=WINDOWS,
        **_one(snapshot.value),
    )


def _listed(found: FoundHandlers) -> dict[str, Any]:
    return {
        "views": found.views,
        "left_out": found.left_out,
        "sentence": sentence(found.views),
        "now": found.at,
    }


def _one(found: FoundHandler) -> dict[str, Any]:
    minutes, step = WINDOWS[found.window]
    return {
        "seen": found.view,
        "handler": found.view.handler,
        "flow": found.view.handler.flow,
        "sentence": one_sentence(found.view),
        "steps": charts.steps(found.flow, minutes, step, found.at),
        "step": step,
        "window": found.window,
        "groups": found.groups,
    }


PAGES = (
    Page("/handlers", "handlers", get=show),
    Page("/handlers/{name}", "handler", get=show_one, example="handler"),
)
