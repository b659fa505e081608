"""Schedules and their slots, without a database: timings, clocks that are put forward and back, what is missed."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise, takewhile
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast import HandlerRegistry
from holdfast.errors import ConfigurationError
from holdfast.schedules import MISSED, MOST_MISSED, PUNCTUAL, Cron, Every, Missed, Timing, due

MICROSECOND, MINUTE, HOUR, DAY = timedelta(microseconds=1), timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def between(timing: Timing, start: datetime, end: datetime) -> list[datetime]:
    return list(takewhile(lambda slot: slot <= end, timing.after(start)))


def times(slots: list[datetime]) -> str:
    return " ".join(f"{slot:%d/%H:%M}" for slot in slots)


# --- when clocks are put forward and back: 2026, in UTC ---


@pytest.mark.parametrize(
    ("zone", "start", "end", "expression", "expected"),
    [
        # Berlin, 29 March: 02:00 becomes 03:00, which is 01:00 UTC.
        ("Europe/Berlin", "2026-03-28T12:00", "2026-03-30T12:00", "30 2 * * *", "29/01:00 30/00:30"),
        ("Europe/Berlin", "2026-03-28T12:00", "2026-03-30T12:00", "15,45 2 * * *", "29/01:00 30/00:15 30/00:45"),
        ("Europe/Berlin", "2026-03-28T22:00", "2026-03-29T03:00", "0 2,3 * * *", "29/01:00"),
        ("Europe/Berlin", "2026-03-28T22:00", "2026-03-29T03:00", "0 * * * *",
         "28/23:00 29/00:00 29/01:00 29/02:00 29/03:00"),
        ("Europe/Berlin", "2026-03-28T22:00", "2026-03-29T03:00", "*/30 2 * * *", ""),
        ("Europe/Berlin", "2026-03-28T12:00", "2026-03-30T12:00", "0 7 * * *", "29/05:00 30/05:00"),
        ("Europe/Berlin", "2026-03-27T12:00", "2026-03-29T00:00", "0 7 * * *", "28/06:00"),
        # Berlin, 25 October: 03:00 CEST becomes 02:00 CET, which is 01:00 UTC.
        ("Europe/Berlin", "2026-10-24T12:00", "2026-10-26T12:00", "30 2 * * *", "25/00:30 26/01:30"),
        ("Europe/Berlin", "2026-10-25T01:10", "2026-10-26T12:00", "30 2 * * *", "26/01:30"),
        ("Europe/Berlin", "2026-10-24T23:00", "2026-10-25T03:00", "0 1-3 * * *", "25/00:00 25/02:00"),
        ("Europe/Berlin", "2026-10-24T23:00", "2026-10-25T02:00", "*/30 2 * * *",
         "25/00:00 25/00:30 25/01:00 25/01:30"),
        ("Europe/Berlin", "2026-10-24T22:00", "2026-10-25T03:00", "0 * * * *",
         "24/23:00 25/00:00 25/01:00 25/02:00 25/03:00"),
        ("Europe/Berlin", "2026-10-24T22:00", "2026-10-25T03:00", "0 */2 * * *", "25/00:00 25/01:00 25/03:00"),
        # New York, 8 March: 02:00 becomes 03:00, which is 07:00 UTC.
        ("America/New_York", "2026-03-07T12:00", "2026-03-09T12:00", "30 2 * * *", "08/07:00 09/06:30"),
        ("America/New_York", "2026-03-07T12:00", "2026-03-09T13:00", "0 8 * * *", "07/13:00 08/12:00 09/12:00"),
        # New York, 1 November: 02:00 EDT becomes 01:00 EST, which is 06:00 UTC.
        ("America/New_York", "2026-10-31T12:00", "2026-11-02T12:00", "30 1 * * *", "01/05:30 02/06:30"),
        ("America/New_York", "2026-11-01T04:00", "2026-11-01T07:00", "*/30 * * * *",
         "01/04:30 01/05:00 01/05:30 01/06:00 01/06:30 01/07:00"),
        # Lord Howe moves its clocks by half an hour: 02:00 becomes 02:30 or 01:30; Beirut did it at midnight.
        ("Australia/Lord_Howe", "2026-10-03T12:00", "2026-10-04T16:00", "15 2 * * *", "03/15:30 04/15:15"),
        ("Australia/Lord_Howe", "2026-10-03T14:00", "2026-10-03T17:00", "30 * * * *", "03/15:00 03/15:30 03/16:30"),
        ("Australia/Lord_Howe", "2026-04-04T13:00", "2026-04-04T17:00", "30 * * * *",
         "04/13:30 04/14:30 04/15:00 04/16:00 04/17:00"),
        ("Australia/Lord_Howe", "2026-04-04T12:00", "2026-04-05T02:00", "0 */6 * * *", "04/13:00 04/19:30 05/01:30"),
        ("Australia/Lord_Howe", "2026-04-04T13:00", "2026-04-05T17:00", "45 1 * * *", "04/14:45 05/15:15"),
        ("Asia/Beirut", "2024-03-30T12:00", "2024-04-01T12:00", "0 0 * * *", "30/22:00 31/21:00"),
    ],
)  # fmt: skip
def test_clocks_that_are_put_forward_and_back(zone: str, start: str, end: str, expression: str, expected: str) -> None:
    """As vixie-cron has it: fixed times once, wildcards by the clock on the wall (IDM-4)."""
    assert times(between(Cron(expression, zone), utc(start), utc(end))) == expected


def test_days_are_as_cron_has_them() -> None:
    """Day and weekday: either, when both are given; the last day of a month (IDM-4)."""
    start, end = utc("2026-02-01T00:00"), utc("2026-03-01T00:00")
    assert times(between(Cron("0 9 13 * FRI"), start, end)) == "06/09:00 13/09:00 20/09:00 27/09:00"
    assert times(between(Cron("0 9 * * MON#1"), start, end)) == "02/09:00"
    assert times(between(Cron("0 9 L * *"), start, end)) == "28/09:00"
    assert next(Cron("0 0 29 2 *").after(start)) == utc("2028-02-29T00:00")


# --- what holds for every timing ---

# Lord Howe's clocks are put forward and back by half an hour, and Casablanca's four weeks apart.
ZONES = (
    "UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "Pacific/Apia", "Australia/Lord_Howe",
    "Africa/Casablanca",
)  # fmt: skip


def numbers(low: int, high: int) -> st.SearchStrategy[str]:
    some = st.lists(st.integers(low, high), min_size=1, max_size=4, unique=True).map(lambda n: ",".join(map(str, n)))
    return st.one_of(st.just("*"), st.sampled_from(["*/2", "*/3", "*/5"]), some)


MINUTES, HOURS = numbers(0, 59), numbers(0, 23)
CRONS = st.builds(
    lambda minute, hour, weekday, zone: Cron(f"{minute} {hour} * * {weekday}", zone),
    MINUTES,
    HOURS,
    st.sampled_from(["*", "1-5", "0,3"]),
    st.sampled_from(ZONES),
)
INTERVALS = st.integers(1, 366 * 86_400).map(lambda seconds: Every(timedelta(seconds=seconds)))
# Around days on which Berlin, New York, Lord Howe and Casablanca put their clocks forward or back, and another one.
TURNS = (
    "2026-03-08T07:00", "2026-03-29T01:00", "2026-10-25T01:00", "2026-11-01T06:00", "2026-04-04T15:00",
    "2026-10-03T15:30", "2026-02-15T02:00",
)  # fmt: skip
MOMENTS = st.builds(
    lambda turn, seconds, micro: utc(turn) + timedelta(seconds=seconds, microseconds=micro),
    st.sampled_from((*TURNS, "2026-07-01T00:00")),
    st.integers(-2 * 86_400, 2 * 86_400),
    st.sampled_from([0, 1, 999_999]),
)


@settings(deadline=None)
@given(st.one_of(CRONS, INTERVALS), MOMENTS)
def test_slots_come_one_after_the_other(timing: Timing, moment: datetime) -> None:
    """Each is later than the one before it and than the moment, on a whole second (IDM-4)."""
    slots = [moment, *islice(timing.after(moment), 20)]
    assert all(earlier < later for earlier, later in pairwise(slots))
    assert all(slot.tzinfo is UTC and not slot.microsecond for slot in slots[1:])


@settings(deadline=None)
@given(st.one_of(CRONS, INTERVALS), MOMENTS, st.data())
def test_slots_do_not_depend_on_where_one_begins_to_look(timing: Timing, moment: datetime, data: st.DataObject) -> None:
    """A worker that starts between two slots finds the same next one as those that run (IDM-4)."""
    slots = list(islice(timing.after(moment), 12))
    pair = data.draw(st.sampled_from(list(pairwise([moment, *slots]))))
    later = data.draw(st.integers(0, (pair[1] - pair[0]) // MICROSECOND - 1)) * MICROSECOND
    assert next(timing.after(pair[0] + later)) == pair[1]


def on_the_wall(minute: str, hour: str, zone: str, first: datetime, minutes: int) -> list[datetime]:
    """The minutes whose wall clock matches, by a look at every one of them."""

    def matches(field: str, value: int) -> bool:
        if field.startswith("*"):
            return value % int(field[2:] or 1) == 0
        return value in map(int, field.split(","))

    moments = (first + n * MINUTE for n in range(minutes))
    walls = ((moment, moment.astimezone(ZoneInfo(zone))) for moment in moments)
    return [moment for moment, wall in walls if matches(minute, wall.minute) and matches(hour, wall.hour)]


@settings(deadline=None)
@given(MINUTES, HOURS, MOMENTS, st.sampled_from(ZONES))
def test_slots_of_wildcards_are_the_minutes_that_match(minute: str, hour: str, moment: datetime, zone: str) -> None:
    """Against a look at every minute of two days. UTC has no other clock, so there all expressions are (IDM-4)."""
    if not (minute.startswith("*") or hour.startswith("*")):
        zone = "UTC"
    first = moment.replace(second=0, microsecond=0) + MINUTE
    found = between(Cron(f"{minute} {hour} * * *", zone), moment, first + (2 * 24 * 60 - 1) * MINUTE)
    assert found == on_the_wall(minute, hour, zone, first, 2 * 24 * 60)


# --- what is due, and what was missed ---


@settings(deadline=None)
@given(st.one_of(CRONS, INTERVALS), MOMENTS, st.lists(st.integers(0, 40_000), max_size=12), st.sampled_from(MISSED))
def test_no_slot_is_fired_twice_or_early(timing: Timing, start: datetime, naps: list[int], missed: Missed) -> None:
    """However often somebody looks, also when the clock goes back in between (IDM-4)."""
    after, now, fired = start, start, []
    for nap in naps:
        now += timedelta(seconds=nap - 10_000)
        found = due(timing, missed, after, max(now, after))
        assert all(after < slot <= max(now, after) for slot in found.fire)
        assert after <= found.until < found.next
        assert len(found.fire) <= (MOST_MISSED if missed == "all" else 1)
        fired += found.fire
        after = found.until
    assert fired == sorted(set(fired))
    assert set(fired) <= set(between(timing, start, max(now, after)))


@settings(deadline=None)
@given(st.one_of(CRONS, INTERVALS), MOMENTS, st.lists(st.integers(0, 20_000), min_size=1, max_size=6))
@example(Cron("30 2 * * *", "Europe/Berlin"), utc("2026-10-24T23:59"), [1_800, 1_800, 1_800, 5_400])
def test_all_are_fired_when_none_is_left_out(timing: Timing, start: datetime, naps: list[int]) -> None:
    """Missed="all" fires every slot, and says so when there were too many (IDM-4)."""
    after, now, fired, left_out = start, start, [], False
    for nap in naps:
        now += timedelta(seconds=nap)
        found = due(timing, "all", after, now)
        fired += found.fire
        left_out = left_out or found.left_out
        after = found.until
    wanted = between(timing, start, now)
    assert fired == wanted or (left_out and set(fired) < set(wanted))
    assert left_out == (fired != wanted)


OUTAGE = (utc("2026-05-01T00:30"), utc("2026-05-04T12:00:20"))


@pytest.mark.parametrize(
    ("timing", "missed", "fired", "left_out"),
    [
        (Cron("0 7 * * *"), "latest", "04/07:00", True),
        (Cron("0 7 * * *"), "all", "01/07:00 02/07:00 03/07:00 04/07:00", False),
        (Cron("0 7 * * *"), "skip", "", True),
        (Cron("0 12 * * *"), "skip", "04/12:00", True),  # twenty seconds ago is no miss
        (Cron("0 7 5 * *"), "latest", "", False),
        (Every(DAY), "latest", "04/00:00", True),
        (Every(DAY), "all", "02/00:00 03/00:00 04/00:00", False),
    ],
)
def test_an_outage(timing: Timing, missed: Missed, fired: str, left_out: bool) -> None:
    """What becomes of the slots that nobody was there to fire (IDM-4)."""
    found = due(timing, missed, *OUTAGE)
    assert times(found.fire) == fired
    assert found.left_out == left_out
    assert found.until == ([*between(timing, *OUTAGE)] or [OUTAGE[0]])[-1]
    assert found.next == next(timing.after(OUTAGE[1]))
    assert PUNCTUAL == MINUTE


@pytest.mark.parametrize("timing", [Cron("* * * * *", "Europe/Berlin"), Cron("0 7 * * *"), Every(timedelta(seconds=1))])
def test_making_up_for_years_is_bounded(timing: Timing) -> None:
    """A hundred of the latest slots, found without counting those before them (IDM-4)."""
    now = utc("2026-05-04T12:00")
    found = due(timing, "all", now - 3000 * DAY, now)
    assert len(found.fire) == MOST_MISSED
    assert found.left_out
    assert found.fire == between(timing, found.fire[0] - timedelta(seconds=1), now)


# --- declaring ---

BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"cron": "61 * * * *"}, "reports.daily.cron", "cannot be read: Bad minute"),
    ({"cron": "0 7 * *"}, "reports.daily.cron", "does not have five fields"),
    ({"cron": "0 0 7 * * *"}, "reports.daily.cron", "does not have five fields"),
    ({"cron": "@daily"}, "reports.daily.cron", "does not have five fields"),
    ({"cron": 7}, "reports.daily.cron", "does not have five fields"),
    ({"cron": "0 0 30 2 *"}, "reports.daily.cron", "Bad day-of-month"),
    ({"cron": "0 0 */20 * 1L"}, "reports.daily.cron", "names no day that ever comes"),
    ({"cron": "0 7 * * *", "timezone": "Mars/Olympus"}, "reports.daily.timezone", "'Mars/Olympus' is unknown"),
    ({"cron": "0 7 * * *", "timezone": "../../etc/passwd"}, "reports.daily.timezone", "is unknown"),
    ({"cron": "0 7 * * *", "timezone": "Europe"}, "reports.daily.timezone", "is unknown"),
    ({"cron": "0 7 * * *", "timezone": ""}, "reports.daily.timezone", "is unknown"),
    ({}, "reports.daily.cron", "exactly one of them is needed"),
    ({"cron": "0 7 * * *", "every": HOUR}, "reports.daily.cron", "exactly one of them is needed"),
    ({"every": HOUR, "timezone": "Europe/Berlin"}, "reports.daily.timezone", "is for cron"),
    ({"every": 60}, "reports.daily.every", "is 60"),
    ({"every": timedelta(milliseconds=1500)}, "reports.daily.every", "is datetime"),
    ({"every": timedelta(0)}, "reports.daily.every", "is datetime"),
    ({"every": timedelta(days=367)}, "reports.daily.every", "is datetime"),
    ({"every": HOUR, "missed": "never"}, "reports.daily.missed", "is 'never'"),
    ({"every": HOUR, "payload": {"at": datetime.now()}}, "reports.daily.payload.at", "datetime"),
    ({"every": HOUR, "priority": 3}, "reports.daily.priority", "is 3"),
    ({"every": HOUR, "target": "a b"}, "reports.daily.target", "white space"),
    ({"every": HOUR, "name": "daily"}, "schedule", "'daily' has no domain context"),
    ({"every": HOUR, "event_type": "report due"}, "reports.daily.event_type", "white space"),
]


@pytest.mark.parametrize(("options", "field", "problem"), BAD, ids=[str(index) for index in range(len(BAD))])
def test_a_bad_declaration_says_what_is_wrong(options: dict[str, Any], field: str, problem: str) -> None:
    """When it is declared, with the field and what to write instead; nothing is registered (IDM-4)."""
    registry = HandlerRegistry()
    with pytest.raises(ConfigurationError) as caught:
        registry.schedule(**({"event_type": "report.due", "name": "reports.daily"} | options))
    assert caught.value.field == field
    assert problem in caught.value.problem
    assert caught.value.remedy
    assert registry.schedules == ()


FIELD = st.one_of(st.text(alphabet="0123456789*/,-#LWMONJAN²x", min_size=1, max_size=5), st.sampled_from("*12"))


@settings(deadline=None)
@given(st.one_of(st.text(max_size=20), st.tuples(*[FIELD] * 5).map(" ".join)))
def test_whatever_is_written_is_a_timing_or_an_error(expression: str) -> None:
    """No other error leaves the parser (IDM-4)."""
    try:
        cron = Cron(expression)
    except ConfigurationError as error:
        assert error.field == "cron"
    else:
        assert len(list(islice(cron.after(utc("2026-01-01T00:00")), 2))) == 2


def test_a_name_is_declared_once_also_when_registries_are_put_together() -> None:
    """The name is half of the key of every slot (IDM-4)."""
    registry, other = HandlerRegistry(), HandlerRegistry(domain_context="shop")
    first = registry.schedule("report.due", name="reports.daily", every=HOUR)
    second = other.schedule("cache.stale", name="cache.refresh", cron="*/5 * * * *")
    assert (first.source, second.source) == ("reports", "shop")
    registry.include(other)
    assert registry.schedules == (first, second)
    for declare in (
        lambda: registry.schedule("report.due", name="reports.daily", every=HOUR),
        lambda: registry.include(other),
    ):
        with pytest.raises(ConfigurationError, match="is declared twice"):
            declare()


def test_cron_needs_its_extra_and_intervals_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the command that helps (IDM-4)."""
    monkeypatch.setitem(sys.modules, "cronsim", None)
    registry = HandlerRegistry()
    with pytest.raises(ConfigurationError, match=r"pip install '\.\[schedules\]' in a checkout"):
        registry.schedule("report.due", name="reports.daily", cron="0 7 * * *")
    assert registry.schedule("report.due", name="reports.daily", every=HOUR).timing == Every(HOUR)
