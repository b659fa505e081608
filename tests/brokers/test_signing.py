"""Signatures of messages: what a relay has sent is told from what anybody else has written (SEC-1, SCL-2)."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import EventEnvelope, HandlerRegistry, Operator, RetryPolicy, WorkerSettings
from holdfast.brokers.signing import Signatures, Verdict
from holdfast.cli import environment
from holdfast.errors import ConfigurationError
from holdfast.postgres.brokers import RelayKeys
from tests.brokers.double import Broker
from tests.brokers.messages import outgoing
from tests.brokers.test_operating import holdfast
from tests.worker.support import Facts, publish, running, until

OPTIONS = {"substrate": "nats://double", "lease": 2.0, "poll_interval": 0.2}
QUICK = RetryPolicy(max_attempts=3, base_delay=0.01, max_delay=0.05)
OLD, NEW, OTHER = (f"{name}-secret-of-thirty-two-characters" for name in ("old", "new", "other"))
CHANNEL = "outbox_default"


def signatures(signing: str, *accepted: str) -> Signatures:
    made = Signatures()
    made.use(signing.encode(), [each.encode() for each in accepted], b"apart")
    return made


# --- the signature itself ---------------------------------------------------------------------------------


@given(st.binary(max_size=200), st.text(max_size=20), st.data())
def test_no_byte_can_be_changed(rest: bytes, channel: str, data: st.DataObject) -> None:
    """A signature holds for one text on one channel (SEC-1)."""
    ours = signatures(OLD)
    body, _ = ours.signed(b"{" + rest, channel)
    assert ours.verdict(body, channel) is Verdict.OURS
    assert ours.verdict(body, f"{channel}x") is not Verdict.OURS
    at = data.draw(st.integers(0, len(body) - 1))
    changed = body[:at] + bytes([body[at] ^ data.draw(st.integers(1, 255))]) + body[at + 1 :]
    assert ours.verdict(changed, channel) is not Verdict.OURS
    assert ours.verdict(body[:at], channel) is not Verdict.OURS


def test_channel_and_content_cannot_be_shifted() -> None:
    """What ends the name of the channel is no part of what follows (SEC-1)."""
    ours = signatures(OLD)
    body, _ = ours.signed(b"{bc", "a")
    assert ours.verdict(body.replace(b",bc", b",c"), "ab") is Verdict.FORGED


def test_rotation_accepts_both_secrets_and_signs_with_the_first() -> None:
    """Add the new one, let it sign, remove the old one: nothing is refused on the way (SEC-1)."""
    event = outgoing().body
    before, adding, signing, after = signatures(OLD), signatures(OLD, NEW), signatures(NEW, OLD), signatures(NEW)
    for sender, receivers in ((before, (adding,)), (adding, (before, signing)), (signing, (adding, after))):
        body, _ = sender.signed(event, CHANNEL)
        assert {each.verdict(body, CHANNEL) for each in receivers} == {Verdict.OURS}
    body, _ = before.signed(event, CHANNEL)
    assert after.verdict(body, CHANNEL) is Verdict.UNKNOWN
    assert after.verdict(event, CHANNEL) is Verdict.UNSIGNED


def test_signature_is_an_attribute_of_a_cloudevent() -> None:
    """What is sent is still a CloudEvent, for consumers that know nothing of signatures (SCL-2)."""
    body, mark = signatures(OLD).signed(outgoing(7).body, CHANNEL)
    event = json.loads(body)
    assert event["hfsignature"].split(".")[2].startswith(mark) and event["data"] == {"number": 7}


def test_keys_of_foreign_events_are_nobodys() -> None:
    """They can be worked out by who knows the database's secret alone (SEC-1)."""
    here, there = signatures(OLD), Signatures()
    there.use(OLD.encode(), (), b"another database's")
    assert here.apart("k") == here.apart("k") != there.apart("k")
    assert here.apart("k") != here.apart("l") and len(here.apart("k" * 5_000)) < 100


