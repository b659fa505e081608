"""What the benchmarks of brokers share: a server of their own, and events on it that nobody has taken yet."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.workload import EVENT_TYPE, payload_of
from holdfast import EventEnvelope
from holdfast.brokers.cloudevents import CarriedEvent, structured
from holdfast.brokers.engine import Confirmed, Outgoing
from holdfast.brokers.engines import engine_of
from holdfast.brokers.signing import Signatures
from holdfast.ids import uuid7

CHANNEL = "outbox_default"
# Of the other database, whose relay has sent what is there.
SECRET = "a-secret-that-two-databases-share"  # noqa: S105 of this run
KINDS = ("nats", "redis", "rabbitmq", "kafka")
# Everything that a broker of one machine can do for durability but fsync for each event, which scaling.md speaks of.
_BATCH = 500


@contextmanager
def server(kind: str) -> Iterator[str]:
    """The address of a broker that starts with the run and ends with it."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name, _started(kind, Path(name)) as found:
        yield found.address


def _started(kind: str, folder: Path) -> Any:
    # Each comes with a client that the others do not need.
    if kind == "nats":
        from servers.nats import NatsServer

        return NatsServer(folder)
    if kind == "redis":
        from servers.valkey import ValkeyServer

        return ValkeyServer(folder, "--appendonly", "yes", "--appendfsync", "everysec")
    if kind == "rabbitmq":
        from servers.rabbitmq import RabbitmqServer

        return RabbitmqServer(folder)
    from servers.kafka import kafka_server

    return kafka_server()


async def fill(address: str, count: int, size: int) -> None:
    """Send events as a relay does; they belong to another database's outbox."""
    sink = engine_of(address).sink(lease=30)
    signatures = Signatures()
    signatures.use(SECRET.encode(), (), b"")
    payload = json.dumps(payload_of(size))
    await sink.open()
    for start in range(0, count, _BATCH):
        batch = [_event(payload, signatures) for _ in range(min(_BATCH, count - start))]
        answers = await sink.send(batch, timeout=30)
        if not all(isinstance(each, Confirmed) for each in answers):
            raise SystemExit(f"the broker did not confirm: {next(e for e in answers if not isinstance(e, Confirmed))}")
    await sink.close()


def _event(payload: str, signatures: Signatures) -> Outgoing:
    identity = uuid7()
    event = EventEnvelope.trusted(
        {
            "event_id": identity,
            "event_type": EVENT_TYPE,
            "event_version": 1,
            "occurred_at": datetime.now(UTC),
            "source": "shop",
            "target": None,
            "domain_id": None,
            "payload": {},
            "idempotency_key": str(identity),
            "trace_context": None,
        }
    )
    body, _ = signatures.signed(structured(CarriedEvent(event), payload), CHANNEL)
    return Outgoing(identity, str(identity), CHANNEL, EVENT_TYPE, None, None, body)


async def until(condition: Any, seconds: float = 300.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.005)
