"""Events as CloudEvents 1.0.2, both ways, with the package of the CloudEvents project as oracle (SCL-1, SCL-2)."""

from __future__ import annotations

import base64
import contextlib
import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID, uuid4

import pytest
from cloudevents.core.bindings import amqp, http, kafka, rabbitmq
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from hypothesis import given
from hypothesis import strategies as st

from holdfast import EventEnvelope
from holdfast.brokers.cloudevents import (
    AMQP,
    KAFKA,
    NATS,
    CarriedEvent,
    CloudEventError,
    binary,
    decoded_headers,
    read,
    read_signed,
    structured,
)
from holdfast.encoding import MAX_DEPTH

NOW = datetime(2025, 3, 1, 12, 0, tzinfo=UTC)
FORMAT = JSONFormat()

characters = st.characters(exclude_categories=("Cc", "Cs"))
texts = st.text(characters, min_size=1, max_size=40)
names = st.text(st.characters(categories=("L", "N"), include_characters=".-_:%>$"), min_size=1, max_size=40)
moments = st.datetimes(datetime(1970, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC))
scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9, allow_nan=False) | texts
payloads = st.dictionaries(texts, scalars | st.lists(scalars, max_size=3) | st.dictionaries(texts, scalars, max_size=3))
traces = st.sampled_from(
    [None, f"00-{'ab' * 16}-{'cd' * 8}-01", f"00-{'ab' * 16}-{'cd' * 8}-01 vendor=a,other=b"],
)


@st.composite
def carried(draw: st.DrawFn) -> CarriedEvent:
    envelope = EventEnvelope(
        event_id=draw(st.uuids()),
        event_type=draw(names),
        event_version=draw(st.integers(1, 2**31 - 1)),
        occurred_at=draw(moments),
        source=draw(names),
        target=draw(st.none() | names),
        domain_id=draw(st.none() | st.uuids()),
        payload=draw(payloads),
        idempotency_key=draw(texts),
        trace_context=draw(traces),
    )
    return CarriedEvent(
        envelope,
        headers=draw(st.dictionaries(texts, texts, max_size=4)),
        ordering_key=draw(st.none() | texts),
        fairness_key=draw(st.none() | texts),
        priority=draw(st.integers(0, 2)),
        content_class=draw(names),
        expires_at=draw(st.none() | moments),
        cycle=draw(st.integers(0, 1000)),
    )


def message(**attributes: Any) -> bytes:
    """A foreign event in the structured mode."""
    given = {"specversion": "1.0", "id": "1", "source": "/shop", "type": "com.example.placed", **attributes}
    return json.dumps(given).encode()


@given(carried())
def test_what_is_written_is_read_again(event: CarriedEvent) -> None:
    """Nothing of an event is lost on its way through a broker, in either mode (SCL-1)."""
    assert read(structured(event), {}, now=NOW) == event
    assert read(structured(event, json.dumps(event.envelope.payload)), {}, now=NOW) == event
    assert read_signed(structured(event)) == event
    for binding in (KAFKA, AMQP):
        headers, body = binary(event, binding)
        assert read(body, headers, now=NOW) == event
    headers, body = binary(event, NATS)
    assert all(value.isascii() and value.isprintable() for value in headers.values())
    assert read(body, decoded_headers(headers), now=NOW) == event


@pytest.mark.parametrize("body", [b"[]", b'{"id": 1}', b'{"source": null}', b"{", b'{"source": "a", "id": "x"}'])
def test_what_a_relay_of_another_release_signs_is_refused_and_not_quoted(body: bytes) -> None:
    """With a remedy; such a message becomes a dead letter (SCL-3)."""
    with pytest.raises(CloudEventError, match=r"this release cannot read|no JSON"):
        read_signed(body)


