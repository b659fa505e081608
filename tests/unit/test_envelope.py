"""The envelope's shape, and the ids of events."""

import typing
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from pydantic import ValidationError

from holdfast.envelope import EventEnvelope, Payload
from holdfast.ids import uuid7

FIELDS: dict[str, Any] = {
    "event_id": UUID("01890a5d-ac96-774b-bcce-b302099a8057"),
    "event_type": "order.placed",
    "event_version": 1,
    "occurred_at": datetime(2026, 4, 25, 12, tzinfo=UTC),
    "source": "shop",
    "target": None,
    "domain_id": None,
    "payload": {"order_id": "o-1"},
    "idempotency_key": "01890a5d-ac96-774b-bcce-b302099a8057",
    "trace_context": None,
}


def test_the_envelope_has_exactly_these_fields() -> None:
    """The contract that every producer and consumer relies on (ENV-1)."""
    shape = {name: field.annotation for name, field in EventEnvelope.model_fields.items()}
    occurred_at = shape.pop("occurred_at")
    assert "datetime" in str(occurred_at).lower()
    assert shape == {
        "event_id": UUID,
        "event_type": str,
        "event_version": int,
        "source": str,
        "target": typing.Optional[str],  # noqa: UP045 - equal to str | None, as pydantic reports it
        "domain_id": typing.Optional[UUID],  # noqa: UP045
        "payload": Payload,
        "idempotency_key": str,
        "trace_context": typing.Optional[str],  # noqa: UP045
    }
    assert Payload.__default__ == dict[str, Any]
    assert list(EventEnvelope.model_fields) == list(FIELDS)


def test_an_envelope_is_frozen() -> None:
    """ENV-1."""
    envelope = EventEnvelope(**FIELDS)
    with pytest.raises(ValidationError):
        envelope.source = "other"  # type: ignore[misc]


def test_an_envelope_can_be_kept_in_a_set() -> None:
    assert len({EventEnvelope(**FIELDS), EventEnvelope(**FIELDS)}) == 1


def test_unknown_fields_are_ignored() -> None:
    """A newer producer may add fields (ENV-3)."""
    envelope = EventEnvelope(**FIELDS, added_in_version_9="x")
    assert not hasattr(envelope, "added_in_version_9")


def test_an_envelope_survives_json() -> None:
    envelope = EventEnvelope(**FIELDS)
    assert EventEnvelope.model_validate_json(envelope.model_dump_json()) == envelope


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("occurred_at", datetime(2026, 1, 1)),
        ("event_version", 0),
        ("event_type", ""),
        ("idempotency_key", ""),
        ("payload", ["canary", "not an object"]),
        ("event_id", "canary"),
    ],
)
def test_a_malformed_envelope_is_refused_without_quoting_it(field: str, value: object) -> None:
    """What is refused may be somebody's data (ENV-1, S7)."""
    with pytest.raises(ValidationError) as caught:
        EventEnvelope(**FIELDS | {field: value})
    assert field in str(caught.value) and "canary" not in str(caught.value)


def test_the_payload_is_not_part_of_the_repr() -> None:
    """RELIABILITY S7: an envelope in a log line does not leak its payload."""
    assert "o-1" not in repr(EventEnvelope(**FIELDS))


def test_a_trusted_envelope_is_the_same_as_a_checked_one() -> None:
    """What the worker builds from a row cannot be told from what validation returns (ENV-1)."""
    values = {
        "event_id": uuid7(),
        "event_type": "order.placed",
        "event_version": 2,
        "occurred_at": datetime.now(UTC),
        "source": "shop",
        "target": None,
        "domain_id": uuid7(),
        "payload": {"a": [1, {"b": None}]},
        "idempotency_key": "k",
        "trace_context": None,
    }
    checked, trusted = EventEnvelope(**values), EventEnvelope.trusted(dict(values))
    assert trusted == checked and hash(trusted) == hash(checked) and repr(trusted) == repr(checked)
    assert trusted.model_dump_json() == checked.model_dump_json()
    assert trusted.model_fields_set == checked.model_fields_set
    copy = trusted.model_copy(update={"source": "mail"})
    assert (copy.source, trusted.source) == ("mail", "shop")
    with pytest.raises(ValidationError):
        trusted.source = "mail"  # type: ignore[misc]
