"""Failures: what failed alike, since when, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, cast
from uuid import UUID

from starlette.responses import Response

from holdfast.characters import shell_word
from holdfast.console.filters import FailureFilter, Fields, Place, cursor_of
from holdfast.console.formatting import code, code_block, plural
from holdfast.console.newest import MOST, NewestFeed, feed_of
from holdfast.console.page import Call, Page, in_time
from holdfast.errors import ConfigurationError
from holdfast.operator import FailedEvent, FailureGroup, Generation, Operator, Selection

PAGE: Final = 50
HOURS: Final = 48
TABS: Final = {"groups": "Groups", "events": "Events", "aside": "Set aside"}


@dataclass(frozen=True, slots=True)
class Inspected:
    """The group in focus: its newest error, or an older one, and what tells where it comes from."""

    group: FailureGroup
    sample: FailedEvent | None
    older: str | None  # the place of the next sample
    is_newest: bool
    hints: Sequence[tuple[str, str]]  # an icon and a sentence
    deciding: str | None


async def show(call: Call) -> Response:
    """Show the groups, or the dead letters one by one, or those that were set aside."""
    tab = call.query.get("tab", "groups")
    which = FailureFilter.of(call.query)
    if tab == "groups" or tab not in TABS:
        return await _groups(call, which)
    return await _rows(call, which, tab)


async def _groups(call: Call, which: FailureFilter) -> Response:
    focus = which.group
    listed = FailureFilter.of({name: value for name, value in call.query.items() if name != "group"})
    async with call.operator() as operator:
        found = await operator.failed.groups(listed.selection())
        groups = found.groups
        chosen = next((each for each in groups if each.name == focus), None)
        if focus and chosen is None:
            alone = (await operator.failed.groups(Selection.group(focus))).groups
            chosen = alone[0] if alone else None
        inspected = await _inspect(call, operator, chosen or groups[0]) if chosen or groups else None
        histograms, late = await in_time(_histograms(operator, listed), {})
    return call.render(
        "failures.html",
        active="failures",
        title="Failures",
        cli=f"holdfast failed groups{listed.options()}",
        tab="groups",
        tabs_of_failures=TABS,
        which=listed,
        found=found,
        groups=groups,
        total=sum(each.count for each in groups),
        inspected=inspected,
        focus=inspected.group.name if inspected else "",
        histograms=histograms,
        late=late,
        hours=HOURS,
        missing=focus if focus and chosen is None else None,
        feed=feed_of("failures", listed.given),
        newest=_after(max(each.last_seen for each in groups)) if groups else "",
    )


async def _rows(call: Call, which: FailureFilter, tab: str) -> Response:
    discarded = tab == "aside"
    before = cast("FailedEvent | None", Place.of(call.query.get("before", "")))
    async with call.operator() as operator:
        rows = await operator.failed.page(which.selection(), limit=PAGE + 1, before=before, discarded=discarded)
    more, rows = len(rows) > PAGE, rows[:PAGE]
    return call.render(
        "failures.html",
        active="failures",
        title="Set aside" if discarded else "Failed events",
        cli=f"holdfast failed list{' --discarded' if discarded else ''}{which.options()}",
        tab=tab,
        tabs_of_failures=TABS,
        which=which,
        rows=rows,
        next=cursor_of(rows[-1].failed_at, rows[-1].id) if more else None,
        first="before" not in call.query,
        feed=feed_of("failures", {**which.given, "tab": tab}) if "before" not in call.query and not discarded else None,
        newest=cursor_of(rows[0].failed_at, rows[0].id) if rows else "",
    )


def _after(failed_at: datetime) -> str:
    """Return the place behind every row of a moment, in the order of texts."""
    return cursor_of(failed_at, UUID(int=2**128 - 1))


async def _newest(operator: Operator, query: Fields) -> Sequence[str]:
    """Return the places of the newest dead letters of a filter."""
    found = await operator.failed.page(FailureFilter.of(query).selection(), limit=MOST)
    return [cursor_of(each.failed_at, each.id) for each in found]


def _given(query: Fields) -> Mapping[str, str]:
    which, tab = FailureFilter.of(query), query.get("tab", "")
    which.selection()
    return {**which.given, "tab": tab} if tab in TABS else which.given


async def _histograms(operator: Operator, which: FailureFilter) -> Mapping[str, Sequence[int]]:
    """Return when the dead letters of each group failed. A filter by time has no histogram."""
    if which.since or which.until:
        return {}
    found = await operator.failed.histogram(which.selection(), hours=HOURS, steps=HOURS)
    return {each.name: each.counts for each in found.groups}


async def _inspect(call: Call, operator: Operator, group: FailureGroup) -> Inspected:
    before = cast("FailedEvent | None", Place.of(call.query.get("sample", "")))
    try:
        selection = Selection.group(group.name)
    except ConfigurationError:  # what was written past the functions may have a name that no verb takes
        samples: list[FailedEvent] = []
    else:
        samples = await operator.failed.page(selection, limit=2, before=before)
    sample = samples[0] if samples else None
    older = cursor_of(sample.failed_at, sample.id) if sample and len(samples) > 1 else None
    deciding = call.console.deciding.by(group.name, call.principal.name)
    hints = _hints(group, await operator.generations.all(), sample)
    return Inspected(group, sample, older, before is None, hints, deciding)


def _hints(
    group: FailureGroup, generations: Sequence[Generation], sample: FailedEvent | None
) -> Sequence[tuple[str, str]]:
    """Return hints at the cause: the first failure is compared with the start of each generation."""
    found: list[tuple[str, str]] = []
    first = group.first_seen
    started = [each for each in generations if each.started_at is not None and first and each.started_at <= first]
    if first is not None and started:
        latest = max(started, key=lambda each: cast(datetime, each.started_at))
        after = first - cast(datetime, latest.started_at)
        before = [each.generation for each in generations if each.generation < latest.generation]
        never = f"; never in {max(before)}" if before and min(group.generations) >= latest.generation else ""
        if after < timedelta(hours=1):
            minutes = max(1, int(after.total_seconds() // 60))
            found.append(("layers", f"First seen {minutes} min after generation {latest.generation} went live{never}"))
    numbers = sorted(group.generations)
    if numbers:
        which = f"generation {numbers[0]}" if len(numbers) == 1 else f"generations {numbers[0]} to {numbers[-1]}"
        found.append(("layers", f"Failed in {which}"))
    types = group.event_types
    found.append(("lines", f"Only {types[0]}" if len(types) == 1 else f"{len(types)} event types: {', '.join(types)}"))
    reasons = ", ".join(reason.replace("_", " ") for reason in group.reasons)
    again = f"; the newest was replayed {plural(sample.cycles, 'time')}" if sample and sample.cycles else ""
    found.append(("plan", f"Given up by: {reasons}{again}"))
    if group.raised_at:
        found.append(("link", f"Raised at {group.raised_at}"))
    return found


async def note(call: Call) -> Response:
    """Set the note of a group, or remove it."""
    group, text = call.form.get("group"), call.form.get("text").strip()
    async with call.operator() as operator:
        await operator.failed.note(group, text or None)
    return call.back("/failures", said="Noted." if text else "The note is gone.", group=group)


async def export(call: Call) -> Response:
    """Hand over a group as Markdown, for the channel of an incident."""
    name = call.query.get("group", "")
    async with call.operator() as operator:
        found = (await operator.failed.groups(Selection.group(name))).groups
    if not found:
        raise ConfigurationError("group", "has no dead letter any more", "look at the groups that there are")
    lines = _markdown(found[0], str(call.request.base_url).rstrip("/") + call.url("/failures", group=name))
    return Response(lines, media_type="text/plain; charset=utf-8")


def _markdown(group: FailureGroup, link: str) -> str:
    error = code_block("\n".join((group.sample_error or "").splitlines()[:20]))
    facts: dict[str, Any] = {
        "Events": f"{group.count:,}",
        "First": group.first_seen.isoformat() if group.first_seen else "unknown",
        "Last": group.last_seen.isoformat(),
        "Event types": ", ".join(map(code, group.event_types)),
        "Generations": ", ".join(map(str, group.generations)),
        "Note": f"{code(group.note)} ({code(group.noted_by or 'unknown')})" if group.note else "none",
    }
    listed = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    command = f"holdfast failed replay --group {shell_word(group.name)} --dry-run"
    return (
        f"## {code(group.handler_name)} fails\n\n{listed}\n- Console: {link}\n- Terminal: {code(command)}\n\n{error}\n"
    )


FEED = NewestFeed("/failures", _given, _newest)
PAGES = (
    Page("/failures", "failures", get=show),
    Page("/failures/note", "failures.note", post=note),
    Page("/failures/hand-over", "failures.hand-over", get=export),
)
