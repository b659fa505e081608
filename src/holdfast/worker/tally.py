"""Counts what becomes of deliveries, handler by handler, and reports it: a summary each minute, each one on request."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Final

from holdfast.postgres.delivery import Delivery
from holdfast.settings import LogHandled
from holdfast.telemetry import Counters, Handled, Notice, Observer
from holdfast.worker.decoding import facts

_INTERVAL: Final = 60.0
_MOST_HANDLERS: Final = 20
_HANDLER = attrgetter("handler.name")


class Tally:
    """The counts of the current minute."""

    def __init__(self, counters: Counters, observe: Observer, log_handled: LogHandled) -> None:
        self._counters = counters
        self._observe = observe
        self._level = None if log_handled == "never" else log_handled
        self._begin()

    def _begin(self) -> None:
        self._since = time.monotonic()
        self._counts: dict[str, Counter[str]] = {"handled": Counter(), "retried": Counter(), "failed": Counter()}

    def handled(self, deliveries: Sequence[Delivery]) -> None:
        """Count deliveries whose handlers have succeeded, once they are settled."""
        self._counters.delivered += len(deliveries)
        self._counts["handled"].update(map(_HANDLER, deliveries))
        if self._level is not None:
            now = time.monotonic()
            for each in deliveries:
                took = 0.0 if each.started_at is None else now - each.started_at
                self._observe(Handled(*facts(each), took=took, level=self._level))

    def retried(self, deliveries: Iterable[Delivery]) -> None:
        """Count attempts that will be repeated."""
        self._counts["retried"].update(map(_HANDLER, deliveries))

    def failed(self, deliveries: Iterable[Delivery]) -> None:
        """Count deliveries that have failed for good."""
        self._counts["failed"].update(map(_HANDLER, deliveries))

    async def run(self) -> None:
        """Report each minute."""
        self._since = time.monotonic()
        while True:
            await asyncio.sleep(_INTERVAL)
            self.report()

    def report(self) -> None:
        """Report what has happened since the last report; when nothing has, nothing."""
        counts, since = self._counts, self._since
        self._begin()
        busy = sum(counts.values(), Counter())
        if not busy:
            return
        handlers = {
            name: {what: counted[name] for what, counted in counts.items() if counted[name]}
            for name, _ in busy.most_common(_MOST_HANDLERS)
        }
        details: dict[str, object] = {
            "seconds": round(self._since - since, 1),
            **{what: counted.total() for what, counted in counts.items()},
            "handlers": handlers,
        }
        if len(busy) > len(handlers):
            details["more_handlers"] = len(busy) - len(handlers)
        self._observe(Notice("info", "worker_summary", details))
