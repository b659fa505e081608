"""The audit: who did what, when and why? Refusals too."""

from __future__ import annotations

import json
from typing import Any, Final

from starlette.responses import Response

from holdfast.characters import shell_word
from holdfast.console.filters import moment
from holdfast.console.page import Call, Page
from holdfast.operator import AuditLine

AT_ONCE: Final = 50
_LONGEST: Final = 400


async def show(call: Call) -> Response:
    """Show a page of lines, the latest first."""
    given = {name: call.query.get(name, "").strip() for name in ("actor", "action", "since", "event")}
    steps = call.query.get("steps") == "yes"
    before = call.number("before")
    async with call.operator() as operator:
        if given["event"]:
            lines = await operator.audit.of_event(given["event"], limit=AT_ONCE)
        else:
            lines = await operator.audit.page(
                limit=AT_ONCE,
                before=before,
                actor=given["actor"] or None,
                action=given["action"] or None,
                since=moment("since", given["since"]),
                steps=steps,
            )
    following = lines[-1].id if len(lines) == AT_ONCE and not given["event"] else None
    named = {name: value for name, value in given.items() if value}
    options = "".join(f" --{name} {shell_word(value)}" for name, value in named.items())
    return call.render(
        "audit.html",
        active="audit",
        title="Audit",
        lines=[(line, _told(line)) for line in lines],
        given=given,
        named=named,
        steps=steps,
        next=following,
        first=before is None,
        cli=f"holdfast audit{options}{' --steps' if steps else ''}",
    )


def _told(line: AuditLine) -> dict[str, Any]:
    """What a line says: the outcome, its numbers, and its arguments as text."""
    arguments = dict(line.arguments)
    refused = arguments.pop("refused", None) or arguments.pop("problem", None)
    counts = (
        ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in line.counts.items()) if line.counts else ""
    )
    text = ", ".join(f"{name} {_plain(value)}" for name, value in arguments.items() if value is not None)
    return {"refused": refused, "counts": counts, "arguments": text[:_LONGEST], "plan": arguments.get("plan")}


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


PAGES = (Page("/audit", "audit", get=show),)
