"""Rows of the outbox: an event becomes the text of columns, and an envelope."""

import enum
import json
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any
from uuid import UUID, uuid4

import pytest

from holdfast.envelope import EventEnvelope
from holdfast.errors import FieldError, PayloadError, PublishError
from holdfast.new_event import NewEvent
from holdfast.outbox_row import OutboxRow, PlainRow, envelope_of, inherited_headers, origin, plain, prepare
from holdfast.postgres.queries import Queries

SHOP = origin("shop", 0, "outbox_default")
NOW = datetime(2026, 4, 25, 12, tzinfo=UTC)
ID = UUID("01890a5d-ac96-774b-bcce-b302099a8057")
SOON = datetime.now(UTC) + timedelta(hours=1)


class Type(enum.StrEnum):
    PLACED = "order.placed"


class OldStyle(str, enum.Enum):  # noqa: UP042 - the kind whose str() is not its value
    PLACED = "order.placed"


class Nowhere(tzinfo):
    def utcoffset(self, _: datetime | None) -> None:
        return None

    def dst(self, _: datetime | None) -> None:
        return None

    def tzname(self, _: datetime | None) -> None:
        return None


def new(**arguments: Any) -> NewEvent:
    return NewEvent(**{"event_type": "order.placed", "payload": {"order_id": "o-1"}} | arguments)


def refused(**arguments: Any) -> FieldError:
    with pytest.raises(FieldError) as caught:
        new(**arguments)
    assert caught.value.remedy
    return caught.value


# --- rows


def test_an_event_becomes_text_columns() -> None:
    """Every column that the library writes (PUB-1, PUB-2)."""
    event = new(
        event_id=ID,
        event_version=2,
        occurred_at=NOW.astimezone(timezone(timedelta(hours=2))),
        target="billing",
        domain_id=ID,
        idempotency_key="k-1",
        trace_context="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        content_class="audit",
        channel="hot",
        headers={"tenant": "ü"},
        correlation_id="c-1",
        causation_id="e-0",
        ordering_key="customer-7",
        priority=0,
        delay=timedelta(minutes=1),
        expires_in=90.5,
        key="reminder:7",
    )
    assert prepare(event, origin("shop", 7, "outbox_gen_7")) == OutboxRow(
        id=str(ID),
        event_type="order.placed",
        event_version="2",
        occurred_at="2026-04-25T12:00:00+00:00",
        source="shop",
        target="billing",
        content_class="audit",
        channel="hot",
        generation="7",
        domain_id=str(ID),
        payload='{"order_id":"o-1"}',
        idempotency_key="k-1",
        trace_context="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        headers='{"tenant": "ü", "correlation_id": "c-1", "causation_id": "e-0"}',
        available_at=None,
        delay="60.000000",
        priority="0",
        ordering_key="customer-7",
        fairness_key=None,
        dedupe_key="reminder:7",
        expires_at=None,
        expires_in="90.500000",
    )


def test_what_is_left_out_is_filled_in_or_left_to_the_database() -> None:
    """The key is the id, the time is now, generation and channel are the publisher's (PUB-1)."""
    row = prepare(new(), origin("shop", 7, "outbox_gen_7"), now=NOW.isoformat())
    assert UUID(row.id).version == 7
    assert row.idempotency_key == row.id
    assert row.occurred_at == "2026-04-25T12:00:00+00:00"
    assert (row.source, row.generation, row.channel) == ("shop", "7", "outbox_gen_7")
    assert {name for name, value in row._asdict().items() if value is None} == {
        "target",
        "domain_id",
        "trace_context",
        "headers",
        "available_at",
        "delay",
        "ordering_key",
        "fairness_key",
        "dedupe_key",
        "expires_at",
        "expires_in",
    }


def test_an_event_occurs_now_unless_it_says_when() -> None:
    before = datetime.now(UTC)
    assert before <= datetime.fromisoformat(prepare(new(), SHOP).occurred_at) <= datetime.now(UTC)
    assert prepare(new(occurred_at=NOW), SHOP, now="never").occurred_at == NOW.isoformat()


def test_the_publishers_channel_and_trace_apply_where_the_event_has_none() -> None:
    assert prepare(new(), SHOP, trace_context="t-1").trace_context == "t-1"
    row = prepare(new(channel="hot", trace_context="t-2"), SHOP, trace_context="t-1")
    assert (row.channel, row.trace_context) == ("hot", "t-2")


def test_moments_are_written_with_their_offset() -> None:
    at = SOON.astimezone(timezone(timedelta(hours=-5)))
    row = prepare(new(available_at=at, expires_at=at + timedelta(hours=1)), SHOP)
    assert row.available_at is not None and row.expires_at is not None
    assert datetime.fromisoformat(row.available_at) == at and row.available_at.endswith("+00:00")
    assert datetime.fromisoformat(row.expires_at) == at + timedelta(hours=1)


@pytest.mark.parametrize(("delay", "text"), [(1e-7, "0.000000"), (0.1, "0.100000"), (315_000_000, "315000000.000000")])
def test_delays_are_written_without_exponents(delay: float, text: str) -> None:
    assert prepare(new(delay=delay), SHOP).delay == text


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        *(((source, 0, "hot"), "source") for source in ("", "a b", "a/b", "*", None, "x" * 201)),
        *((("shop", generation, "hot"), "generation") for generation in (-1, 2**63, True, "7")),
        *((("shop", 0, channel), "channel") for channel in ("", "Not a channel", "x" * 64)),
    ],
)
def test_where_events_come_from_is_checked(arguments: Any, field: str) -> None:
    """Once, when the publisher is made (PUB-3)."""
    with pytest.raises(FieldError) as caught:
        origin(*arguments)
    assert caught.value.field == field


