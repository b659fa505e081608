"""Going anywhere: the palette and the paste box. An id, a key, a group, an error, a page; nothing is changed by it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final

from starlette.responses import RedirectResponse, Response

from holdfast.console import navigation
from holdfast.console.formatting import plural, visible
from holdfast.console.page import Call, Page
from holdfast.console.pages.event import is_id
from holdfast.console.pages.overview import Overview
from holdfast.error_signature import signature
from holdfast.errors import HoldfastError

MOST: Final = 20


@dataclass(frozen=True, slots=True)
class Place:
    """Somewhere to go."""

    label: str
    kind: str
    url: str


async def go(call: Call) -> Response:
    """Go where a text leads, or say what it could mean."""
    text = call.query.get("q", "").strip()
    exact = _exact(call, text) if text else None
    if exact is not None:
        return RedirectResponse(exact.url, 303)
    overview = await _overview(call)
    places = _places(call, text, overview)
    group = _group_of_error(call, text, overview)
    if group is not None:
        return RedirectResponse(group.url, 303)
    if text and (len(places) == 1 or (places and places[0].label.lower() == text.lower())):
        return RedirectResponse(places[0].url, 303)
    if text:
        async with call.operator() as operator:
            found = await operator.events.find(text[:255], limit=20)
        if len({each.event_id for each in found.events}) == 1:
            return RedirectResponse(call.url(f"/events/{found.events[0].event_id}"), 303)
        if found.events or (
            found.next is not None and not places
        ):  # the list says how far it was searched, and goes on
            return RedirectResponse(call.url("/events", key=text), 303)
    return call.render("go.html", title="Go to", text=text, places=places)


async def palette(call: Call) -> Response:
    """Return what a text could mean, as JSON for the palette."""
    text = call.query.get("q", "").strip()
    overview = await _overview(call)
    exact = _exact(call, text) if text else None
    group = _group_of_error(call, text, overview)
    places = [each for each in (exact, group) if each is not None] + _places(call, text, overview)
    if text and not places:
        places = [Place(f"Look for the key {text[:60]}", "event", call.url("/go", q=text))]
    found = [{"label": visible(each.label), "kind": each.kind, "url": each.url} for each in places[:MOST]]
    return Response(json.dumps(found), media_type="application/json")


async def _overview(call: Call) -> Overview | None:
    """Return the last snapshot; without a database the pages are still found."""
    try:
        found: Overview = (await call.console.hub.latest("overview")).value
    except (HoldfastError, OSError):
        return None
    return found


def _exact(call: Call, text: str) -> Place | None:
    """Return where a text leads that can mean one thing only, such as an id."""
    if is_id(text):
        return Place(f"Event {text}", "event", call.url(f"/events/{text}"))
    if since := re.fullmatch(r"since\s*=\s*(\S{1,40})", text):
        return Place(f"Failed since {since[1]}", "failures", call.url("/failures", since=since[1]))
    if (plan := re.fullmatch(r"plan\s+(\d{1,18})", text, re.IGNORECASE)) and call.console.has("plan"):
        return Place(f"Plan {plan[1]}", "plan", call.url(f"/plans/{plan[1]}"))
    if re.fullmatch(r"[\w.-]+/[\w.]+:[0-9a-f]{16}", text):
        return Place(text, "group", call.url("/failures", group=text))
    return None


def _places(call: Call, text: str, overview: Overview | None) -> list[Place]:
    """Return pages, handlers and groups whose names have the text in them."""
    found = [
        Place(entry.label, "page", call.url(entry.path))
        for _, entries in navigation.SECTIONS
        for entry in entries
        if call.console.has(entry.name)
    ]
    found.append(Place("Preferences", "page", call.url("/preferences")))
    if overview is not None:
        for group in overview.groups.groups[:200]:
            name = f"{group.handler_name} {group.signature.partition(':')[0].rpartition('.')[2]}"
            label = f"{name} · {plural(group.count, 'event')}"
            found.append(Place(label, "group", call.url("/failures", group=group.name)))
        for handler in overview.handlers[:500]:
            name = handler.handler_name
            where = f"/handlers/{name}" if call.console.has("handler") else "/failures"
            query = {} if call.console.has("handler") else {"handler": name}
            found.append(Place(name, "handler", call.url(where, **query)))
    wanted = text.lower().split()
    return [each for each in found if all(word in f"{each.label} {each.kind}".lower() for word in wanted)][:MOST]


def _group_of_error(call: Call, text: str, overview: Overview | None) -> Place | None:
    """Return the group of a pasted error: the one whose newest error has the same words, but for its values."""
    if overview is None or ":" not in text or " " not in text:
        return None
    wanted = _cause(text)
    for group in overview.groups.groups:
        error = (group.sample_error or "").partition("\n")[0]
        short = error.partition(":")[0].rpartition(".")[2] + ":" + error.partition(":")[2]
        if error and wanted in (_cause(error), _cause(short)):
            return Place(f"{group.handler_name}: {error[:80]}", "group", call.url("/failures", group=group.name))
    return None


def _cause(text: str) -> str:
    return signature(text.partition("\n")[0], "")


PAGES = (Page("/go", "go", get=go), Page("/palette", "palette", get=palette))
