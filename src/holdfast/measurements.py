"""Counts of what a process has done since it started, for exporters. Those of several processes can be added.

Counts by a name that a writer or an error chooses are bounded: past a limit, new names count as `other`.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final, Generic, NamedTuple, TypeVar

from holdfast.handler_tally import OUTCOMES, HandlerTally, Histogram
from holdfast.telemetry import Counters

K = TypeVar("K")

# The key that counts all names beyond the limit together.
OTHER: Final = "other"
MOST_EVENT_TYPES: Final = 100
MOST_FAILURES: Final = 500
MOST_OBSERVERS: Final = 100

NO_DELIVERIES: Final = HandlerTally(dict.fromkeys(OUTCOMES, 0), 0, Histogram(), Histogram())


class FailureKind(NamedTuple):
    """The key by which failed deliveries are counted."""

    handler: str
    reason: str  # retry_terminal, max_deliveries or rejected
    exception_type: str  # empty where no exception was raised


class BrokerAnswer(NamedTuple):
    """A broker's answer about the messages that it holds for a handler; its time is in seconds since 1970."""

    broker: str
    handler_name: str
    waiting: int | None
    unacknowledged: int | None
    redelivered: int | None
    at: float


class BoundedCounter(Generic[K]):
    """Counts by a key, for any thread. From `most` keys on it counts new ones under the key that `other` returns."""

    def __init__(self, most: int, other: Callable[[K], K]) -> None:
        self._most = most
        self._other = other
        self.reset()

    def reset(self) -> None:
        """Begin again at zero, with a new lock: a fork may have copied the lock while it was held."""
        self._lock = threading.Lock()
        self._counts: dict[K, int] = {}

    def add(self, key: K, count: int = 1) -> None:
        """Add to the count of a key."""
        with self._lock:
            if key not in self._counts and len(self._counts) >= self._most:
                key = self._other(key)
            self._counts[key] = self._counts.get(key, 0) + count

    def snapshot(self) -> dict[K, int]:
        """Return the counts."""
        with self._lock:
            return dict(self._counts)


def failure_counter() -> BoundedCounter[FailureKind]:
    """Return a counter of failed deliveries. Handlers and reasons are few; classes of errors may be many."""
    return BoundedCounter(MOST_FAILURES, lambda kind: kind._replace(exception_type=OTHER))


# By event type: events that this process has published, also in transactions that roll back later.
published: Final[BoundedCounter[str]] = BoundedCounter(MOST_EVENT_TYPES, lambda _: OTHER)
os.register_at_fork(after_in_child=published.reset)
# By observer: facts that were lost because the observer, called at once, raised an error.
lost_facts: Final[BoundedCounter[str]] = BoundedCounter(MOST_OBSERVERS, lambda _: OTHER)
os.register_at_fork(after_in_child=lost_facts.reset)


