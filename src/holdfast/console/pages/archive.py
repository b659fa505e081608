"""The archive: which dead letters were moved out of the outbox? Replay, discard and restore them."""

from __future__ import annotations

from typing import Any, Final

from starlette.responses import Response

from holdfast.characters import shell_word
from holdfast.console.actions import Action, Done, Question, pages_of, whole_of
from holdfast.console.formatting import count, plural
from holdfast.console.page import Call, Page
from holdfast.console.pages.decisions import REASONS
from holdfast.errors import ConfigurationError
from holdfast.operator import MOST, Moved, Operator

AT_ONCE: Final = 50
MOST_CHOSEN: Final = 1_000
_WORDS: Final = {
    "replay": ("Replay", "replayed", "a replay cannot be undone; handlers that fail again give it back"),
    "discard": ("Discard", "discarded", "can be restored until retention disposes of them"),
    "restore": ("Restore", "restored", "they are archived again, and can be replayed"),
}


async def show(call: Call) -> Response:
    """Show a page of archived events, the newest first."""
    handler, aside = call.query.get("handler", "").strip(), call.query.get("tab") == "aside"
    before = call.number("before")
    async with call.operator() as operator:
        rows = await operator.archive.page(handler=handler or None, discarded=aside, limit=AT_ONCE, before=before)
        total = await operator.archive.count(handler or None)
    options = f"{f' --handler {shell_word(handler)}' if handler else ''}{' --discarded' if aside else ''}"
    return call.render(
        "archive.html",
        active="archive",
        title="Archive",
        rows=rows,
        handler=handler,
        aside=aside,
        next=rows[-1].id if len(rows) == AT_ONCE else None,
        first=before is None,
        sentence=_sentence(total, handler),
        cli=f"holdfast archive list{options}",
    )


def _sentence(total: int, handler: str) -> str:
    of = f" of {handler}" if handler else ""
    if not total:
        return f"No dead letter{of} waits in the archive."
    words = "dead letter" if total == 1 else "dead letters"
    return f"{count(total, MOST)} {words}{of} wait in the archive for a decision."


def _numbers(call: Call) -> list[int]:
    chosen = call.form.all("chosen")
    if not 1 <= len(chosen) <= MOST_CHOSEN or not all(
        each.isascii() and each.isdecimal() and len(each) < 19 for each in chosen
    ):
        raise ConfigurationError("chosen", "is empty, or not of the archive", "choose events first")
    return [int(each) for each in chosen]


async def _move(operator: Operator, verb: str, numbers: list[int], call: Call, **options: Any) -> Moved:
    if verb == "replay":
        return await operator.archive.replay(numbers, generation=whole_of(call.form, "generation"), **options)
    found: Moved = await getattr(operator.archive, verb)(numbers, **options)
    return found


def _left(moved: Moved) -> list[tuple[str, str]]:
    return [("Left", f"{count(number)}: {REASONS.get(why, why)}") for why, number in moved.left.items()]


def _moving(verb: str) -> Action:
    word, ended, undo = _WORDS[verb]

    async def ask(call: Call, operator: Operator) -> Question:
        numbers = _numbers(call)
        moved = await _move(operator, verb, numbers, call, dry_run=True)
        named = " ".join(str(each) for each in numbers[:3]) + (" …" if len(numbers) > 3 else "")
        into = [("Goes to", f"generation {moved.generation}")] if moved.generation is not None else []
        beware = [("Beware", moved.warning)] if moved.warning else []
        return Question(
            title=f"{word} {plural(moved.count, 'event')}?",
            facts=[
                ("Exactly", f"{plural(moved.count, 'archived event')}, as chosen"),
                *into,
                *_left(moved),
                *beware,
                ("Undo", undo),
            ],
            button=f"{word} {count(moved.count)}",
            command=f'holdfast archive {verb} {named} --reason "…"',
            back="/archive",
            danger=verb == "discard",
            nothing=not moved.count,
        )

    async def act(call: Call, operator: Operator, reason: str | None) -> Done:
        moved = await _move(operator, verb, _numbers(call), call, reason=reason)
        left = "".join(f" {text}." for _, text in _left(moved))
        where = "/archive" if verb != "discard" else "/archive?tab=aside"
        return Done(path=where, said=f"{plural(moved.count, 'event')} {ended}.{left}", feeds=("overview",))

    return Action(name=f"archive.{verb}", active="archive", ask=ask, act=act, needs_reason=verb == "discard")


PAGES = (Page("/archive", "archive", get=show), *pages_of(*(_moving(verb) for verb in _WORDS)))
