"""Schedules: events that are published at set times, and the slots at which they are.

    registry.schedule("report.due", name="reports.daily", cron="0 7 * * *", timezone="Europe/Berlin")
    registry.schedule("cache.stale", name="shop.refresh", every=timedelta(minutes=15))

A slot is a moment that the timing alone decides: every worker finds the same ones, whatever its own clock says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from itertools import takewhile
from typing import Any, Literal, get_args
from zoneinfo import ZoneInfo

from holdfast.checks import one_of
from holdfast.errors import ConfigurationError, PublishError
from holdfast.installing import extra_remedy
from holdfast.names import schedule_name
from holdfast.new_event import NewEvent
from holdfast.payload import encode_payload

Missed = Literal["latest", "all", "skip"]
MISSED: tuple[Missed, ...] = get_args(Missed)

MOST_MISSED = 100  # with missed="all": how many of the latest missed slots are fired
PUNCTUAL = timedelta(minutes=1)  # with missed="skip": a slot that is later than this is missed
SHORTEST, LONGEST = timedelta(seconds=1), timedelta(days=366)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND, _DAY = timedelta(seconds=1), timedelta(days=1)
_FIELDS = 5
# Windows in which the latest slots are looked for: if the first holds enough, the earlier slots need no counting.
_WINDOWS = tuple(timedelta(hours=hours) for hours in (2, 26, 8 * 24, 110 * 24, 5 * 366 * 24))


@dataclass(frozen=True, slots=True)
class Cron:
    """The minutes that a cron expression names in a time zone, as Debian's cron has them.

    When clocks go forward, a slot of a fixed time in the hour that is left out comes right after it; when they go
    back, a slot of a fixed time in the hour that comes twice comes once, the first time. An expression whose minutes or
    hours begin with `*` goes by the clock on the wall: what is left out is left out, and what comes twice comes twice.
    """

    expression: str
    timezone: str = "UTC"

    def __post_init__(self) -> None:
        if not isinstance(self.expression, str) or len(self.expression.split()) != _FIELDS:
            remedy = 'write minute, hour, day, month and weekday, like "0 7 * * MON-FRI"'
            raise ConfigurationError("cron", f"{self.expression!r} does not have five fields", remedy)
        if next(self.after(datetime(2024, 1, 1, tzinfo=UTC)), None) is None:
            raise ConfigurationError("cron", f"{self.expression!r} names no day that ever comes", "correct the day")

    def after(self, moment: datetime) -> Iterator[datetime]:
        """Every slot after a moment, in UTC."""
        zone = _zone(self.timezone)
        by_the_wall = any(part.startswith("*") for part in self.expression.split()[:2])
        for slot in self._on_the_wall(moment, zone) if by_the_wall else self._walk(moment, zone):
            # When clocks go back, an hour comes twice: fixed times have had their slots in the first one.
            if slot > moment:
                moment = slot
                yield slot

    def _on_the_wall(self, moment: datetime, zone: ZoneInfo) -> Iterator[datetime]:
        """Yield slots by local time, with one offset from UTC until the clocks are changed.

        cronsim walks by the hour, and gets out of step where clocks are moved by half of one.
        """
        change: datetime | None = moment.replace(microsecond=0)
        while change is not None:
            since, before = change, change - _SECOND  # a slot may fall on the change itself
            offset, change = timezone(_offset(zone, since)), None
            for slot in self._walk(before, offset):
                change = _change(zone, since, slot)
                if change is not None:
                    break
                yield slot
                since = slot

    def _walk(self, moment: datetime, zone: tzinfo) -> Iterator[datetime]:
        try:
            from cronsim import CronSim, CronSimError
        except ImportError:
            remedy = extra_remedy("schedules")
            raise ConfigurationError("cron", "needs the package cronsim, which is not installed", remedy) from None
        try:
            found = CronSim(self.expression, moment.astimezone(zone))
        except CronSimError as error:
            remedy = 'write five fields, like "*/15 8-18 * * MON-FRI"'
            raise ConfigurationError("cron", f"{self.expression!r} cannot be read: {error}", remedy) from None
        for local in found:
            yield local.astimezone(UTC)

    def __str__(self) -> str:
        return f"{self.expression} ({self.timezone})"


@dataclass(frozen=True, slots=True)
class Every:
    """Whole multiples of an interval since 1970 in UTC: every 15 minutes is at :00, :15, :30 and :45."""

    interval: timedelta

    def __post_init__(self) -> None:
        if (
            not isinstance(self.interval, timedelta)
            or not SHORTEST <= self.interval <= LONGEST
            or self.interval.microseconds
        ):
            remedy = "give a timedelta of whole seconds, from one second to 366 days"
            raise ConfigurationError("every", f"is {self.interval!r}", remedy)

    def after(self, moment: datetime) -> Iterator[datetime]:
        """Every slot after a moment, in UTC."""
        slot = _EPOCH + (moment - _EPOCH) // self.interval * self.interval
        while True:
            slot += self.interval
            yield slot

    def __str__(self) -> str:
        return f"every {self.interval}"


Timing = Cron | Every


def timing(cron: str | None, timezone: str | None, every: timedelta | None) -> Timing:
    """Return a `Cron` or an `Every`: exactly one of `cron` and `every` is to be given."""
    if (cron is None) == (every is None):
        remedy = 'give one of them: cron="0 7 * * *", or every=timedelta(minutes=15)'
        raise ConfigurationError("cron", "and every: exactly one of them is needed", remedy)
    if cron is not None:
        return Cron(cron, "UTC" if timezone is None else timezone)
    if timezone not in (None, "UTC"):
        raise ConfigurationError("timezone", "is for cron: an interval has no time zone", "leave it out")
    assert every is not None  # noqa: S101 - for the type checker
    return Every(every)


@dataclass(frozen=True, slots=True)
class Due:
    """The slots of a schedule that are due at a moment.

    `fire` are the slots whose events are published now; slots up to `until` are dealt with, fired or not, and `next`
    is the first one after the moment.
    """

    fire: list[datetime]
    until: datetime
    next: datetime
    left_out: bool  # slots came and went without an event


def due(timing: Timing, missed: Missed, after: datetime, now: datetime) -> Due:
    """Return which slots after one moment and up to another are fired."""
    most = MOST_MISSED if missed == "all" else 1
    latest = _latest(timing, after, now, most + 1)
    until = latest[-1] if latest else after
    fire = [slot for slot in latest[-most:] if missed != "skip" or now - slot <= PUNCTUAL]
    return Due(fire, until, next(timing.after(max(now, until))), left_out=len(fire) < len(latest))


def _latest(timing: Timing, after: datetime, now: datetime, most: int) -> list[datetime]:
    """Return the last slots after one moment and up to another, in their order, and at most `most` of them."""
    for start in (*(now - window for window in _WINDOWS), after):
        slots = deque(takewhile(lambda slot: slot <= now, timing.after(max(after, start))), maxlen=most)
        if start <= after or len(slots) == most:
            break
    return list(slots)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule as code declares it."""

    name: str
    source: str
    timing: Timing
    event_type: str
    missed: Missed = "latest"
    payload: Mapping[str, Any] = field(default_factory=dict, repr=False)
    target: str | None = None
    priority: int = 1

    def __post_init__(self) -> None:
        schedule_name(self.name)
        try:
            NewEvent(self.event_type, dict(self.payload), target=self.target, priority=self.priority)
            encode_payload(dict(self.payload))
        except PublishError as error:
            raise ConfigurationError(f"{self.name}.{error.field}", error.problem, error.remedy) from None
        one_of(f"{self.name}.missed", self.missed, MISSED)


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, TypeError, OSError):
        # Also for a value that is no name of a zone, such as a path or a directory of zones.
        remedy = "use a name of the IANA database, like Europe/Berlin; pip install tzdata if the machine has no zones"
        raise ConfigurationError("timezone", f"{name!r} is unknown", remedy) from None


def _offset(zone: ZoneInfo, moment: datetime) -> timedelta:
    return moment.astimezone(zone).utcoffset() or timedelta(0)


def _change(zone: ZoneInfo, moment: datetime, until: datetime) -> datetime | None:
    """Return the first second after a moment, and up to another, at which the clocks of a zone are changed."""
    offset = _offset(zone, moment)
    while moment < until:
        later = min(moment + _DAY, until)
        if _offset(zone, later) != offset:
            while (seconds := (later - moment) // _SECOND) > 1:
                middle = moment + seconds // 2 * _SECOND
                moment, later = (middle, later) if _offset(zone, middle) == offset else (moment, middle)
            return later
        moment = later
    return None
