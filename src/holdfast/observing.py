"""Which observers want which facts, and how facts reach them.

An observer is a function of one fact. It may say what it wants:

facts   the classes of the facts, as a frozenset; without it, the observer gets `Retried`, `Failed` and `Notice`
sample  a share from 0 to 1: of the facts `Published` and `Handled`, those of so many events. They are chosen by the
        event's id: of an event, an observer gets both or none
finish  a function without arguments, for an observer that keeps facts for a while: a worker and reactions call it in
        the observer's thread, within a second or so of a fact and when they stop

An observer that raises an error has lost a fact; one that keeps facts says with FactsLost how many.
"""

import contextlib
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, Protocol, TypeAlias, TypeVar, get_args
from uuid import UUID

from holdfast.checks import functions, number
from holdfast.errors import ConfigurationError
from holdfast.failure import describe
from holdfast.measurements import lost_facts
from holdfast.telemetry import Fact, Failed, Handled, Notice, Observer, Published, Retried

FactKind: TypeAlias = type[Fact]

FACTS: Final[frozenset[FactKind]] = frozenset(get_args(Fact))
USUAL_FACTS: Final[frozenset[FactKind]] = frozenset((Retried, Failed, Notice))
SAMPLED_FACTS: Final[frozenset[FactKind]] = frozenset((Published, Handled))
_ALL: Final = 1 << 32
# The most kinds of observers' errors that one group reports in its life.
_MOST_REPORTS: Final = 100


class FactsLost(Exception):
    """An observer has lost `count` facts; the error that it raised is the cause."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} facts were lost")
        self.count = count


def lost_with(error: BaseException) -> int:
    """Return how many facts an observer has lost by the error that it raised."""
    return error.count if isinstance(error, FactsLost) else 1


def is_sampled(event_id: UUID, share: float) -> bool:
    """Return whether an event belongs to a share of all events. Every process gives the same answer."""
    return share >= 1.0 or zlib.crc32(event_id.bytes) < share * _ALL


class _OfAnEvent(Protocol):
    @property
    def event_id(self) -> UUID: ...


_Some = TypeVar("_Some", bound=_OfAnEvent)


def sampled(some: Iterable[_Some], share: float) -> list[_Some]:
    """Return those whose events belong to a share of all events: as `is_sampled`, without a call for each."""
    limit, crc32 = share * _ALL, zlib.crc32
    return [each for each in some if crc32(each.event_id.bytes) < limit]


def require_observers(values: object) -> tuple[Observer, ...]:
    """Return observers; refuse other values, and an observer that asks for unknown facts."""
    observers = functions("observers", values)
    for observer in observers:
        facts_of(observer)
        sample_of(observer)
        finish_of(observer)
    return observers


def facts_of(observer: Observer) -> frozenset[FactKind]:
    """Return the kinds of facts that an observer wants."""
    wanted = getattr(observer, "facts", USUAL_FACTS)
    if not isinstance(wanted, frozenset | set) or not wanted <= FACTS:
        raise ConfigurationError(
            "observers",
            f"has {_shown(observer)}, whose attribute facts is not a set of fact classes",
            "write facts = frozenset((Handled, Failed)) with classes of holdfast.telemetry, or name it otherwise",
        )
    return frozenset(wanted)


def sample_of(observer: Observer) -> float:
    """Return the share of successes that an observer wants."""
    return number(f"{_shown(observer)}.sample", getattr(observer, "sample", 1.0), 0, 1)


def finish_of(observer: Observer) -> Callable[[], object] | None:
    """Return the method by which an observer finishes what it has put off; None if it has none."""
    finish = getattr(observer, "finish", None)
    if finish is not None and not callable(finish):
        raise ConfigurationError(
            "observers",
            f"has {_shown(observer)}, whose attribute finish is no function",
            "make it a function without arguments, or name it otherwise",
        )
    return finish


def _shown(observer: Observer) -> str:
    return str(getattr(observer, "__qualname__", type(observer).__qualname__))


class ObserverGroup:
    """Hands each fact to the observers that want it; `deliver` returns the function that takes an observer's facts.

    Whoever constructs facts asks `share` or `wants` once, and not for each fact. An observer that raises is reported to
    the others, and to `log` where no other takes notices.
    """

    def __init__(
        self,
        observers: Iterable[Observer],
        deliver: Callable[[Observer], Callable[[Fact], object]],
        log: Observer | None = None,
    ) -> None:
        self._takers: dict[FactKind, list[tuple[Callable[[Fact], object], float]]] = {}
        self._notified: list[tuple[Observer, Callable[[Fact], object]]] = []
        self._failures: set[tuple[int, str]] = set()  # the observer's identity, and the error's type
        self._log = log
        for observer in observers:
            take = deliver(observer)
            if Notice in facts_of(observer):
                self._notified.append((observer, take))
            for kind in facts_of(observer):
                share = sample_of(observer) if kind in SAMPLED_FACTS else 1.0
                if share > 0:
                    self._takers.setdefault(kind, []).append((take, share))

    def wants(self, kind: FactKind) -> bool:
        """Return whether any of the observers wants facts of such a kind."""
        return kind in self._takers

    def share(self, kind: FactKind) -> float:
        """Return the share of such facts to construct, by `is_sampled`: 0 when no observer wants them."""
        return max((share for _, share in self._takers.get(kind, ())), default=0.0)

    def __call__(self, fact: Fact) -> None:
        for take, share in self._takers.get(type(fact), ()):
            if share >= 1.0 or not isinstance(fact, Published | Handled) or is_sampled(fact.event_id, share):
                take(fact)

    def report_failure(self, observer: Observer, call: str, error: BaseException) -> None:
        """Report an observer that raised, once for each type of its errors, and to none that has raised itself.

        `call` is the name of the fact that it was called with, or "finish".
        """
        report = describe(error.__cause__ or error if isinstance(error, FactsLost) else error)
        failure = id(observer), report.type_name
        if failure in self._failures or len(self._failures) >= _MOST_REPORTS:
            return
        self._failures.add(failure)
        details: dict[str, object] = {
            "observer": _shown(observer),
            "fact": call,
            "error": report.type_name,
            "place": (report.traceback or "").partition("\n")[0].removeprefix("raised at "),
            "remedy": "mend it: it loses each fact for which it raises, and this is said once for a type of error",
        }
        notice = Notice("error", "observer_failed", details)
        failed = {identity for identity, _ in self._failures}
        others = [take for each, take in self._notified if id(each) not in failed]
        if not others and self._log is not None and id(self._log) not in failed:
            with contextlib.suppress(Exception):
                self._log(notice)
        for take in others:
            take(notice)


class DirectObservers(ObserverGroup):
    """Calls observers at once, in the caller's thread and context. A fact for which one raises is lost, and counted."""

    def __init__(self, observers: Iterable[Observer], log: Observer | None = None) -> None:
        self._finishes: list[tuple[Observer, Callable[[], object]]] = []
        super().__init__(observers, self._direct, log)

    def finish(self) -> None:
        """Let observers finish what they have put off; called when there will be no more facts."""
        for observer, finish in self._finishes:
            self._try(observer, "finish", finish)

    def _direct(self, observer: Observer) -> Callable[[Fact], object]:
        if (finish := finish_of(observer)) is not None:
            self._finishes.append((observer, finish))
        return lambda fact: self._try(observer, type(fact).__name__, partial(observer, fact))

    def _try(self, observer: Observer, call: str, function: Callable[[], object]) -> None:
        try:
            function()
        except Exception as error:
            lost_facts.add(_shown(observer), lost_with(error))
            self.report_failure(observer, call, error)
