"""The story of an event: what happened to it, the latest first, with what changed from one failure to the next."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from holdfast.console.formatting import duration, plural
from holdfast.error_signature import signature
from holdfast.operator import AuditLine, Delivery, EventDetail, Head, Status

_WORDS = re.compile(r"\s+|[^\s]+")
_MOST_WORDS = 400
_LONGEST = 4_000
_AT_ONCE = timedelta(seconds=5)  # a replay and its line of the audit are of one transaction
EVERY_HANDLER = "all of its handlers"  # whose delivery an event is until it is split among them
_DID = {
    "replay": "replayed it",
    "archive.replay": "replayed it from the archive",
    "plan.step": "replayed it in a plan",
    "discard": "set it aside",
    "archive.discard": "set it aside in the archive",
    "restore": "restored it",
    "archive.restore": "restored it in the archive",
    "edit": "corrected it",
    "cancel": "cancelled it",
    "event.reveal": "looked at its values",
    "schedule.trigger": "triggered it",
}


@dataclass(frozen=True, slots=True)
class Piece:
    """Some words of an error: `kind` is same, gone or new."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Compared:
    """Two errors of one delivery, before and after a replay."""

    before: Sequence[Piece]
    after: Sequence[Piece]
    verdict: str
    same: bool


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened: `kind` is failed, delivered, operator, published, discarded, waiting or running."""

    at: datetime
    kind: str
    icon: str
    who: str
    what: str
    detail: str = ""
    quote: str | None = None
    audit: int | None = None
    error: str | None = None
    traceback: str | None = None
    compared: Compared | None = None


@dataclass(frozen=True, slots=True)
class Bar:
    """A stretch of time in the lane of a handler: handled, failing or waiting."""

    start: datetime
    end: datetime
    kind: str
    label: str


@dataclass(frozen=True, slots=True)
class Lane:
    """What one handler did with the event."""

    handler: str
    bars: Sequence[Bar] = field(default_factory=tuple)
    replays: Sequence[datetime] = field(default_factory=tuple)


def of(event: EventDetail) -> list[Moment]:
    """Return the story, the latest first."""
    found = [Moment(event.occurred_at, "published", "arrow", event.source, "published it", _owed(event))]
    for each in event.deliveries:
        if each.state != "fanned_out":
            found += _delivery(each, event)
    seen: set[int] = set()
    for each in event.deliveries:
        for line in each.actions:
            if line.id not in seen:
                seen.add(line.id)
                found.append(_action(line))
    # Of what has one time the later part of the life stands first, as everywhere in the list.
    order = {"published": 0, "running": 1, "failed": 2, "delivered": 3}
    return sorted(found, key=lambda moment: (moment.at, order.get(moment.kind, 4)), reverse=True)


def _owed(event: EventDetail) -> str:
    own = {each.handler_name for each in event.deliveries if each.handler_name and each.handler_name != "*"}
    owed = own or {name for each in event.deliveries for name in each.owed_to}
    return f"for {plural(len(owed), 'handler')}" if owed else "for nobody yet"


def _delivery(each: Delivery, event: EventDetail) -> list[Moment]:
    handler = each.handler_name or "a handler"
    found: list[Moment] = _forgotten_replays(each)
    before: str | None = None
    for number, cycle in enumerate(each.cycles, start=1):
        if cycle.failed_at is not None and cycle.edited_to is None:
            compared = compare(before, cycle.last_error) if before is not None else None
            detail = _cycle(number, cycle.attempts, cycle.first_failed_at, cycle.failed_at, cycle.failure_reason)
            detail = f"{detail} · generation {cycle.generation}"
            error = None if compared else cycle.last_error
            found.append(
                Moment(cycle.failed_at, "failed", "failed", handler, "gave up", detail, error=error, compared=compared)
            )
            before = cycle.last_error
    if each.failed_at is not None:
        number = len(each.cycles) + 1
        compared = compare(before, each.last_error) if before is not None else None
        detail = _cycle(number, each.attempts, each.first_failed_at, each.failed_at, each.failure_reason)
        found.append(
            Moment(
                each.failed_at,
                "failed",
                "failed",
                handler,
                "gave up",
                f"{detail} · generation {each.generation}",
                error=None if compared else each.last_error,
                traceback=each.traceback,
                compared=compared,
            )
        )
    elif each.last_error and each.status in ("pending", "in_flight"):
        at = each.first_failed_at or each.created_at
        what = f"failed in {plural(each.attempts, 'attempt')}, and tries again"
        found.append(
            Moment(at, "failed", "delayed", handler, what, "", error=each.last_error, traceback=each.traceback)
        )
    if each.delivered_at is not None:
        took = duration(each.delivered_at - event.occurred_at)
        detail = f"attempt {max(1, each.attempts)}, {took} after publishing"
        found.append(Moment(each.delivered_at, "delivered", "delivered", handler, "handled it", detail))
    if each.claimed_at is not None:
        found.append(
            Moment(each.claimed_at, "running", "in_flight", each.worker or "a worker", "holds it", f"for {handler}")
        )
    return found


def _forgotten_replays(each: Delivery) -> list[Moment]:
    """Return the replays that only the history of the row knows: the audit has no line about them any more."""
    told = [line.at for line in each.actions]
    return [
        Moment(cycle.replayed_at, "operator", "person", cycle.replayed_by or "somebody", _DID["replay"])
        for cycle in each.cycles
        if cycle.replayed_at is not None
        and cycle.edited_to is None
        and not any(abs(at - cycle.replayed_at) < _AT_ONCE for at in told)
    ]


def _cycle(number: int, attempts: int, first: datetime | None, last: datetime, reason: str | None) -> str:
    within = f" in {duration(last - first)}" if first is not None and last > first else ""
    return f"cycle {number}, {plural(attempts, 'attempt')}{within} · {(reason or 'unknown').replace('_', ' ')}"


def _action(line: AuditLine) -> Moment:
    refused = line.arguments.get("refused")
    words = line.action.replace(".", " ")
    what = f"was refused: {words}" if refused else _DID.get(line.action, f"did: {words}")
    detail = str(refused) if refused else ""
    return Moment(line.at, "operator", "person", line.actor, what, detail, quote=line.reason, audit=line.id)


def compare(before: str | None, after: str | None) -> Compared:
    """Return two errors with the words that changed, and whether they have the same cause."""
    old, new = (before or "")[:_LONGEST], (after or "")[:_LONGEST]
    was, now = _WORDS.findall(old)[:_MOST_WORDS], _WORDS.findall(new)[:_MOST_WORDS]
    first: list[Piece] = []
    second: list[Piece] = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, was, now, autojunk=False).get_opcodes():
        if a < b:
            first.append(Piece("same" if kind == "equal" else "gone", "".join(was[a:b])))
        if c < d:
            second.append(Piece("same" if kind == "equal" else "new", "".join(now[c:d])))
    same = _cause(old) == _cause(new)
    if old == new:
        verdict = "Same cause as before the replay: the very same text."
    elif same:
        changed = " ".join(piece.text.strip() for piece in second if piece.kind == "new")[:80]
        verdict = f"Same cause as before the replay: only values changed{f' ({changed})' if changed else ''}."
    else:
        verdict = "A new cause: it failed otherwise before the replay."
    return Compared(first, second, verdict, same)


def _cause(text: str) -> str:
    return signature(text.partition("\n")[0], text.partition(":")[0])


def lanes(event: EventDetail, now: datetime) -> list[Lane]:
    """Return what each handler did, as stretches of time."""
    found = []
    for each in event.deliveries:
        if each.state == "fanned_out" or (each.handler_name is None and len(event.deliveries) > 1):
            continue
        bars: list[Bar] = []
        replays: list[datetime] = []
        for number, cycle in enumerate(each.cycles, start=1):
            if cycle.failed_at is not None:
                start = cycle.first_failed_at or cycle.failed_at
                bars.append(
                    Bar(start, cycle.failed_at, "failing", f"cycle {number} · {plural(cycle.attempts, 'attempt')}")
                )
            if cycle.replayed_at is not None:
                replays.append(cycle.replayed_at)
        begun = replays[-1] if replays else event.occurred_at
        if each.delivered_at is not None:
            bars.append(Bar(begun, each.delivered_at, "handled", duration(each.delivered_at - begun)))
        elif each.failed_at is not None:
            start = each.first_failed_at or begun
            label = f"cycle {len(each.cycles) + 1} · {plural(each.attempts, 'attempt')}"
            bars.append(Bar(start, each.failed_at, "failing", label))
        else:
            bars.append(Bar(begun, now, "waiting", each.status.replace("_", " ")))
        found.append(Lane(each.handler_name or EVERY_HANDLER, tuple(bars), tuple(replays)))
    return found


def why_it_waits(each: Delivery, event: EventDetail, status: Status) -> str | None:
    """Return why a pending delivery is not handled, in one sentence."""
    if each.status != "pending":
        return None
    now = datetime.now(UTC)
    if each.available_at > now:
        again = f"after {plural(each.attempts, 'attempt')} that failed" if each.attempts else "as its producer asked"
        return f"It is due in {duration(each.available_at - now)}, {again}."
    serving = [
        worker
        for worker in status.workers
        if worker.living and each.channel in worker.channels and worker.generation == each.generation
    ]
    if each.behind:
        return _behind(each.behind)
    if each.handler_name is None and not each.owed_to:
        return f"No handler subscribes to {event.event_type}: it waits until one does."
    if not serving:
        return f"No living worker serves generation {each.generation} on {each.channel}."
    handlers = [each.handler_name] if each.handler_name else each.owed_to
    lacking = [name for name in handlers if not any(name in worker.handlers for worker in serving)]
    if lacking:
        return f"No living worker has {', '.join(lacking)}."
    for flow in status.flows:
        if flow.handler_name in handlers and flow.paused_at is not None:
            return f"{flow.handler_name} is paused by {flow.paused_by}."
        if flow.handler_name in handlers and flow.opened_at is not None:
            return f"The breaker of {flow.handler_name} is open: one event at a time is tried now and then."
    return f"It is due, and {plural(len(serving), 'worker serves', 'workers serve')} it: it waits for its turn."


def _behind(heads: Sequence[Head]) -> str:
    """Return what the ordering key of a delivery waits for: a dead letter before what will go on by itself."""
    head = min(heads, key=lambda each: not each.failed)
    if head.failed:
        return f"Its ordering key is blocked at {head.handler_name} by a dead letter, {head.id}."
    return f"{head.handler_name} has not finished the event before it with the same ordering key, {head.id}."


def summary(event: EventDetail) -> tuple[str, str]:
    """Return the state of the whole event: an icon's name, and words."""
    own = [each for each in event.deliveries if each.state != "fanned_out"]
    failed = sum(each.state in ("failed", "archived") for each in own)
    several = f" for {failed} of {len(own)}" if len(own) > 1 else ""
    if failed:
        return "failed", f"Failed{several}"
    states = {each.state for each in own}
    if len(states) == 1:
        state = states.pop()
        delayed = state == "pending" and all(each.available_at > datetime.now(UTC) for each in own)
        return ("delayed", "Delayed") if delayed else (state, state.replace("_", " ").capitalize())
    done = sum(each.state == "delivered" for each in own)
    return "in_flight", f"Delivered to {done} of {len(own)}"
