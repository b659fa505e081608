"""Requests: was this idempotency key used, and how did it end? Bodies and whole keys are never shown."""

from __future__ import annotations

from typing import Any, Final, cast

from starlette.responses import Response

from holdfast.characters import shell_word
from holdfast.console.filters import moment
from holdfast.console.formatting import plural
from holdfast.console.page import Call, Page

AT_ONCE: Final = 50
GLYPHS: Final = {"started": "in_flight", "completed": "delivered", "failed": "failed"}


async def show(call: Call) -> Response:
    """Show a page of requests, those that expire last first."""
    given = {name: call.query.get(name, "").strip() for name in ("scope", "key", "state", "since", "until")}
    before = call.query.get("before") or None
    async with call.operator() as operator:
        found = await operator.requests.page(
            scope=given["scope"] or None,
            key=given["key"] or None,
            state=cast("Any", given["state"] or None),
            since=moment("since", given["since"]),
            until=moment("until", given["until"]),
            before=before,
            limit=AT_ONCE,
        )
    named = {name: value for name, value in given.items() if value}
    options = "".join(f" --{name} {shell_word(value)}" for name, value in named.items() if name != "key")
    return call.render(
        "requests.html",
        active="requests",
        title="Requests",
        requests=found.requests,
        given=given,
        named=named,
        next=found.next,
        examined=found.examined,
        first=before is None,
        glyphs=GLYPHS,
        sentence=_sentence(given, len(found.requests), found.next is not None),
        cli=f"holdfast requests show {shell_word(given['scope'])} {shell_word(given['key'])}"
        if given["scope"] and given["key"]
        else f"holdfast requests list{options}",
    )


def _sentence(given: dict[str, str], number: int, more: bool) -> str:
    if given["key"] and given["scope"]:
        return "The key was used in this scope." if number else "The key was not used in this scope, or was forgotten."
    if not number:
        return "No request is remembered here."
    shown = f"{plural(number, 'request')}{' and more' if more else ''}"
    return f"{shown}, those that expire last first; no body is ever shown."


PAGES = (Page("/requests", "requests", get=show),)