# --- settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong", [("short",), (OLD, ""), (OLD + "\n",), (f"{OLD}\u00e4",), OLD, ("x" * 1025,), (OLD,) * 11]
)
def test_secrets_that_are_refused_are_not_quoted(wrong: Any) -> None:
    """An error names the place, and no secret (SEC-1)."""
    with pytest.raises(ConfigurationError, match="relay_secrets") as refusal:
        WorkerSettings(relay_secrets=wrong)
    assert not any(each and each.strip() in str(refusal.value) for each in wrong if len(each) > 1)


def test_secrets_are_shown_by_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the settings nor what is made of them show a secret (SEC-1)."""
    monkeypatch.setenv("HOLDFAST_RELAY_SECRETS", f"{NEW}, {OLD}")
    settings = WorkerSettings(relay_secrets=environment.relay_secrets())
    assert settings.relay_secrets == (NEW, OLD)
    keys = RelayKeys(NEW.encode(), (OLD.encode(),), b"apart")
    shown = f"{settings!r} {settings} {keys!r} {keys} {signatures(NEW, OLD)!r}"
    assert NEW not in shown and OLD not in shown


# --- with a broker --------------------------------------------------------------------------------------------


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    double = Broker()
    monkeypatch.setattr("holdfast.worker.substrate.engine_of", lambda _address: double)
    return double


def registry_of(got: list[EventEnvelope], **options: Any) -> HandlerRegistry:
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="billing.charge_card", retry=QUICK, **options)
    async def charge(event: EventEnvelope) -> None:
        got.append(event)
        if event.payload.get("bad"):
            raise ValueError("bad")

    return registry


async def moved(conn: asyncpg.Connection, broker: Broker) -> None:
    query = "SELECT bool_and(via = 'nats') FROM core.subscriptions WHERE retired_at IS NULL"
    await until(lambda: conn.fetchval(query), what="the handlers have moved")
    await until(lambda: broker.interests, what="somebody takes")


async def refused(conn: asyncpg.Connection, verdict: Verdict) -> bool:
    query = (
        "SELECT count(*) = 1 FROM core.failed WHERE event_type = 'holdfast.unreadable' AND strpos(last_error, $1) > 0"
    )
    return bool(await conn.fetchval(query, verdict.value))


async def test_what_no_relay_of_ours_has_signed_is_kept_and_told(
    dsn: str, conn: asyncpg.Connection, broker: Broker
) -> None:
    """A message in the form of a relay's that is not signed, or by another, is a dead letter (SEC-1)."""
    got: list[EventEnvelope] = []
    facts = Facts()
    event = replace(outgoing(1), channel=CHANNEL)
    async with running(dsn, registry_of(got), facts, **OPTIONS):
        await moved(conn, broker)
        broker.put(event)
        await until(lambda: refused(conn, Verdict.UNSIGNED), what="the dead letter")
        assert facts.notices("message_refused")[0].details["error"] == Verdict.UNSIGNED.value
        wrong, _ = signatures(OTHER).signed(outgoing(2).body, CHANNEL)
        broker.put(replace(event, body=wrong))
        await until(lambda: refused(conn, Verdict.UNKNOWN), what="the dead letter of what another has signed")
    assert not got


async def test_headers_do_not_change_how_a_signed_message_is_read(
    dsn: str, conn: asyncpg.Connection, broker: Broker
) -> None:
    """Attributes beside the signed ones are not believed (SEC-1)."""
    got: list[EventEnvelope] = []
    body, _ = signatures(OLD).signed(outgoing(1).body, CHANNEL)
    lies = {"ce-specversion": "1.0", "ce-hfcycle": "0", "ce-id": str(outgoing().event_id), "ce-source": "shop"}
    lies |= {"ce-type": "order.placed", "ce-time": "2026-01-01T00:00:00Z", "content-type": "application/json"}
    async with running(dsn, registry_of(got), **OPTIONS, relay_secrets=(OLD,)):
        await moved(conn, broker)
        broker.put(replace(outgoing(1), channel=CHANNEL, body=body, headers=lies))
        broker.put(replace(outgoing(2), channel=CHANNEL, body=b'{"number": 2}', headers=lies))
        await until(lambda: got, what="the event is handled")
        await until(lambda: refused(conn, Verdict.UNSIGNED), what="the other one is refused")
    assert [each.payload for each in got] == [{"number": 1}]


