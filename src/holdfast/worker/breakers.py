"""Breakers, as one worker serves them: what it reports about handlers that have one, and when it stops by itself.

The state is the database's, one for the fleet. A worker reports each transient failure (`Falter`) and, now and then,
that something has succeeded. After as many failures in a row as open the breaker it runs nothing more of that handler
until the database has said what becomes of them. It begins with as many deliveries at the same time, and one more for
each success: however many places a worker has, a partner that is down is not called by all of them at once. It keeps at
most twice as many as run or have succeeded lately: the partner may be down when many come due after a quiet time.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from uuid import UUID

from holdfast.flow import MOST_IN_A_WORKER
from holdfast.handlers import Handler
from holdfast.postgres.delivery import Delivery
from holdfast.postgres.flow import Faltered
from holdfast.telemetry import Notice, Observer
from holdfast.worker.settlements import Falter

# Successes are reported so often, while nothing is known to be wrong.
_REPORT_INTERVAL = 0.2
# A report that was lost must not stop a handler for good.
_LONGEST_STOP = 10.0
_MOST_TOKENS = 100
# What has succeeded lately is counted in periods of this length: the present one and the one before.
_PERIOD = 1.0


class _Record:
    __slots__ = (
        *("after", "after_success", "earlier", "failed_at", "most", "since", "streak", "successes", "suspect"),
        "tokens",
    )

    def __init__(self, after: int) -> None:
        self.after = self.most = after  # deliveries at the same time: at first, and now
        self.since, self.successes, self.earlier = 0.0, 0, 0  # of this period, which began then, and the one before
        self.streak = 0  # failures in a row that are not reported
        self.failed_at = 0.0
        self.after_success = True  # since the last failure
        self.suspect = False  # the last thing that was reported is a failure, or an open breaker
        self.tokens: deque[UUID] = deque(maxlen=_MOST_TOKENS)  # of successes that are not reported


class Breakers:
    """The handlers of one worker that have a breaker.

    The worker's event loop calls it, but for `failed`, which the thread of a handler may call: two failures that meet
    there may count as one, and the next one counts.
    """

    def __init__(self, handlers: Iterable[Handler], observe: Observer) -> None:
        self._records = {each.name: _Record(each.breaker.after) for each in handlers if each.breaker is not None}
        self._observe = observe
        self._reported_at = 0.0
        self._on_answer: Callable[[str, bool], None] = lambda _handler, _open: None

    def when_answered(self, call: Callable[[str, bool], None]) -> None:
        """Have this called with a handler, and whether its breaker is open, when the database has said so."""
        self._on_answer = call

    def succeeded(self, delivery: Delivery) -> None:
        """Note that an attempt of a handler with a breaker has succeeded."""
        record = self._records[delivery.handler.name]
        record.streak, record.after_success = 0, True
        record.tokens.append(delivery.token)
        record.successes += 1
        if record.most < MOST_IN_A_WORKER:
            record.most += 1
            self._on_answer(delivery.handler.name, False)

    def failed(self, delivery: Delivery) -> bool:
        """Note a transient failure. Returns whether anything has succeeded since the one before it."""
        record = self._records[delivery.handler.name]
        after_success, record.after_success = record.after_success, False
        record.streak = 1 if after_success else record.streak + 1
        record.failed_at = time.monotonic()
        if record.streak >= record.after:
            record.most = record.after
        return after_success

    def room(self, handler: Handler, running: int) -> int:
        """Return how many more calls of a handler with a breaker may run at the same time."""
        record, now = self._records[handler.name], time.monotonic()
        if now - record.since > _PERIOD:
            lately = record.successes + record.earlier if now - record.since < 2 * _PERIOD else 0
            record.most = max(record.after, min(record.most, 2 * max(running, lately)))
            record.since, record.successes, record.earlier = now, 0, record.successes
        return record.most - running

    def stops(self, handler: Handler) -> bool:
        """Whether nothing of the handler may begin before its failures are reported."""
        if handler.breaker is None:
            return False
        record = self._records[handler.name]
        return record.streak >= record.after and time.monotonic() - record.failed_at < _LONGEST_STOP

    def answered(self, batch: Sequence[Falter], found: Sequence[Faltered]) -> None:
        """Learn what the database has made of failures."""
        falters = {each.delivery.id: each for each in batch}
        open_now: dict[str, bool] = {}
        for each in found:
            name = falters[each.id].delivery.handler.name
            open_now[name] = open_now.get(name, False) or each.open
            if each.opened:
                details: dict[str, object] = {
                    "handler_name": name,
                    "last_error": falters[each.id].report.text,
                    "action": "its events wait in the database; one probes now and then",
                    "remedy": f"holdfast handlers show {name}",
                }
                self._observe(Notice("warning", "breaker_opened", details))
        for name, is_open in open_now.items():
            record = self._records[name]
            record.streak, record.suspect = 0, True
            self._on_answer(name, is_open)

    def due(self, is_open: Callable[[str], bool]) -> list[tuple[str, UUID]]:
        """Return successes to report, by handler and token; none when that can wait."""
        waiting = [(name, record) for name, record in self._records.items() if record.tokens]
        now = time.monotonic()
        if now - self._reported_at < _REPORT_INTERVAL:
            waiting = [(name, record) for name, record in waiting if record.suspect or is_open(name)]
        if not waiting:
            return []
        self._reported_at = now
        found = [(name, token) for name, record in waiting for token in record.tokens]
        for _, record in waiting:
            record.tokens.clear()
            record.suspect = False
        return found

    def reported(self, found: Iterable[tuple[str, bool]]) -> None:
        """Learn which breakers are open after a report, and which it has closed."""
        for name, closed in found:
            self._records[name].suspect = not closed
            if closed:
                self._observe(Notice("info", "breaker_closed", {"handler_name": name}))
                self._on_answer(name, False)

    def __bool__(self) -> bool:
        return bool(self._records)