@dataclass(frozen=True, slots=True)
class Measurements:
    """Counts since the start, the state of workers that run, and those of each database where there are several."""

    handlers: Mapping[str, HandlerTally] = field(default_factory=dict)
    nacked_terminal: Mapping[FailureKind, int] = field(default_factory=dict)
    dlq_written: Mapping[FailureKind, int] = field(default_factory=dict)
    published: Mapping[str, int] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    facts_dropped: int = 0
    log_lines_dropped: int = 0
    workers: int = 0
    listeners: int = 0  # of the workers, those that should hear notifications
    listening: int = 0  # of the workers, those that do
    in_flight: int = 0
    concurrency: int = 0  # events that each handler may run at once, in all workers together
    brokers: tuple[BrokerAnswer, ...] = ()  # of all workers, the latest for each handler
    databases: Mapping[str, Measurements] = field(default_factory=dict)  # by name; not part of the other fields

    def __add__(self, other: Measurements) -> Measurements:
        names = {**self.handlers, **other.handlers}
        return Measurements(
            {name: _sum(self.handlers.get(name), other.handlers.get(name)) for name in names},
            Counter(self.nacked_terminal) + Counter(other.nacked_terminal),
            Counter(self.dlq_written) + Counter(other.dlq_written),
            Counter(self.published) + Counter(other.published),
            Counters(
                **{
                    each.name: getattr(self.counters, each.name) + getattr(other.counters, each.name)
                    for each in fields(Counters)
                }
            ),
            **{name: getattr(self, name) + getattr(other, name) for name in _NUMBERS},
            brokers=_latest(self.brokers, other.brokers),
            databases={
                name: self.databases.get(name, _NOTHING) + other.databases.get(name, _NOTHING)
                for name in {**self.databases, **other.databases}
            },
        )

    def ended(self) -> Measurements:
        """Return the counts alone: they are all that is left when the process has ended."""
        databases = {name: each.ended() for name, each in self.databases.items()}
        nothing: dict[str, Any] = dict.fromkeys(_STATE, 0)
        return replace(self, **nothing, brokers=(), databases=databases)

    def dumped(self) -> str:
        """Return the measurements as one line, for `loaded`."""
        return json.dumps(self._as_data(), separators=(",", ":"))

    def _as_data(self) -> dict[str, Any]:
        return {
            "handlers": {
                name: [
                    [each.counts[outcome] for outcome in OUTCOMES],
                    each.archived,
                    *((list(times.counts), times.sum) for times in (each.handler_time, each.outbox_time)),
                ]
                for name, each in self.handlers.items()
            },
            "nacked_terminal": [[*kind, count] for kind, count in self.nacked_terminal.items()],
            "dlq_written": [[*kind, count] for kind, count in self.dlq_written.items()],
            "published": dict(self.published),
            "counters": asdict(self.counters),
            **{name: getattr(self, name) for name in _NUMBERS},
            "brokers": self.brokers,
            "databases": {name: each._as_data() for name, each in self.databases.items()},
        }

    @classmethod
    def of_publishing(cls) -> Measurements:
        """Return what this process counts outside of workers: published events, and facts that observers lost."""
        return cls(published=published.snapshot(), facts_dropped=sum(lost_facts.snapshot().values()))

    @classmethod
    def loaded(cls, line: str | bytes) -> Measurements:
        """Return the measurements that `dumped` has written."""
        return cls._of_data(json.loads(line))

    @classmethod
    def _of_data(cls, found: Mapping[str, Any]) -> Measurements:
        return cls(
            {
                name: HandlerTally(
                    dict(zip(OUTCOMES, counts, strict=True)),
                    archived,
                    Histogram(tuple(handler_time[0]), handler_time[1]),
                    Histogram(tuple(outbox_time[0]), outbox_time[1]),
                )
                for name, (counts, archived, handler_time, outbox_time) in found["handlers"].items()
            },
            {FailureKind(*kind): count for *kind, count in found["nacked_terminal"]},
            {FailureKind(*kind): count for *kind, count in found["dlq_written"]},
            found["published"],
            Counters(**found["counters"]),
            **{name: found[name] for name in _NUMBERS},
            brokers=tuple(BrokerAnswer(*each) for each in found["brokers"]),
            databases={name: cls._of_data(each) for name, each in found["databases"].items()},
        )


_STATE: Final = ("workers", "listeners", "listening", "in_flight", "concurrency")
_NUMBERS: Final = ("facts_dropped", "log_lines_dropped", *_STATE)
_NOTHING: Final = Measurements()


def _latest(*answers: Sequence[BrokerAnswer]) -> tuple[BrokerAnswer, ...]:
    ordered = sorted((each for some in answers for each in some), key=lambda each: each.at)
    return tuple({(each.broker, each.handler_name): each for each in ordered}.values())


def _sum(one: HandlerTally | None, two: HandlerTally | None) -> HandlerTally:
    if one is None or two is None:
        return one or two or NO_DELIVERIES
    return HandlerTally(
        {outcome: one.counts[outcome] + two.counts[outcome] for outcome in OUTCOMES},
        one.archived + two.archived,
        one.handler_time + two.handler_time,
        one.outbox_time + two.outbox_time,
    )
