"""What the pages of handlers say: the state of each, what holds it back, and its numbers of the last hour."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from holdfast.console.formatting import duration, percent
from holdfast.operator import Flow, HandlerFlow, HandlerRates, HandlerStatus, Period

FAILING = 0.01  # the share of attempts of the last hour from where on a handler does not just fail now and then
_ORIGIN = datetime(2000, 1, 1, tzinfo=UTC)
_ORDER = ("failing", "broken", "unserved", "paused", "some", "retrying", "healthy", "idle", "retired")
STATES = {
    "failing": ("failed", "Failing"),
    "broken": ("warning", "Breaker open"),
    "unserved": ("warning", "No worker"),
    "paused": ("paused", "Paused"),
    "some": ("warning", "Some fail"),
    "retrying": ("delayed", "Retrying"),
    "healthy": ("delivered", "Healthy"),
    "idle": ("idle", "Idle"),
    "retired": ("discarded", "Retired"),
}


@dataclass(frozen=True, slots=True)
class HandlerView:
    """A handler with what it did in the last hour, and its failures of each hour of a day."""

    handler: HandlerStatus
    rates: HandlerRates | None
    by_hour: Mapping[datetime, int]

    @property
    def name(self) -> str:
        return self.handler.handler_name

    def counted(self, outcome: str) -> int:
        """How many deliveries ended so, in the last hour."""
        return self.rates.tally.counts.get(outcome, 0) if self.rates else 0  # type: ignore[call-overload]

    @property
    def attempts(self) -> int:
        return sum(self.counted(each) for each in ("delivered", "retried", "failed"))

    @property
    def failing(self) -> float:
        """The share of attempts that failed."""
        return (self.counted("retried") + self.counted("failed")) / self.attempts if self.attempts else 0.0

    @property
    def a_minute(self) -> float:
        return self.rates.handled * 60 if self.rates else 0.0

    def ran(self, share: float) -> str:
        """How long its attempts took: a quantile, estimated within a bucket."""
        return estimate(self.rates.tally.handler_time.quantile(share) if self.rates else None)

    def waited(self, share: float) -> str:
        """How long after they were due its attempts had ended."""
        return estimate(self.rates.tally.outbox_time.quantile(share) if self.rates else None)

    @property
    def state(self) -> str:
        flow = self.handler.flow
        if self.handler.retired:
            return "retired"
        if flow is not None and flow.paused_at is not None:
            return "paused"
        if flow is not None and flow.opened_at is not None:
            return "broken"
        if self.handler.unserved:
            return "unserved"
        if self.failing > FAILING:
            return "failing" if self.counted("failed") else "retrying"
        if self.counted("failed"):
            return "some"
        return "healthy" if self.attempts else "idle"

    @property
    def glyph(self) -> str:
        return STATES[self.state][0]

    @property
    def word(self) -> str:
        return STATES[self.state][1]

    @property
    def order(self) -> tuple[int, int, int, str]:
        return (_ORDER.index(self.state), -self.counted("failed"), -self.attempts, self.name)

    @property
    def limits(self) -> list[str]:
        return limits(self.handler.flow)


def limits(flow: HandlerFlow | None) -> list[str]:
    """The limits of a handler, in words."""
    if flow is None:
        return []
    found = []
    if flow.fleet_concurrency is not None:
        found.append(f"{flow.fleet_concurrency:,} at once")
    if flow.rate is not None:
        found.append(f"{flow.rate:g} a second")
    return found


def sentence(views: Iterable[HandlerView]) -> str:
    """Whether they work, in a sentence."""
    states = [view.state for view in views if view.state != "retired"]
    if not states:
        return "No handler has subscribed yet."
    said = {
        "failing": "failing",
        "broken": "held back by an open breaker",
        "unserved": "owed events and served by no worker",
        "paused": "paused",
        "some": "giving up now and then",
        "retrying": "retrying",
    }
    found = [(states.count(state), words) for state, words in said.items() if state in states]
    if not found:
        return "The only handler works." if len(states) == 1 else f"All {len(states):,} handlers work."
    told = ", ".join(f"{number:,} {'is' if number == 1 else 'are'} {words}" for number, words in found)
    return f"Of {len(states):,} {'handler' if len(states) == 1 else 'handlers'} {told}."


def one_sentence(view: HandlerView) -> str:
    """Whether a handler works, and who is owed what."""
    flow = view.handler.flow
    owed = f"{view.handler.open:,} open, {view.handler.failed:,} failed."
    match view.state:
        case "retired":
            return f"It has no subscription any more. {owed}"
        case "paused":
            by = f" by {flow.paused_by}" if flow is not None and flow.paused_by else ""
            return f"It is paused{by}: nothing is claimed for it until it is resumed. {owed}"
        case "broken":
            probe = flow.probe_in if flow is not None else None
            when = f"; the next probe is in {duration(probe)}" if probe is not None else ""
            return f"Its breaker is open after failures in a row{when}. {owed}"
        case "unserved":
            return f"No living worker has it. {owed}"
        case "failing" | "some":
            return f"It gave up on {view.counted('failed'):,} in the last hour; {percent(view.failing)} fail. {owed}"
        case "retrying":
            return f"{percent(view.failing)} of its attempts fail and are tried again. {owed}"
        case "healthy":
            return f"It works. {owed}"
    return f"It had nothing to do in the last hour. {owed}"


def estimate(seconds: float | None) -> str:
    """A duration that is estimated within a wide bucket: two digits of it, at most, mean something."""
    return "–" if seconds is None else f"~{duration(float(f'{seconds:.2g}'))}"


def flow_of(series: Sequence[Period], step: int) -> list[Flow]:
    """The series of one handler, in steps of minutes, for the charts."""
    width = timedelta(minutes=step)
    found: dict[datetime, list[int]] = {}
    for each in series:
        start = _ORIGIN + ((each.start - _ORIGIN) // width) * width
        counts, waited = each.tally.counts, each.tally.outbox_time.counts
        numbers = [
            counts["delivered"],
            counts["retried"] + counts["failed"],
            counts["failed"],
            sum(waited[:7]),
            sum(waited[7:10]),
            sum(waited[10:13]),
            sum(waited[13:]),
        ]
        found[start] = [a + b for a, b in zip(found.get(start, [0] * 7), numbers, strict=True)]
    return [Flow(start, *numbers) for start, numbers in sorted(found.items())]