async def test_databases_that_share_a_secret_accept_each_others_messages(
    dsn: str, conn: asyncpg.Connection, broker: Broker
) -> None:
    """A consumer with another database names the relay's secret; with several, a rotation refuses nothing (SCL-2)."""
    got: list[EventEnvelope] = []
    async with running(dsn, registry_of(got), **OPTIONS, relay_secrets=(NEW, OLD)):
        await moved(conn, broker)
        for number, secret in enumerate((OLD, NEW, OTHER)):
            body, _ = signatures(secret).signed(outgoing(number).body, CHANNEL)
            broker.put(replace(outgoing(), channel=CHANNEL, body=body))
        await until(lambda: len(got) == 2, what="both are handled")
        await until(lambda: refused(conn, Verdict.UNKNOWN), what="the third is refused")
        await publish(conn, "order.placed", {"number": 3})
        await until(lambda: len(got) == 3, what="its own are handled")
    assert sorted(each.payload["number"] for each in got) == [0, 1, 3]
    assert signatures(NEW).verdict(broker.sent[-1].body, CHANNEL) is Verdict.OURS
    assert signatures(OLD).verdict(broker.sent[-1].body, CHANNEL) is Verdict.UNKNOWN


async def test_foreign_events_hold_up_nothing(dsn: str, conn: asyncpg.Connection, broker: Broker) -> None:
    """Neither their ids nor their partition keys meet those of real events, whatever they say (SEC-1)."""
    got: list[EventEnvelope] = []
    foreign = {"specversion": "1.0", "id": "k-1", "source": "shop", "type": "order.placed", "partitionkey": "order-1"}
    async with running(dsn, registry_of(got), **OPTIONS):
        await moved(conn, broker)
        body = json.dumps({**foreign, "data": {"bad": True}}).encode()
        broker.put(replace(outgoing(), channel=CHANNEL, body=body))
        await until(lambda: conn.fetchval("SELECT count(*) = 1 FROM core.failed"), what="a dead letter at its head")
        body = json.dumps({**foreign, "id": "k-2", "partitionkey": None, "data": {"number": 1}}).encode()
        broker.put(replace(outgoing(), channel=CHANNEL, body=body))
        await until(lambda: conn.fetchval("SELECT count(*) = 1 FROM core.event_handled"), what="another is handled")
        for number, key in enumerate(("shop k-1", "shop k-2"), 2):
            ordered = "order-1" if number == 2 else None
            await publish(conn, "order.placed", {"number": number}, idempotency_key=key, ordering_key=ordered)
        await until(
            lambda: sorted(each.payload.get("number", 0) for each in got if "bad" not in each.payload) == [1, 2, 3],
            what="the real ones are handled",
        )


# --- the secrets of the database ------------------------------------------------------------------------------


async def keys(conn: asyncpg.Connection) -> RelayKeys:
    return RelayKeys(*await conn.fetchrow("SELECT * FROM core.relay_keys()"))


