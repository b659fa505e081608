"""The envelope's shape, and the ids of events."""

import os
import threading
import time
import typing
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from pydantic import ValidationError

from holdfast import envelope as module
from holdfast.envelope import EventEnvelope, uuid7, uuid7_time
from holdfast.errors import FieldError

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
    """ENV-1: the contract that every producer and consumer relies on."""
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
        "payload": dict[str, Any],
        "idempotency_key": str,
        "trace_context": typing.Optional[str],  # noqa: UP045
    }
    assert list(EventEnvelope.model_fields) == list(FIELDS)


def test_an_envelope_is_frozen() -> None:
    """ENV-1."""
    envelope = EventEnvelope(**FIELDS)
    with pytest.raises(ValidationError):
        envelope.source = "other"  # type: ignore[misc]


def test_an_envelope_can_be_kept_in_a_set() -> None:
    assert len({EventEnvelope(**FIELDS), EventEnvelope(**FIELDS)}) == 1


def test_unknown_fields_are_ignored() -> None:
    """ENV-3: a newer producer may add fields."""
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
    """ENV-1, and RELIABILITY S7: what is refused may be somebody's data."""
    with pytest.raises(ValidationError) as caught:
        EventEnvelope(**FIELDS | {field: value})
    assert field in str(caught.value) and "canary" not in str(caught.value)


def test_the_payload_is_not_part_of_the_repr() -> None:
    """RELIABILITY S7: an envelope in a log line does not leak its payload."""
    assert "o-1" not in repr(EventEnvelope(**FIELDS))


# --- ids


def test_uuid7_has_version_variant_and_time() -> None:
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    made = uuid7()
    assert (made.version, made.variant) == (7, "specified in RFC 4122")
    assert before <= uuid7_time(made) <= datetime.now(UTC) + timedelta(seconds=1)


def test_the_time_of_the_rfc_example() -> None:
    """RFC 9562, appendix A.6."""
    example = UUID("017F22E2-79B0-7CC3-98C4-DC0C0C07398F")
    assert uuid7_time(example) == datetime(2022, 2, 22, 19, 22, 22, tzinfo=UTC)


def test_only_version_7_carries_a_time() -> None:
    with pytest.raises(FieldError, match="version 4"):
        uuid7_time(uuid4())
    with pytest.raises(FieldError, match="9999"):
        uuid7_time(UUID(int=(2**48 - 1) << 80 | 7 << 76 | 0b10 << 62))


def test_ids_increase_strictly() -> None:
    ids = [uuid7() for _ in range(20_000)]
    assert ids == sorted(set(ids))


def test_ids_increase_when_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    first = uuid7()
    earlier = time.time_ns() - 3_600 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: earlier)
    later = [uuid7() for _ in range(1_000)]
    assert [first, *later] == sorted({first, *later})
    assert uuid7_time(later[-1]) - uuid7_time(first) < timedelta(seconds=1)


def test_ids_carry_into_the_next_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    """The random part may be at its end already: the next id is still greater, and still well-formed."""
    clockwork = module._Clockwork()
    clockwork._last = (1_000 << 74) | (2**74 - 1)
    monkeypatch.setattr(module, "_clockwork", clockwork)
    monkeypatch.setattr(time, "time_ns", lambda: 1_000 * 10**6)
    made = uuid7()
    assert (made.version, made.variant, made.int >> 80) == (7, "specified in RFC 4122", 1_001)


def test_ids_of_many_threads_are_distinct_and_increase_in_each() -> None:
    made: list[list[UUID]] = []

    def make() -> None:
        mine = [uuid7() for _ in range(5_000)]
        made.append(mine)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(mine == sorted(mine) for mine in made)
    assert len({id_ for mine in made for id_ in mine}) == 8 * 5_000


def test_the_random_part_is_random() -> None:
    """Every one of the 62 low bits takes both values: none is stuck."""
    ids = [uuid7().int & (2**62 - 1) for _ in range(2_000)]
    ones = [sum(id_ >> bit & 1 for id_ in ids) for bit in range(32)]
    assert all(800 < count < 1_200 for count in ones)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_does_not_repeat_its_parents_ids() -> None:
    uuid7()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"".join(uuid7().bytes for _ in range(100)))
        os._exit(0)
    os.waitpid(child, 0)
    data = os.read(reader, 1_600)
    os.close(reader)
    os.close(writer)
    theirs = {data[at + 6 : at + 16] for at in range(0, 1_600, 16)}
    ours = {uuid7().bytes[6:] for _ in range(100)}
    assert len(theirs) == 100
    assert not theirs & ours


def test_a_trusted_envelope_is_the_same_as_a_checked_one() -> None:
    """ENV-1: what the worker builds from a row cannot be told from what validation returns."""
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
