"""The outcomes that a handler may return: `Done`, `Retry`, `Snooze` or `Reject`. Returning None means `Done`."""

import math
from dataclasses import dataclass
from datetime import timedelta

from holdfast.checks import Refusal, instance
from holdfast.errors import ConfigurationError

__all__ = ["Done", "Outcome", "Reject", "Retry", "Snooze"]

Delay = float | timedelta
LONGEST_DELAY = timedelta(days=3653).total_seconds()


def delay_seconds(delay: Delay) -> float:
    """Return a delay in seconds; raise a `ValueError` that names the problem if it is no possible delay."""
    if isinstance(delay, timedelta):
        seconds = delay.total_seconds()
    elif isinstance(delay, bool) or not isinstance(delay, int | float):
        raise ValueError(f"is {type(delay).__name__}, not a number of seconds or a timedelta")
    else:
        try:
            seconds = float(delay)
        except OverflowError:
            seconds = math.inf
    if math.isnan(seconds):
        raise ValueError("is not a number")
    if seconds < 0:
        raise ValueError("is negative")
    if seconds > LONGEST_DELAY:
        raise ValueError("is longer than ten years")
    return seconds


def require_delay(field: str, delay: Delay, *, error: Refusal = ConfigurationError) -> float:
    """Return a delay in seconds; the error names field, problem and remedy."""
    try:
        return delay_seconds(delay)
    except ValueError as problem:
        raise error(field, str(problem), "give seconds or a timedelta between zero and ten years") from None


@dataclass(frozen=True, slots=True)
class Done:
    """The event is handled. Returning nothing says the same."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Deliver the event again after `delay`, or as the retry policy says. It counts as an attempt."""

    delay: Delay | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        if self.delay is not None:
            require_delay("Retry.delay", self.delay)
        _require_reason("Retry.reason", self.reason)

    @property
    def seconds(self) -> float | None:
        return None if self.delay is None else delay_seconds(self.delay)


@dataclass(frozen=True, slots=True)
class Snooze:
    """Deliver the event again after `delay`. No attempt is counted, so the delay must be above zero."""

    delay: Delay

    def __post_init__(self) -> None:
        if require_delay("Snooze.delay", self.delay) == 0:
            remedy = "give a delay above zero: a snooze counts no attempt and would never end"
            raise ConfigurationError("Snooze.delay", "is zero", remedy)

    @property
    def seconds(self) -> float:
        return delay_seconds(self.delay)


@dataclass(frozen=True, slots=True)
class Reject:
    """The event fails now, with failure reason `rejected`."""

    reason: str | None = None

    def __post_init__(self) -> None:
        _require_reason("Reject.reason", self.reason)


def _require_reason(field: str, reason: object) -> None:
    if reason is not None:
        instance(field, reason, str, "pass text for people who read it later")


Outcome = Done | Retry | Snooze | Reject

DONE = Done()