@given(carried())
def test_the_oracle_reads_what_is_written(event: CarriedEvent) -> None:
    """Other systems read our events with the library of the CloudEvents project (SCL-3)."""
    headers, body = binary(event, KAFKA)
    of_kafka = kafka.KafkaMessage({name: value.encode() for name, value in headers.items()}, None, body)
    percent, _ = binary(event, NATS)
    colon, _ = binary(event, AMQP)
    properties = {name: value for name, value in colon.items() if name != "content-type"}
    for found in (
        FORMAT.read(None, structured(event)),
        kafka.from_binary(of_kafka, FORMAT),
        http.from_binary(http.HTTPMessage(percent, body), FORMAT),
        amqp.from_binary(amqp.AMQPMessage({"content-type": "application/json"}, properties, body), FORMAT),
    ):
        assert found.get_id() == str(event.envelope.event_id)
        assert found.get_type() == event.envelope.event_type
        assert found.get_time() == event.envelope.occurred_at
        assert found.get_data() == event.envelope.payload
        assert found.get_datacontenttype() == "application/json"
        assert found.get_extension("partitionkey") == event.ordering_key
        assert str(found.get_extension("hfcycle")) == str(event.cycle)


@given(
    st.text(characters, min_size=1, max_size=20),
    st.text(st.characters(categories=("L", "N"), include_characters="/:.-_%#?"), min_size=1, max_size=30),
    st.text(st.characters(categories=("L", "N"), include_characters="./-"), min_size=1, max_size=30),
    payloads | st.text(characters, min_size=1),
)
def test_what_the_oracle_writes_is_read(identity: str, source: str, kind: str, data: Any) -> None:
    """A foreign event is the same one in every mode, and its key is its source with its id (SCL-3)."""
    attributes = {"id": identity, "source": source, "type": kind, "specversion": "1.0", "time": NOW, "tenant": "acme"}
    attributes["datacontenttype"] = "application/json" if isinstance(data, dict) else "text/plain"
    event = CloudEvent(attributes=attributes, data=data)
    of_kafka = kafka.to_binary(event, FORMAT)
    of_http = http.to_binary(event, FORMAT)
    of_amqp = amqp.to_binary(event, FORMAT)
    of_rabbit = rabbitmq.to_binary(event, FORMAT)
    in_amqp = {name: str(value) for name, value in of_amqp.application_properties.items()}
    in_amqp["cloudEvents_time"] = NOW.isoformat()
    found = [
        read(FORMAT.write(event), {"content-type": "application/cloudevents+json; charset=utf-8"}, now=NOW),
        read(of_kafka.value, {name: value.decode() for name, value in of_kafka.headers.items()}, now=NOW),
        read(of_http.body, decoded_headers(of_http.headers), now=NOW),
        read(of_amqp.application_data, {"content-type": attributes["datacontenttype"], **in_amqp}, now=NOW),
        read(
            of_rabbit.body,
            {"content-type": attributes["datacontenttype"], **{k: str(v) for k, v in of_rabbit.headers.items()}},
            now=NOW,
        ),
    ]
    assert found == [found[0]] * 5
    assert found[0].foreign
    assert found[0].envelope.idempotency_key == f"{source} {identity}"
    assert found[0].envelope.payload == (data if isinstance(data, dict) else {"data": data})
    assert found[0].headers["ce_source"] == source
    assert found[0].headers["tenant"] == "acme"
    assert found[0].envelope.occurred_at == NOW


def test_the_same_id_of_two_sources_is_two_events() -> None:
    """Only source and id together identify an event (SCL-3)."""
    one, other, again = (read(message(source=source), {}, now=NOW) for source in ("/a", "/b", "/a"))
    assert one.envelope.event_id != other.envelope.event_id
    assert one.envelope.idempotency_key != other.envelope.idempotency_key
    assert one == again


