"""One event: what happened to it, and why?"""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

from starlette.responses import Response

from holdfast.console import charts, payloads, story
from holdfast.console.page import Call, Page, in_time
from holdfast.errors import ConfigurationError
from holdfast.operator import EventDetail, Operator

_FILTERS = {"all": "All", "failures": "Failures", "operators": "Operators"}


async def show(call: Call) -> Response:
    """Show an event."""
    async with call.operator() as operator:
        event = await operator.events.detail(call.request.path_params["id"], payload=True)
        return await _page(call, operator, event)


async def reveal(call: Call) -> Response:
    """Show the values of an event to somebody who has said why; the audit has it."""
    reason = call.form.get("reason").strip()
    if not reason:
        raise ConfigurationError("reason", "is empty", "say why: it stands in the audit")
    async with call.operator() as operator:
        event = await operator.events.reveal(call.request.path_params["id"], reason=reason)
        return await _page(call, operator, event, revealed=True)


async def edit(call: Call) -> Response:
    """Ask for the corrected payload of a dead letter, or publish it."""
    id, reason = call.request.path_params["id"], call.form.get("reason").strip() or None
    try:
        payload = json.loads(call.form.get("payload"))
    except ValueError as error:
        raise ConfigurationError("payload", f"is not JSON: {str(error)[:100]}", "go back and correct it") from None
    except RecursionError:
        raise ConfigurationError("payload", "is nested too deeply", "go back and make it flatter") from None
    if not isinstance(payload, dict):
        raise ConfigurationError("payload", "is not an object", "write { … }")
    async with call.operator() as operator:
        done = await operator.failed.edit(id, payload, reason=reason)
    return call.back(f"/events/{done.new_id}", said="The corrected event has taken the place of the failed one.")


async def _page(call: Call, operator: Operator, event: EventDetail, *, revealed: bool = False) -> Response:
    """Show an event with what caused it and what it caused."""
    wanted = call.query.get("show", "all")
    moments = story.of(event)
    kinds = {"failures": ("failed",), "operators": ("operator",)}.get(wanted)
    relatives = await _relatives(operator, event)
    # One snapshot for everybody says whether workers live; it may be two seconds old.
    overview = (await call.console.hub.latest("overview")).value
    failed = [each for each in event.deliveries if each.state == "failed"]
    group = next((each for each in failed if each.handler_name and each.error_signature), None)
    icon, words = story.summary(event)
    settings, who = call.console.settings, call.principal
    payload = payloads.shown(settings, who, event.event_type, event.payload, revealed=revealed)
    headers = payloads.shown(settings, who, event.event_type, event.headers, revealed=revealed)
    return call.render(
        "event.html",
        active="events",
        title=event.event_type,
        cli=f"holdfast events show {event.event_id}",
        event=event,
        now=call.now,
        every_handler=story.EVERY_HANDLER,
        summary_icon=icon,
        summary=words,
        moments=[each for each in moments if kinds is None or each.kind in kinds],
        wanted=wanted,
        views=_FILTERS,
        lanes=charts.lanes(story.lanes(event, call.now), call.now, call.zone_name),
        waits=[(each, why) for each in event.deliveries if (why := story.why_it_waits(each, event, overview.status))],
        payload=payloads.tree(payload) if payload is not None else [],
        headers=payloads.tree(headers) if headers is not None else [],
        hidden=not revealed and not who.may(settings.values_from),
        trace=_trace(event, settings.trace_url),
        group=f"{group.handler_name}/{group.error_signature}" if group else None,
        failed=failed,
        discarded=[each for each in event.deliveries if each.deleted_at is not None and each.failed_at is not None],
        single=failed[0] if len(failed) == 1 else None,
        raw=_raw(event, failed) if settings.redact is None and (revealed or who.may(settings.values_from)) else None,
        **relatives,
    )


async def _relatives(operator: Operator, event: EventDetail) -> dict[str, Any]:
    """Return what led to the event, what came of it, and the other events of its domain."""
    ancestors, late = await in_time(operator.events.ancestors(event.event_id), [])
    children, late_too = await in_time(operator.events.children(event.event_id, limit=50), None)
    siblings, siblings_late = None, False
    if event.domain_id is not None:
        found, siblings_late = await in_time(operator.events.search(domain_id=event.domain_id, limit=20), None)
        siblings = [each for each in found.events if each.event_id != event.event_id] if found else []
    return {
        "late": late or late_too,
        "siblings_late": siblings_late,
        "ancestors": [each for each in reversed(ancestors) if each.event_id != event.event_id],
        "children": children.children if children else [],
        "siblings": siblings,
    }


def _trace(event: EventDetail, template: str | None) -> tuple[str, str | None] | None:
    """Return the id of the trace and, where a template says where, its address."""
    parts = (event.trace_context or "").split("-")
    if len(parts) < 2 or len(parts[1]) != 32 or not all(each in "0123456789abcdef" for each in parts[1]):
        return None
    return parts[1], template.replace("{trace_id}", parts[1]) if template else None


def _raw(event: EventDetail, failed: list[Any]) -> str | None:
    """Return the payload as text, for editing; only where exactly one delivery has failed."""
    if len(failed) != 1 or not isinstance(event.payload, dict):
        return None
    text = json.dumps(event.payload, indent=2, ensure_ascii=False)
    return text if len(text) <= 100_000 else None


def is_id(text: str) -> bool:
    """Return whether a text is an id."""
    try:
        UUID(text)
    except ValueError:
        return False
    return True


PAGES = (
    Page("/events/{id}", "event", get=show, example="event"),
    Page("/events/{id}/reveal", "event.reveal", post=reveal),
    Page("/events/{id}/edit", "event.edit", post=edit),
)
