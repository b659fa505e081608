"""The calls that the events of one ordering key allow, as a state machine: the head is called until it is done.

A call may begin for the head alone, and for the one before it when the process that was done with it died, for
nobody knows whether that was settled. No two calls run at once in processes that live.
"""

from collections.abc import Iterable, Mapping

from chaos.flow.calls import Mark


class OrderingKey:
    """One key of one handler; `step` says what was not allowed."""

    def __init__(self, events: Iterable[str], deaths: Mapping[int, float]) -> None:
        self._events = list(events)
        self._deaths = deaths
        self._head = 0
        self._running: Mark | None = None
        self._last: Mark | None = None  # that was done

    def step(self, mark: Mark) -> str:
        number = self._events.index(mark.key)
        if mark.what != "began":
            self._running = None
            if mark.what == "done":
                self._head, self._last = number + 1, mark
            return ""
        running, self._running = self._running, mark
        if running is not None and not self._dead(running, mark.at):
            return f"{mark.key} began while {running.key} ran"
        if number == self._head:
            return ""
        if number == self._head - 1 and self._last is not None and self._dead(self._last, mark.at):
            return ""
        return f"{mark.key} began, and {self._head} of {len(self._events)} was its key's head, not {number}"

    @property
    def done(self) -> bool:
        return self._head == len(self._events)

    def _dead(self, mark: Mark, at: float) -> bool:
        return self._deaths.get(mark.process, float("inf")) <= at


def violations(
    lines: Iterable[Mark], keys: Mapping[str, list[str]], deaths: Mapping[int, float]
) -> tuple[list[str], int]:
    """What calls were not allowed, and how many keys were finished; `keys` have their events, in order."""
    of: dict[str, OrderingKey] = {}
    for events in keys.values():
        key = OrderingKey(events, deaths)
        of |= dict.fromkeys(events, key)
    found = [problem for mark in lines if (problem := of[mark.key].step(mark))]
    return found, sum(key.done for key in set(of.values()))