def test_the_payload_is_checked_against_the_publishers_limit() -> None:
    """PUB-3, RELIABILITY D2."""
    with pytest.raises(PayloadError, match="10 are allowed"):
        prepare(new(), SHOP, payload_limit=10)
    with pytest.raises(PayloadError, match=r"payload\.raw"):
        prepare(new(payload={"raw": b""}), SHOP)


# --- inheritance


def test_what_a_handler_publishes_inherits_headers_and_names_its_cause() -> None:
    """Correlation id and headers are inherited, the causation id is the handled event (PUB-2)."""
    inherited = inherited_headers(ID, {"tenant": "t-1", "correlation_id": "c-1", "causation_id": "older"})
    row = prepare(new(headers={"step": "2"}), SHOP, inherited=inherited)
    assert row.headers is not None
    assert json.loads(row.headers) == {
        "tenant": "t-1",
        "step": "2",
        "correlation_id": "c-1",
        "causation_id": str(ID),
    }


@pytest.mark.parametrize("headers", [None, {}, {"correlation_id": ""}])
def test_the_first_event_of_a_chain_names_the_chain(headers: dict[str, str] | None) -> None:
    """PUB-2."""
    assert inherited_headers(ID, headers) == {"correlation_id": str(ID), "causation_id": str(ID)}


def test_an_event_overrides_what_it_inherits() -> None:
    """PUB-2."""
    event = new(headers={"tenant": "mine"}, correlation_id="c-2", causation_id="e-2")
    row = prepare(event, SHOP, inherited=inherited_headers(ID, {"tenant": "theirs"}))
    assert row.headers is not None
    assert json.loads(row.headers) == {"tenant": "mine", "correlation_id": "c-2", "causation_id": "e-2"}


def test_inherited_headers_count() -> None:
    """RELIABILITY S9: a chain of events cannot grow its headers without end."""
    with pytest.raises(FieldError, match="inherits"):
        prepare(new(headers={"a": "x" * 9_000}), SHOP, inherited={"b": "x" * 9_000})


# --- envelopes


def test_the_envelope_is_what_handlers_will_see() -> None:
    """ENV-1."""
    event = new(target="billing", domain_id=ID, payload={"n": 1})
    row = prepare(event, SHOP, trace_context="t-1", now=NOW.isoformat(), identity=ID)
    assert envelope_of(event, {"n": 1}, row, ID, NOW) == EventEnvelope(
        event_id=ID,
        event_type="order.placed",
        event_version=1,
        occurred_at=datetime.fromisoformat(row.occurred_at),
        source="shop",
        target="billing",
        domain_id=ID,
        payload={"n": 1},
        idempotency_key=row.id,
        trace_context="t-1",
    )


def test_an_envelope_can_be_published_as_it_is() -> None:
    """The EventPublisher protocol takes an envelope; ids and keys stay (ENV-2)."""
    event = new(event_id=uuid4(), idempotency_key="k-1", occurred_at=NOW, event_version=3)
    envelope = envelope_of(event, {}, prepare(event, SHOP), event.event_id, NOW)
    again = NewEvent.from_envelope(envelope, delay=5, priority=2)
    assert (again.delay, again.priority) == (5, 2)
    assert envelope_of(again, {}, prepare(again, SHOP), again.event_id, NOW) == envelope
    assert NewEvent.from_envelope(envelope, idempotency_key="k-2").idempotency_key == "k-2"


# --- an event that has nothing but a type and a payload


def test_a_plain_event_is_the_same_event() -> None:
    """The short way writes what the long one would, and returns the same envelope (PUB-1, ENV-1)."""
    short, envelope = plain("order.placed", {"n": 1}, SHOP)
    columns = short._asdict()
    event = NewEvent("order.placed", {"n": 1}, event_id=UUID(columns["id"]))
    row = prepare(event, SHOP, now=columns["occurred_at"])
    assert {name: value for name, value in row._asdict().items() if name in columns} == columns
    filled_in = {
        "event_version": "1", "content_class": "operations", "priority": "1", "idempotency_key": columns["id"],
    }  # fmt: skip
    assert {name: value for name, value in row._asdict().items() if name not in columns and value} == filled_in
    assert envelope == envelope_of(event, {"n": 1}, row, envelope.event_id, envelope.occurred_at)
    assert envelope.occurred_at == datetime.fromisoformat(columns["occurred_at"])


class Kind(enum.StrEnum):
    PLACED = "order.placed"


@pytest.mark.parametrize("event_type", ["", "a b", "a/b", "*", "a\0", 7, None, "x" * 201, "\ud800"])
def test_the_type_of_a_plain_event_is_checked(event_type: Any) -> None:
    """As strictly as that of any other (PUB-3)."""
    with pytest.raises(PublishError) as refused:
        plain(event_type, {}, SHOP)
    with pytest.raises(PublishError) as as_strict:
        NewEvent(event_type, {})
    assert str(refused.value) == str(as_strict.value)


def test_a_plain_event_is_checked_and_written_as_text() -> None:
    """Payloads are refused by their path; an enum member is written as its value (PUB-3)."""
    with pytest.raises(PublishError, match=r"payload\.at"):
        plain("order.placed", {"at": {NOW}}, SHOP)
    row, envelope = plain(Kind.PLACED, {}, SHOP)
    assert {type(value) for value in row} == {str}
    assert type(envelope.event_type) is str


def test_a_plain_row_has_the_order_of_its_statement() -> None:
    """It is sent as it is (PUB-1)."""
    assert Queries().asyncpg("publish_plain").parameters == PlainRow._fields