@pytest.mark.parametrize(
    ("data", "payload"),
    [
        ({}, {}),
        ({"data": None}, {}),
        ({"data": {"a": 1}}, {"a": 1}),
        ({"data": [1, 2]}, {"data": [1, 2]}),
        ({"data": "text"}, {"data": "text"}),
        ({"data": False}, {"data": False}),
        ({"data_base64": base64.b64encode(b'{"a": 1}').decode()}, {"a": 1}),
        ({"data_base64": "/w==", "datacontenttype": "image/png"}, {"data_base64": "/w=="}),
        ({"data_base64": "AA==", "datacontenttype": "text/plain"}, {"data_base64": "AA=="}),
        ({"data_base64": "aGk=", "datacontenttype": "text/plain"}, {"data": "hi"}),
    ],
)
def test_data_that_is_no_object_is_wrapped(data: dict[str, Any], payload: dict[str, Any]) -> None:
    """A payload is an object, whatever the data is (SCL-3)."""
    assert read(message(**data), {}, now=NOW).envelope.payload == payload


def test_attributes_with_a_meaning_are_understood() -> None:
    """Subject, time, key, expiry and trace of foreign events reach handlers as those of ours do (SCL-3)."""
    subject = uuid4()
    trace = f"00-{'ab' * 16}-{'cd' * 8}-01"
    event = read(
        message(
            subject=str(subject),
            time="2025-03-01t13:00:00.123456789+02:00",
            partitionkey="o-1",
            expirytime="2025-03-02T00:00:60Z",
            traceparent=trace,
            tracestate="a=b",
            sequence=7,
            final=True,
        ),
        {},
        now=NOW,
    )
    assert event.envelope.domain_id == subject
    assert event.envelope.occurred_at == datetime(2025, 3, 1, 13, 0, 0, 123456, timezone(timedelta(hours=2)))
    assert event.expires_at == datetime(2025, 3, 2, 0, 0, 59, 999999, UTC)
    assert event.ordering_key == "o-1"
    assert event.envelope.trace_context == f"{trace} a=b"
    assert event.headers["sequence"] == "7"
    assert event.headers["final"] == "true"
    other = read(message(subject="orders/7"), {}, now=NOW)
    assert (other.envelope.domain_id, other.headers["subject"]) == (None, "orders/7")
    assert other.envelope.occurred_at == NOW


def test_foreign_names_fit_into_the_outbox() -> None:
    """What the outbox would refuse in a source or a type is encoded, so that a failed event can be stored (SCL-3)."""
    event = read(message(source="https://example.com/shop*?a=ü", type="orders/placed" + "x" * 300), {}, now=NOW)
    for name in (event.envelope.source, event.envelope.event_type):
        assert 0 < len(name.encode()) <= 200
        assert not set(name) & set("/* ")
    assert event.headers["ce_type"].startswith("orders/placed")
    other = read(message(type="orders/placed" + "x" * 299 + "y"), {}, now=NOW)
    assert other.envelope.event_type != event.envelope.event_type


def test_a_long_id_still_makes_a_key_that_fits() -> None:
    """Keys are stored, and of limited length (SCL-3)."""
    keys = {read(message(id="x" * size), {}, now=NOW).envelope.idempotency_key for size in (1000, 1001)}
    assert len(keys) == 2
    assert all(len(key) <= 255 for key in keys)


