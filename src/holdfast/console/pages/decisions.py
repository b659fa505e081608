"""Decisions about dead letters: replay, discard, restore. The question is the dry run, and acts on what was counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from starlette.responses import Response

from holdfast.characters import shell_word
from holdfast.console.filters import FailureFilter
from holdfast.console.page import Call, Page
from holdfast.errors import ConfigurationError
from holdfast.operator import Moved, Operator, PlanReport, Selection

AT_ONCE: Final = 1_000  # more are replayed as a plan
MOST: Final = 10_000
VERBS: Final = {"replay": "Replay", "discard": "Discard", "restore": "Restore"}
DONE: Final = {"replay": "replayed", "discard": "discarded", "restore": "restored"}
REASONS: Final = {
    "busy": "being changed by somebody else",
    "too_old": "older than the inbox remembers",
    "pending": "already pending",
    "in_flight": "in flight",
    "delivered": "already delivered",
    "discarded": "discarded meanwhile",
    "failed": "not set aside",
    "archived": "in the archive",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """What somebody wants to do, with which rows."""

    verb: str
    ids: Sequence[UUID]
    selection: Selection | None  # how they were chosen, for the audit
    subject: str  # a group, or what was chosen, in words
    by_group: Sequence[tuple[str, int]]
    options: str  # of the command line
    more: bool = False  # there are more rows than can be chosen at once


async def ask(call: Call) -> Response:
    """Show what a verb would do: the dry run."""
    asked = await _asked(call)
    generation, force = _generation(call), call.form.get("force") == "on"
    plan: PlanReport | None = None
    moved: Moved | None = None
    async with call.operator() as operator:
        if asked.verb == "replay" and len(asked.ids) > AT_ONCE:
            plan = await operator.plans.create(ids=asked.ids, generation=generation, force=force, dry_run=True)
        else:
            moved = await _act(operator, asked.verb, asked.ids, asked.selection, None, generation, force, dry_run=True)
    other = call.console.deciding.by(asked.subject, call.principal.name)
    call.console.deciding.begin(asked.subject, call.principal.name)
    count = moved.count if moved is not None else plan.plan.total if plan else 0
    return call.render(
        "confirm.html",
        active="failures",
        title=f"{VERBS[asked.verb]} {count:,}?",
        asked=asked,
        moved=moved,
        plan=plan,
        count=count,
        verb=VERBS[asked.verb],
        other=other,
        generation=generation,
        force=force,
        reasons=REASONS,
        command=_command(asked, plan is not None),
        which=_kept(asked, FailureFilter.of(call.form)),
    )


async def act(call: Call) -> Response:
    """Do it, with the rows that were counted."""
    verb, reason = _verb(call), call.form.get("reason").strip() or None
    ids = _ids(call.form.get("ids").split(","))
    generation, force = _generation(call), call.form.get("force") == "on"
    if reason is None and (verb == "discard" or force):
        raise ConfigurationError("reason", "is empty", "say why: it stands in the audit")
    async with call.operator() as operator:
        if call.form.get("as") == "plan":
            made = await operator.plans.create(ids=ids, generation=generation, force=force, reason=reason)
            call.console.deciding.end(call.form.get("subject"))
            return call.back(f"/plans/{made.plan.id}", said=f"Plan {made.plan.id} is made. Nothing is replayed yet.")
        which = FailureFilter.of(call.form)
        selection = which.selection() if which.given else None  # for the audit; the rows are those that were counted
        done = await _act(operator, verb, ids, selection, reason, generation, force)
    call.console.deciding.end(call.form.get("subject"))
    return call.render(
        "outcome.html",
        active="failures",
        title=f"{done.count:,} {DONE[verb]}",
        done=done,
        verb=verb,
        word=DONE[verb],
        reasons=REASONS,
        ids=done.moved,
        subject=call.form.get("subject")[:300],
        cli=f"holdfast audit --actor {shell_word(call.principal.name)}",
    )


async def _asked(call: Call) -> Asked:
    """Resolve what was chosen to rows: groups, single rows, or everything that a filter matches."""
    verb, chosen = _verb(call), call.form.all("chosen")
    discarded = verb == "restore"
    groups = [each for each in chosen if "/" in each]
    if chosen and not groups:
        subject = "1 event" if len(chosen) == 1 else f"{len(chosen):,} events"
        return Asked(verb, _ids(chosen), None, subject, (), " " + " ".join(chosen))
    which = FailureFilter.of(call.form)
    if not groups and call.form.get("whole") != "yes":
        raise ConfigurationError("chosen", "is empty", "choose groups or events first")
    async with call.operator() as operator:
        if not groups:
            selection = which.selection(everything=True)
            ids = await operator.failed.select(selection, most=MOST, discarded=discarded)
            subject = which.group or "everything that matches"
            return Asked(verb, ids, selection, subject, (), which.options() or " --all", len(ids) >= MOST)
        found: dict[UUID, None] = {}
        counts: Counter[str] = Counter()
        for name in groups[:100]:
            selection = FailureFilter.of({**which.given, "group": name, "handler": "", "signature": ""}).selection()
            rows = await operator.failed.select(selection, most=MOST - len(found), discarded=discarded)
            counts[name] = len(rows)
            found |= dict.fromkeys(rows)
            if len(found) >= MOST:
                break
    one = groups[0] if len(groups) == 1 else ""
    options = f" --group {shell_word(one)}" if one else f" --group {shell_word(groups[0])}  # and each other"
    return Asked(
        verb,
        list(found),
        Selection.group(one) if one else None,
        one or f"{len(groups)} groups",
        counts.most_common(),
        options,
        len(found) >= MOST,
    )


async def _act(
    operator: Operator,
    verb: str,
    ids: Sequence[UUID],
    selection: Selection | None,
    reason: str | None,
    generation: int | None,
    force: bool,
    *,
    dry_run: bool = False,
) -> Moved:
    common: dict[str, Any] = {"reason": reason, "dry_run": dry_run, "selection": selection}
    match verb:
        case "replay":
            return await operator.failed.replay(ids, generation=generation, force=force, **common)
        case "discard":
            return await operator.failed.discard(ids, **common)
    return await operator.failed.restore(ids, **common)


def _kept(asked: Asked, which: FailureFilter) -> FailureFilter:
    """The filter that stays with the question, so that the audit says how the rows were chosen."""
    if asked.selection is None:
        return FailureFilter()
    return FailureFilter(group=asked.subject) if "/" in asked.subject else which


def _verb(call: Call) -> str:
    verb = call.form.get("verb")
    if verb not in VERBS:
        raise ConfigurationError("verb", "is unknown", f"use one of {', '.join(VERBS)}")
    return verb


def _ids(values: Sequence[str]) -> list[UUID]:
    try:
        found = list(dict.fromkeys(UUID(each) for each in values if each))
    except ValueError:
        raise ConfigurationError("ids", "has something that is no id", "go back and choose again") from None
    if not found or len(found) > MOST:
        raise ConfigurationError("ids", "is empty or too long", f"choose 1 to {MOST:,}")
    return found


def _generation(call: Call) -> int | None:
    text = call.form.get("generation").strip()
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise ConfigurationError("generation", "is not a whole number", "write digits, or leave it empty")
    return int(text)


def _command(asked: Asked, plan: bool) -> str:
    verb = "plans create" if plan else f"failed {asked.verb}"
    return f'holdfast {verb}{asked.options} --reason "…"'


PAGES = (Page("/failures/ask", "failures.ask", post=ask), Page("/failures/act", "failures.act", post=act))
