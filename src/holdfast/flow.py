"""Limits of handlers, as they are declared: rates, and what becomes of events while a handler's partner is down."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from holdfast.checks import number, quoted, whole
from holdfast.errors import ConfigurationError

__all__ = ["Pause"]  # for applications

# Deliveries of one handler at the same time: in one worker, and in all workers together.
MOST_IN_A_WORKER, MOST_IN_THE_FLEET = 10_000, 100_000
SLOWEST_RATE, FASTEST_RATE = 0.00001, 1_000_000.0

_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?/ ?(s|min|m|h)")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "m": 60.0}

OnOutage = Literal["retry", "pause"]


@dataclass(frozen=True, slots=True)
class Pause:
    """A breaker: after so many transient failures in a row the handler's events wait in the database.

    One event probes after `first_probe` seconds, and after twice as long each time, up to `longest_wait`. When it
    succeeds the others follow.
    """

    after: int = 5
    first_probe: float = 1.0
    longest_wait: float = 30.0

    def __post_init__(self) -> None:
        whole("Pause.after", self.after, 1, 1_000)
        number("Pause.first_probe", self.first_probe, 0.01, 3_600)
        number("Pause.longest_wait", self.longest_wait, 0.01, 3_600)
        if self.longest_wait < self.first_probe:
            problem = f"is {self.longest_wait:,.12g}, and first_probe {self.first_probe:,.12g} is longer"
            raise ConfigurationError("Pause.longest_wait", problem, "make it as long as first_probe, or longer")


def breaker(field: str, value: object) -> Pause | None:
    """Return the breaker that `on_outage` asks for; None for `"retry"`."""
    if isinstance(value, Pause):
        return value
    if value not in ("retry", "pause"):
        raise ConfigurationError(field, f"is {quoted(value)}", 'use "retry", "pause" or Pause(...)')
    return Pause() if value == "pause" else None


def in_a_worker(field: str, value: int | None) -> int | None:
    """Return a limit of deliveries at the same time in one worker."""
    return None if value is None else whole(field, value, 1, MOST_IN_A_WORKER)


def in_the_fleet(field: str, value: int | None) -> int | None:
    """Return a limit of deliveries at the same time in all workers together."""
    return None if value is None else whole(field, value, 1, MOST_IN_THE_FLEET)


def per_second(field: str, value: str | float | None) -> float | None:
    """Return a rate per second: of a text like `"100/s"`, `"90/min"` or `"10/h"`, or of a number.

    >>> per_second("rate", "90/min")
    1.5
    """
    if value is None:
        return None
    remedy = 'write "100/s", "90/min" or "10/h"'
    if isinstance(value, str):
        match = _RATE.fullmatch(value.strip())
        if match is None or len(value) > 40:
            raise ConfigurationError(field, f"is {quoted(value)}", remedy)
        rate = float(match[1]) / _SECONDS[match[2]]
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigurationError(field, f"is {quoted(value)}", remedy)
    else:
        rate = float(value)
    if not SLOWEST_RATE <= rate <= FASTEST_RATE:
        bounds = f"from one a day to {FASTEST_RATE:,.0f} a second"
        stop = "; to stop a handler, pause it" if rate == 0 else ""
        raise ConfigurationError(field, f"is {quoted(value)}", f"give a rate {bounds}{stop}")
    return rate


def shown_rate(rate: float) -> str:
    """Return a rate as one writes it.

    >>> [shown_rate(each) for each in (100.0, 1.5, 10 / 3600)]
    ['100/s', '1.5/s', '10/h']
    """
    unit = next((unit for unit, seconds in _SECONDS.items() if rate * seconds >= 1), "h")
    return f"{rate * _SECONDS[unit]:.6g}/{unit}"
