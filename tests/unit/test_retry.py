"""The retry curve: bounded, jittered, above zero."""

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigurationError
from holdfast.retry import DEFAULT_RETRY_POLICY, SHORTEST_DELAY, RetryPolicy

policies = st.builds(
    RetryPolicy,
    base_delay=st.floats(0.001, 100),
    multiplier=st.floats(1, 50),
    max_delay=st.floats(100, 1e6),
    strategy=st.sampled_from(["exponential", "linear", "constant", "none"]),
)


def test_the_default_policy() -> None:
    """Base 1 s, times 2, at most 300 s, five attempts (RTY-1)."""
    policy = DEFAULT_RETRY_POLICY
    assert [policy.ceiling(attempt) for attempt in range(1, 11)] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]
    assert [policy.exhausted(attempt) for attempt in range(1, 7)] == [False, False, False, False, True, True]


@pytest.mark.parametrize(
    ("strategy", "ceilings"),
    [
        ("exponential", [2, 6, 18, 20]),
        ("linear", [2, 4, 6, 8]),
        ("constant", [2, 2, 2, 2]),
    ],
)
def test_the_strategies(strategy: Any, ceilings: list[float]) -> None:
    """RTY-1."""
    policy = RetryPolicy(base_delay=2, multiplier=3, max_delay=20, strategy=strategy)
    assert [policy.ceiling(attempt) for attempt in (1, 2, 3, 4)] == ceilings


def test_the_strategy_none_never_retries() -> None:
    """RTY-1."""
    assert RetryPolicy(strategy="none").exhausted(1)


def test_the_total_delay_ends_the_retries_too() -> None:
    """max_total_delay (RTY-1)."""
    policy = RetryPolicy(max_attempts=100, max_total_delay=60)
    assert not policy.exhausted(3, waited=59.9)
    assert policy.exhausted(3, waited=60)
    assert not RetryPolicy(max_attempts=100).exhausted(3, waited=1e9)


@pytest.mark.parametrize("strategy", ["exponential", "linear"])
@pytest.mark.parametrize("attempt", [10_000, 2**31, 10**400])
def test_a_late_attempt_waits_the_cap(strategy: Any, attempt: int) -> None:
    """RELIABILITY C3: no overflow, no infinity."""
    for policy in (RetryPolicy(strategy=strategy), RetryPolicy(strategy=strategy, base_delay=1, multiplier=3)):
        assert policy.ceiling(attempt) == 300.0
        assert 0 < policy.delay(attempt) <= 300.0


@given(policies, st.integers(-5, 100_000), st.floats(0, 1))
def test_a_delay_is_above_zero_and_within_its_ceiling(policy: RetryPolicy, attempt: int, chance: float) -> None:
    """For every policy, attempt and throw of the dice (RTY-1, C3)."""
    ceiling = policy.ceiling(attempt)
    assert policy.base_delay <= ceiling <= policy.max_delay
    delay = policy.delay(attempt, rand=lambda: chance)
    assert SHORTEST_DELAY <= delay <= ceiling
    assert delay == pytest.approx(max(chance * ceiling, SHORTEST_DELAY))


@given(policies, st.integers(1, 1_000))
def test_ceilings_never_fall(policy: RetryPolicy, attempt: int) -> None:
    assert policy.ceiling(attempt) <= policy.ceiling(attempt + 1)


@pytest.mark.parametrize("attempt", [1, 5, 10_000])
def test_the_jitter_is_uniform(attempt: int) -> None:
    """Full jitter, by a Kolmogorov-Smirnov test with a fixed seed (RTY-1, C3)."""
    throw = random.Random(20260425).random
    ceiling = DEFAULT_RETRY_POLICY.ceiling(attempt)
    count = 5_000
    shares = sorted(DEFAULT_RETRY_POLICY.delay(attempt, throw) / ceiling for _ in range(count))
    distance = max(max((rank + 1) / count - share, share - rank / count) for rank, share in enumerate(shares))
    assert distance < 1.63 / math.sqrt(count)  # the 1 % critical value


def test_events_that_failed_together_come_back_apart() -> None:
    """RELIABILITY C4: a herd is spread over at least half of its window."""
    delays = sorted(DEFAULT_RETRY_POLICY.delay(5) for _ in range(10_000))
    assert delays[9_500] - delays[500] > 8


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_attempts", 0),
        ("max_attempts", True),
        ("max_attempts", 2.0),
        ("max_attempts", 2**31),
        ("base_delay", 0),
        ("base_delay", -1),
        ("base_delay", math.nan),
        ("base_delay", True),
        ("base_delay", "1"),
        ("multiplier", 0.5),
        ("multiplier", math.inf),
        ("max_delay", 0.5),
        ("max_delay", math.inf),
        ("max_delay", None),
        ("max_total_delay", -1),
        ("max_total_delay", math.nan),
        ("strategy", "fibonacci"),
        ("terminal_errors", [ValueError]),
        ("terminal_errors", ValueError),
        ("terminal_errors", (ValueError("x"),)),
        ("terminal_errors", (int,)),
    ],
)
def test_a_policy_that_cannot_work_is_refused(field: str, value: object) -> None:
    """When it is written, not when the first event fails (RTY-1)."""
    arguments: dict[str, Any] = {field: value}
    with pytest.raises(ConfigurationError) as caught:
        RetryPolicy(**arguments)
    assert caught.value.field == f"RetryPolicy.{field}"
