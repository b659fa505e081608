"""Versions of an event type: a deadline, and warnings after it."""

import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime

import pytest
from structlog.testing import capture_logs

from holdfast import Publisher, deprecation
from holdfast.errors import ConfigurationError
from holdfast.new_event import NewEvent
from holdfast.telemetry import Notice

NOW = datetime(2026, 4, 25, 12, tzinfo=UTC)


@pytest.fixture
def deprecations() -> Iterator[None]:
    yield
    deprecation._deprecations.clear()
    deprecation._warned.clear()


@pytest.mark.parametrize(
    ("old", "expected"),
    [
        ("decision.recorded", "decision.recorded.v2"),
        ("decision.recorded.v2", "decision.recorded.v3"),
        ("decision.recorded.v9", "decision.recorded.v10"),
        ("v2", "v2.v2"),
        ("a.v02", "a.v02.v2"),
    ],
)
def test_a_breaking_change_takes_the_next_suffix(old: str, expected: str) -> None:
    """ENV-3."""
    assert deprecation.successor(old) == expected


def many() -> None:
    list(Publisher("shop", generation=0)._steps.publish_many([NewEvent("order.placed", {})]))


def plainly() -> None:
    list(Publisher("shop", generation=0)._steps.publish_plain("order.placed", {}))


def with_options() -> None:
    Publisher("shop").row_of(NewEvent("order.placed", {}, delay=1))


@pytest.mark.parametrize("publish", [many, plainly, with_options])
@pytest.mark.usefixtures("deprecations")
def test_publishing_past_the_deadline_warns_once(publish: Callable[[], None]) -> None:
    """The deadline warns when it passes, and names the successor (ENV-3)."""
    deprecation.deprecate("order.placed", date(2026, 1, 31), "order.placed.v2")
    with capture_logs() as logs, pytest.warns(DeprecationWarning, match=r"order\.placed\.v2"):
        publish()
    assert [(log["log_level"], log["event_type"], log["successor"]) for log in logs] == [
        ("warning", "order.placed", "order.placed.v2")
    ]
    with capture_logs() as logs, warnings.catch_warnings():
        warnings.simplefilter("error")
        publish()
    assert logs == []


@pytest.mark.usefixtures("deprecations")
def test_until_the_deadline_nothing_warns() -> None:
    """The last day is still a day of use (ENV-3)."""
    deprecation.deprecate("order.placed", date(2026, 1, 31), "order.placed.v2")
    notices: list[Notice] = []
    deprecation.warn_if_deprecated("order.placed", notices.append, today=date(2026, 1, 31))
    deprecation.warn_if_deprecated("order.placed.v2", notices.append, today=date(2030, 1, 1))
    assert notices == []
    with pytest.warns(DeprecationWarning):
        deprecation.warn_if_deprecated("order.placed", notices.append, today=date(2026, 2, 1))
    details = {"event_type": "order.placed", "deadline": "2026-01-31", "successor": "order.placed.v2"}
    assert notices == [Notice("warning", "event_type_deprecated", details)]


@pytest.mark.usefixtures("deprecations")
def test_a_deprecation_is_checked() -> None:
    for deadline, successor, field in (
        (NOW, "order.placed.v2", "deadline"),
        ("2026-01-31", "order.placed.v2", "deadline"),
        (date(2026, 1, 31), "", "successor"),
        (date(2026, 1, 31), "order.placed", "successor"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            deprecation.deprecate("order.placed", deadline, successor)  # type: ignore[arg-type]
        assert caught.value.field == field
