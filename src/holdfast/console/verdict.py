"""The sentence at the top of the overview, written by rules, and the list of what needs a look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from holdfast.console.formatting import count, duration, ended, first_line, plural
from holdfast.console.handler_view import FAILING
from holdfast.operator import FailureGroup, HandlerRates, Status

LATE = 60.0  # seconds that an event may be due before the sentence says so


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of text, which may lead somewhere."""

    text: str
    path: str | None = None
    query: tuple[tuple[str, str], ...] = ()
    code: bool = False
    since: datetime | None = None  # shown as how long ago, instead of the text


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is the matter: `tone` is good, late or bad."""

    tone: str
    title: str
    detail: tuple[Part, ...]
    action: Part | None = None


@dataclass(frozen=True, slots=True)
class Concern:
    """Something that needs a look."""

    tone: str
    title: str
    detail: tuple[Part, ...]


def of(status: Status, groups: Sequence[FailureGroup], rates: Sequence[HandlerRates]) -> Verdict:
    """Return the verdict: the first rule that holds."""
    gave_up = [each for each in rates if each.tally.counts["failed"]]
    failing = [each for each in gave_up if _share(each) > FAILING] or gave_up
    if not status.workers and (status.pending or status.in_flight):
        return Verdict(
            "bad",
            "No worker is running.",
            (Part(f"{plural(status.pending + status.in_flight, 'event waits', 'events wait')} for one."),),
            Part("Look at the events", "/events"),
        )
    if failing and groups:
        return _failing(failing, groups, status)
    if status.unserved:
        channel, generation = status.unserved[0]
        return Verdict(
            "late",
            "Events wait for workers that are not there.",
            (
                Part("No living worker serves generation "),
                Part(str(generation), "/generations"),
                Part(f" on {channel}."),
            ),
            Part("Look at the generations", "/generations"),
        )
    if status.oldest is not None and status.oldest > LATE:
        return Verdict(
            "late",
            f"Events are late: the oldest is due since {duration(status.oldest)}.",
            (Part(f"{plural(status.pending, 'event is', 'events are')} due and not yet claimed."),),
            Part("Look at the events", "/events", (("status", "pending"),)),
        )
    return _quiet(status, rates)


def _share(each: HandlerRates) -> float:
    """The share of attempts that failed."""
    counts = each.tally.counts
    bad = counts["retried"] + counts["failed"]
    return bad / (bad + counts["delivered"])


def _failing(failing: Sequence[HandlerRates], groups: Sequence[FailureGroup], status: Status) -> Verdict:
    names = {each.handler_name for each in failing}
    worst = max((g for g in groups if g.handler_name in names), key=lambda g: g.count, default=groups[0])
    late = status.oldest is not None and status.oldest > LATE
    others = "Everything else is delivered in time." if not late else "Others are late."
    title = f"One handler is failing. {others}" if len(names) == 1 else f"{len(names)} handlers are failing. {others}"
    cause = worst.signature.partition(":")[0].rpartition(".")[2] or "an unknown cause"
    detail = (
        Part(worst.handler_name, "/handlers/" + worst.handler_name, code=True),
        Part(f" has given up on {plural(worst.count, 'event')} since "),
        Part("", since=worst.first_seen or worst.last_seen),
        Part(", with "),
        Part(cause, "/failures", (("group", worst.name),), code=True),
        Part("."),
    )
    return Verdict("bad", title, detail, Part("Look at the group", "/failures", (("group", worst.name),)))


def _quiet(status: Status, rates: Sequence[HandlerRates]) -> Verdict:
    handled = sum(each.tally.counts["delivered"] for each in rates)
    seconds = max((each.seconds for each in rates), default=0.0)
    rate = handled / (seconds / 60) if seconds else 0.0
    detail = [
        Part(
            f"{count(round(rate))} deliveries a minute in the last hour."
            if handled
            else "Nothing was delivered in the last hour."
        )
    ]
    action = None
    if status.failed:
        more = status.failed_is_more
        detail.append(Part(" "))
        detail.append(Part(f"{count(status.failed, more=more)} older failed", "/failures"))
        detail.append(Part(" wait for a decision."))
        action = Part("Look at the failures", "/failures")
    title = "Everything is delivered in time." if status.workers else "Nothing to do, and no worker is running."
    return Verdict("good", title, tuple(detail), action)


def concerns(status: Status, groups: Sequence[FailureGroup], rates: Sequence[HandlerRates]) -> list[Concern]:
    """Return what needs a look, the worst first."""
    found: list[Concern] = []
    lately = {each.handler_name for each in rates if each.tally.counts["failed"]}
    for group in sorted(groups, key=lambda g: (g.handler_name not in lately, -g.count))[:4]:
        note = f" Note: {first_line(group.note, 80)}" if group.note else ""
        found.append(
            Concern(
                "bad" if group.handler_name in lately else "late",
                f"{group.handler_name} gave up on {plural(group.count, 'event')}",
                (
                    Part(f"{ended(first_line(group.sample_error, 90))}{note} "),
                    Part("See the group", "/failures", (("group", group.name),)),
                ),
            )
        )
    for channel, generation in status.unserved[:3]:
        found.append(
            Concern(
                "late",
                f"no living worker serves generation {generation}",
                (Part(f"Events wait on {channel}. "), Part("Generations", "/generations")),
            )
        )
    for route in status.unrouted[:3]:
        found.append(
            Concern(
                "late",
                f"{route.event_type} has no handler",
                (Part(f"{plural(route.open, 'event waits', 'events wait')} until one subscribes."),),
            )
        )
    for worker in [each for each in status.workers if not each.living][:3]:
        found.append(
            Concern(
                "late",
                f"worker {worker.name} silent for {duration(worker.silent_for)}",
                (Part("Its events come back by themselves when their leases end. "), Part("Workers", "/workers")),
            )
        )
    if status.expired_leases:
        found.append(
            Concern(
                "late",
                f"{plural(status.expired_leases, 'lease has', 'leases have')} expired",
                (Part("The next worker that has room takes them. "), Part("Doctor", "/doctor")),
            )
        )
    if status.wakeup_mode is None:
        found.append(
            Concern(
                "late",
                "nothing wakes the workers",
                (Part("The trigger is missing; they poll. "), Part("Doctor", "/doctor")),
            )
        )
    return found
