"""What a handler may answer."""

import dataclasses
import math
from datetime import timedelta
from typing import Any

import pytest

from holdfast.errors import ConfigurationError
from holdfast.outcome import Done, Outcome, Reject, Retry, Snooze


def test_the_outcomes_are_values() -> None:
    """Done, retry later, snooze and reject; equal when they say the same (LSN-8)."""
    outcomes: list[Outcome] = [
        Done(),
        Retry(5, "busy"),
        Snooze(timedelta(minutes=1)),
        Reject("no such order"),
    ]
    assert outcomes == [Done(), Retry(5, "busy"), Snooze(timedelta(minutes=1)), Reject("no such order")]
    assert len(set(outcomes)) == 4
    for outcome in outcomes:
        for field in dataclasses.fields(outcome):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(outcome, field.name, None)


def test_delays_are_seconds_or_timedeltas() -> None:
    assert Retry().seconds is None
    assert Retry(0).seconds == 0
    assert Retry(timedelta(minutes=2)).seconds == 120
    assert Snooze(1.5).seconds == 1.5


@pytest.mark.parametrize("outcome", [Retry, Snooze])
@pytest.mark.parametrize(
    "delay", [-1, timedelta(seconds=-1), math.nan, math.inf, 10**400, timedelta(days=4_000), True, "5"]
)
def test_a_delay_that_nobody_can_wait_for_is_refused(outcome: Any, delay: Any) -> None:
    """LSN-8."""
    with pytest.raises(ConfigurationError, match="ten years") as caught:
        outcome(delay)
    assert caught.value.field == f"{outcome.__name__}.delay"


@pytest.mark.parametrize("delay", [0, 0.0, timedelta(0)])
def test_a_snooze_must_wait(delay: Any) -> None:
    """It counts no attempt, so without a wait it would be an endless tight loop (LSN-8)."""
    with pytest.raises(ConfigurationError, match="above zero"):
        Snooze(delay)