async def test_rotation_in_the_database(dsn: str, conn: asyncpg.Connection, broker: Broker) -> None:
    """A new secret is accepted a minute before it signs, an old one for 30 days, or two minutes more (SEC-1)."""
    first = await keys(conn)
    assert list(first.accepted) == [first.signing] and len(first.signing) == 32
    async with Operator(dsn, actor="ann@example.com") as operator:
        assert (await operator.relay.rotate(dry_run=True)).accepted == 2
        assert await keys(conn) == first
        rotated = await operator.relay.rotate(reason="each year")
        assert asdict(rotated) == {"accepted": 2, "dry_run": False}
        second = await keys(conn)
        assert second.signing == first.signing and len(second.accepted) == 2 and second.apart == first.apart
        await conn.execute("UPDATE core.relay_secrets SET signs_at = signs_at - interval '1 minute'")
        assert (await keys(conn)).signing == second.accepted[0]
        await operator.relay.rotate(drop_old=True, reason="somebody has read it")
    left = "SELECT count(*) FROM core.relay_secrets WHERE accepted_until < now() + interval '3 minutes'"
    assert await conn.fetchval(left) == 2
    audit = await conn.fetch("SELECT * FROM core.audit WHERE action = 'relay.rotate'")
    assert len(audit) == 2
    for key in (first.signing, *second.accepted):
        assert not any(key.hex() in str(dict(line)) for line in audit)


async def test_a_worker_learns_a_new_secret_by_its_first_message(
    dsn: str, conn: asyncpg.Connection, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that is signed with a secret which came after the last look is no forgery (SEC-1)."""
    monkeypatch.setattr("holdfast.worker.relay_secrets._EVERY", 3600.0)
    monkeypatch.setattr("holdfast.worker.relay_secrets._AT_MOST_EVERY", 0.0)
    got: list[EventEnvelope] = []
    async with running(dsn, registry_of(got), **OPTIONS):
        await moved(conn, broker)
        await conn.execute("INSERT INTO core.relay_secrets (signs_at) VALUES (now())")
        relay = Signatures()
        relay.use((await keys(conn)).signing, (), b"")
        body, _ = relay.signed(outgoing(1).body, CHANNEL)
        broker.put(replace(outgoing(), channel=CHANNEL, body=body))
        await until(lambda: got, what="the event is handled")
    assert await conn.fetchval("SELECT count(*) FROM core.failed") == 0


async def test_id_at_the_broker_cannot_be_known_before(dsn: str, conn: asyncpg.Connection, broker: Broker) -> None:
    """Who knows an event's id cannot have the broker take it for a double (SEC-1)."""
    got: list[EventEnvelope] = []
    async with running(dsn, registry_of(got), **OPTIONS):
        await moved(conn, broker)
        await publish(conn, "order.placed", {"number": 1})
        await until(lambda: got, what="the event is handled")
    signature = json.loads(broker.sent[0].body)["hfsignature"].split(".")[2]
    assert broker.sent[0].message_id == f"{broker.sent[0].event_id}:0:{signature[:16]}"


@pytest.mark.slow
async def test_rotation_by_its_command(dsn: str, conn: asyncpg.Connection) -> None:
    """`relay rotate` asks first, shows no secret, and leaves a line in the audit (SEC-1, OPS-1)."""
    first = await keys(conn)
    code, said = await holdfast(dsn, "relay", "rotate", "--dry-run")
    assert (code, said.splitlines()[-1]) == (0, "a new secret would be made; 2 secrets would be accepted now")
    code, said = await holdfast(dsn, "relay", "rotate", "--reason", "once a year")
    assert code != 0 and "--yes" in said, said
    assert await keys(conn) == first
    code, said = await holdfast(dsn, "relay", "rotate", "--yes", "--actor", "ann", "--reason", "once a year", "--json")
    assert (code, json.loads(said[said.index("{") :])) == (0, {"accepted": 2, "dry_run": False})
    code, dropped = await holdfast(dsn, "relay", "rotate", "--yes", "--actor", "ann", "--drop-old")
    assert (code, dropped.splitlines()[-1]) == (0, "a new secret is made; 3 secrets are accepted now")
    last = await keys(conn)
    assert len(last.accepted) == 3 and not any(key.hex() in said + dropped for key in last.accepted)
    audit = await conn.fetch("SELECT actor, reason FROM core.audit WHERE action = 'relay.rotate' ORDER BY at")
    assert [tuple(line) for line in audit] == [("ann", "once a year"), ("ann", None)]