OURS = {"hfcycle": 0, "id": str(UUID(int=1)), "time": "2025-03-01T12:00:00Z", "source": "shop"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"{",
        b"[]",
        b'"text"',
        b"{}",
        b"[" * 5_000,
        b'{"specversion":"1.0","id":"1","source":"/a","type":"t","data":' + b'{"a":' * 180 + b"1" + b"}" * 181,
        message(specversion="0.3"),
        message(specversion=1.0),
        message(id=""),
        message(id=7),
        message(id="\0"),
        message(source=None),
        message(source="two words"),
        message(type="\ud800"),
        message(type=["a"]),
        message(time="yesterday"),
        message(time="2025-02-30T00:00:00Z"),
        message(time="2025-03-01T12:00:75Z"),
        message(time="2025-03-01T12:00:00"),
        message(time="0001-01-01T00:00:00+14:00"),
        message(time=1740830400),
        message(expirytime="9999-12-31T23:59:59-14:00"),
        message(partitionkey="x" * 10_000),
        message(partitionkey=[1]),
        message(data={"a": "\0"}),
        message(data={"a": float("nan")}),
        b'{"specversion":"1.0","id":"1","source":"/a","type":"t","data":{"a":1e999}}',
        b'{"specversion":"1.0","id":"1","source":"/a","type":"t","data":{"a":' + b"9" * 5_000 + b"}}",
        message(data="x" * 600_000),
        message(data_base64="?"),
        message(data_base64=7),
        message(data_base64="aGk=", data="hi"),
        message(extension={"nested": 1}),
        message(extension=""),
        message(**{f"e{number}": "x" for number in range(100)}),
        message(extension="x" * 20_000),
        message(**OURS | {"id": "no-uuid"}),
        message(**OURS, subject="no-uuid"),
        message(**OURS, eventversion=0),
        message(**OURS, eventversion="9" * 20),
        message(**OURS | {"hfcycle": -1}),
        message(**OURS | {"hfcycle": True}),
        message(**OURS | {"time": None}),
        message(**OURS | {"source": "a/b"}),
        message(**OURS, priority=3),
        message(**OURS, idempotencykey=""),
        message(**OURS, hfheaders="{"),
        message(**OURS, hfheaders='{"a": 1}'),
        message(**OURS, hfheaders="[]"),
        message(**OURS, target="a b"),
    ],
)
def test_hostile_input_is_refused_by_name(body: bytes) -> None:
    """Whatever a stranger sends, the listener gets one kind of error, which says what to do (SCL-3)."""
    with pytest.raises(CloudEventError) as refused:
        read(body, {}, now=NOW)
    assert refused.value.problem and refused.value.remedy
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    "kind", ["application/cloudevents-batch+json", "application/cloudevents+avro", "application/cloudevents"]
)
def test_other_formats_are_refused(kind: str) -> None:
    """One message is one event, in JSON (SCL-3)."""
    with pytest.raises(CloudEventError, match="application/cloudevents"):
        read(b"[]", {"Content-Type": kind}, now=NOW)


@given(
    st.binary(max_size=200), st.dictionaries(st.sampled_from(["ce-id", "ce_type", "ce-source", "content-type"]), texts)
)
def test_no_bytes_raise_anything_else(body: bytes, headers: dict[str, str]) -> None:
    """There is no message that breaks the reader (SCL-3)."""
    with pytest.raises(CloudEventError):
        read(body, headers, now=NOW)
    with contextlib.suppress(CloudEventError):
        read(body, {"ce-specversion": "1.0", **headers}, now=NOW)


def test_errors_do_not_quote_data() -> None:
    """Payloads stay out of logs (SCL-3)."""
    for secret in (message(data={"card": "4111\0"}), b'{"card": "4111'):
        with pytest.raises(CloudEventError) as refused:
            read(secret, {}, now=NOW)
        assert "4111" not in str(refused.value)


def test_what_json_lacks_is_not_written() -> None:
    """An event that no broker could carry fails by name (SCL-1)."""
    deep: Any = {}
    for _ in range(MAX_DEPTH * 1_000):
        deep = {"a": deep}
    for payload in ({"a": float("inf")}, {"a": object()}, {"a": "\ud800"}, deep):
        envelope = EventEnvelope.trusted(
            {
                "event_id": uuid4(),
                "event_type": "order.placed",
                "event_version": 1,
                "occurred_at": NOW,
                "source": "shop",
                "target": None,
                "domain_id": None,
                "payload": payload,
                "idempotency_key": "k",
                "trace_context": None,
            }
        )
        with pytest.raises(CloudEventError, match="cannot be written"):
            structured(CarriedEvent(envelope))
        with pytest.raises(CloudEventError, match="cannot be written"):
            binary(CarriedEvent(envelope), KAFKA)
