"""What a handler may answer: nothing (done), or one of four values."""

import math
from dataclasses import dataclass
from datetime import timedelta

from holdfast.errors import ConfigurationError

Delay = float | timedelta
LONGEST_DELAY = timedelta(days=3653).total_seconds()


def delay_seconds(delay: Delay) -> float:
    """A delay in seconds; `ValueError` says what is wrong with one that nobody can wait for."""
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


def _checked(owner: str, delay: Delay) -> float:
    try:
        return delay_seconds(delay)
    except ValueError as error:
        remedy = "give seconds or a timedelta between zero and ten years"
        raise ConfigurationError(f"{owner}.delay", str(error), remedy) from None


@dataclass(frozen=True, slots=True)
class Done:
    """The event is handled. Returning nothing says the same."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Try again after `delay`, or as the retry policy says. It counts as an attempt."""

    delay: Delay | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        if self.delay is not None:
            _checked("Retry", self.delay)

    @property
    def seconds(self) -> float | None:
        return None if self.delay is None else delay_seconds(self.delay)


@dataclass(frozen=True, slots=True)
class Snooze:
    """Not yet: look again after `delay`. No attempt is counted, so the delay must be above zero."""

    delay: Delay

    def __post_init__(self) -> None:
        if _checked("Snooze", self.delay) == 0:
            remedy = "give a delay above zero: a snooze counts no attempt and would never end"
            raise ConfigurationError("Snooze.delay", "is zero", remedy)

    @property
    def seconds(self) -> float:
        return delay_seconds(self.delay)


@dataclass(frozen=True, slots=True)
class Reject:
    """Never: the event fails now, with failure reason `rejected`."""

    reason: str | None = None


Outcome = Done | Retry | Snooze | Reject

DONE = Done()
