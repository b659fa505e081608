"""Failures that are alike: every one is in the log, as an entry or in the number of one."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from typing import Any
from uuid import uuid4

import pytest

from holdfast.errors import ConfigurationError
from holdfast.measurements import Measurements
from holdfast.observability import alike, background
from holdfast.observability.alike import ALONE, AlikeFailures, Failure
from holdfast.observability.background import Background
from holdfast.observability.observers import Observers
from holdfast.observing import DirectObservers, FactsLost, require_observers
from holdfast.telemetry import Failed, Notice, Retried


def failure(kind: type[Any] = Failed, handler: str = "billing.charge", signature: str = "ValueError:1") -> Any:
    identity = uuid4()
    own = {"failure_reason": "retry_terminal"} if kind is Failed else {"retry_in": 1.0}
    return kind(
        *(identity, identity, "order.placed", "shop", None, handler, 1, "c-1"),
        **{"last_error": f"ValueError: {identity}", "error_signature": signature, "traceback": "raised at", **own},
    )


class Written(list[tuple[Failure, int]]):
    def __call__(self, fact: Failure, count: int) -> None:
        self.append((fact, count))


def test_a_storm_is_few_entries_that_stand_for_all() -> None:
    """None is sampled away: the numbers sum up to all failures of each kind, and each kind has its error (OBS-1)."""
    written = Written()
    failures = AlikeFailures(written)
    kinds = [(Failed, "a.one", "X:1"), (Failed, "a.one", "X:2"), (Failed, "a.two", "X:1"), (Retried, "a.one", "X:1")]
    given = [failure(*kind) for _ in range(300) for kind in kinds]
    for each in given:
        failures.add(each)
    assert len(written) == len(kinds) * ALONE, "the others wait for the end of the second"
    failures.finish()
    assert len(written) == len(kinds) * (ALONE + 1)
    sums: Counter[Any] = Counter()
    for fact, count in written:
        sums[type(fact), fact.handler_name, fact.error_signature] += count
        assert fact.traceback
    assert sums == Counter((type(each), each.handler_name, each.error_signature) for each in given)
    assert [fact for fact, count in written if count > 1] == given[-len(kinds) :], "the last of each kind"


def test_the_next_second_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was counted is written first, and each kind has entries of its own again (OBS-1)."""
    written, now = Written(), 100.0
    monkeypatch.setattr(alike.time, "monotonic", lambda: now)
    failures = AlikeFailures(written)
    for _ in range(ALONE + 7):
        failures.add(failure())
    now += alike.WINDOW
    failures.add(failure())
    assert [count for _, count in written] == [1] * ALONE + [7, 1]
    failures.finish()
    failures.finish()
    assert len(written) == ALONE + 2, "nothing is written twice"


def test_what_is_put_off_is_done_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without another item, and before a flush is done: a worker that stops loses nothing (OBS-1)."""
    monkeypatch.setattr(background, "FINISH_AFTER", 0.05)
    finished, flushed = threading.Event(), threading.Event()
    taken: list[int] = []
    told: list[str] = []

    def finish() -> None:
        told.append(f"finished {len(taken)}")
        finished.set()

    queue = Background("test", taken.append, lambda count: None, finish)
    queue.put(1)
    assert finished.wait(10) and told == ["finished 1"]
    monkeypatch.setattr(background, "FINISH_AFTER", 600.0)
    queue.put(2)
    queue.flush(lambda: (told.append("flushed"), flushed.set()))
    assert flushed.wait(10) and told == ["finished 1", "finished 2", "flushed"]


class Refuses(Written):
    """A log that cannot write what one handler failed with."""

    def __init__(self, handler: str, error: BaseException) -> None:
        super().__init__()
        self._handler, self._error = handler, error

    def __call__(self, fact: Failure, count: int) -> None:
        if fact.handler_name == self._handler:
            raise self._error
        super().__call__(fact, count)


@pytest.mark.parametrize("error", [OSError("disk"), SystemExit(1)])
@pytest.mark.parametrize("ended_by", ["finish", "add"])
def test_an_entry_that_cannot_be_written_costs_no_other(
    monkeypatch: pytest.MonkeyPatch, ended_by: str, error: BaseException
) -> None:
    """The other kinds are written, and so is the failure that ends the second; what is lost is counted (OBS-1)."""
    now = 100.0
    monkeypatch.setattr(alike.time, "monotonic", lambda: now)
    written = Written()
    failures = AlikeFailures(lambda fact, count: written(fact, count))
    for handler in ("a.one", "a.two", "a.three"):
        for _ in range(ALONE + 5):
            failures.add(failure(handler=handler))
    written = Refuses("a.one", error)
    now += alike.WINDOW
    with pytest.raises(FactsLost) as raised:
        failures.finish() if ended_by == "finish" else failures.add(failure(handler="a.four"))
    assert raised.value.count == 5 and raised.value.__cause__ is error
    told = [(fact.handler_name, count) for fact, count in written]
    assert told == [("a.two", 5), ("a.three", 5), *([] if ended_by == "finish" else [("a.four", 1)])]


@pytest.mark.parametrize("error", [FactsLost(7), SystemExit(1)])
def test_what_finish_loses_is_dropped_and_the_thread_goes_on(error: BaseException) -> None:
    """As many as it says, one if it does not; what comes after it is consumed (OBS-1)."""
    errors, taken, flushed = [error], list[int](), threading.Event()

    def finish() -> None:
        if errors:
            raise errors.pop()

    queue = Background("test", taken.append, lambda count: None, finish)
    queue.put(1)
    queue.flush(lambda: sys.exit(1))
    queue.put(2)
    queue.flush(flushed.set)
    assert flushed.wait(10) and taken == [1, 2]
    assert queue.dropped == (7 if isinstance(error, FactsLost) else 1)


@pytest.mark.parametrize("direct", [True, False])
async def test_a_finish_that_raises_is_told_and_counted(direct: bool) -> None:
    """As an error for a fact is, with the type of what was raised (OBS-1)."""
    notices: list[Any] = []

    class Keeps:
        facts = frozenset((Failed,))

        def __call__(self, fact: object) -> None: ...

        def finish(self) -> None:
            raise FactsLost(3) from OSError("disk")

    before = Measurements.of_publishing().facts_dropped
    if direct:
        group: Any = DirectObservers((Keeps(), notices.append))
        group(failure())
        group.finish()
        assert Measurements.of_publishing().facts_dropped == before + 3
    else:
        group = Observers((Keeps(), notices.append))
        group(failure())
        await group.flush(10)
        assert group.dropped == 3
    [told] = [each.details for each in notices if isinstance(each, Notice)]
    assert (told["fact"], told["error"]) == ("finish", "OSError")


def test_an_observer_s_finish_is_a_function() -> None:
    """A mistake is named before anything runs (OPS-1)."""

    def observe(fact: object) -> None: ...

    observe.finish = "soon"  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match="finish is no function"):
        require_observers((observe,))
