"""The shortest loops over the same tables and the clients of the brokers themselves.

The relay claims, publishes with confirmation and settles. The consumer takes messages, reads the CloudEvents, writes
the inbox with one statement for all, and acknowledges.
"""

import argparse
import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

import asyncpg
import nats
from nats.js.api import ConsumerConfig, StreamConfig
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from benchmarks.brokers import CHANNEL, fill, server
from benchmarks.counters import difference, snapshot
from benchmarks.systems.harness import BUSINESS, ORDERS, check, delivered
from benchmarks.systems.process import database_of
from benchmarks.systems.raw.deliver import START, connect
from benchmarks.systems.raw.publish import NO_BELL
from benchmarks.systems.raw.statements import BATCH, CLAIM, INSERT, RELAYED, TAKEN
from benchmarks.systems.tables import prepare
from benchmarks.workload import EVENT_TYPE
from holdfast.brokers.nats.subjects import Subjects
from holdfast.ids import uuid7

WINDOW, PIPELINE = 256, 100
GROUP = "raw"


class Client(Protocol):
    """One broker, with nothing around its client."""

    async def publish(self, messages: Sequence[tuple[str, bytes]]) -> None: ...

    async def subscribe(self) -> None: ...

    async def take(self) -> Sequence[tuple[Any, bytes]]: ...

    async def acknowledge(self, messages: Sequence[tuple[Any, bytes]]) -> None: ...

    async def close(self) -> None: ...


class Nats:
    """JetStream with a durable pull consumer."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def open(self) -> None:
        self._client = await nats.connect(self._address)
        self._js = self._client.jetstream()
        await self._js.add_stream(StreamConfig(name=Subjects().stream_of(CHANNEL), subjects=[f"hf.{CHANNEL}.>"]))

    async def publish(self, messages: Sequence[tuple[str, bytes]]) -> None:
        subject = f"hf.{CHANNEL}._.{EVENT_TYPE}"
        for start in range(0, len(messages), WINDOW):
            await asyncio.gather(
                *(
                    self._js.publish(subject, body, headers={"Nats-Msg-Id": identity}, timeout=10)
                    for identity, body in messages[start : start + WINDOW]
                )
            )

    async def subscribe(self) -> None:
        config = ConsumerConfig(max_ack_pending=10_000)
        self._subscription = await self._js.pull_subscribe(f"hf.{CHANNEL}.>", GROUP, config=config)

    async def take(self) -> Sequence[tuple[Any, bytes]]:
        with suppress(nats.errors.TimeoutError):
            return [(each, each.data) for each in await self._subscription.fetch(BATCH, timeout=1)]
        return []

    async def acknowledge(self, messages: Sequence[tuple[Any, bytes]]) -> None:
        for message, _ in messages:
            await message.ack()

    async def close(self) -> None:
        await self._client.drain()


class Valkey:
    """A stream with a consumer group."""

    def __init__(self, address: str) -> None:
        self._client = Redis.from_url(address)
        self._stream = f"hf:{{{CHANNEL}}}:0"

    async def open(self) -> None:
        with suppress(ResponseError):  # it is there
            await self._client.xgroup_create(self._stream, GROUP, "0", mkstream=True)

    async def publish(self, messages: Sequence[tuple[str, bytes]]) -> None:
        for start in range(0, len(messages), PIPELINE):
            pipeline = self._client.pipeline(transaction=False)
            for _, body in messages[start : start + PIPELINE]:
                pipeline.xadd(self._stream, {"ce": body})
            await pipeline.execute()

    async def subscribe(self) -> None: ...

    async def take(self) -> Sequence[tuple[Any, bytes]]:
        found = await self._client.xreadgroup(GROUP, "one", {self._stream: ">"}, count=BATCH, block=1_000)
        return [(entry, fields[b"ce"]) for entry, fields in found[0][1]] if found else []

    async def acknowledge(self, messages: Sequence[tuple[Any, bytes]]) -> None:
        await self._client.xack(self._stream, GROUP, *(entry for entry, _ in messages))

    async def close(self) -> None:
        await self._client.aclose()


async def client_of(kind: str, address: str) -> Client:
    client = Nats(address) if kind == "nats" else Valkey(address)
    await client.open()
    return client


def cloud_event(row: asyncpg.Record) -> bytes:
    attributes = {
        "specversion": "1.0",
        "id": str(row["id"]),
        "source": row["source"],
        "type": row["event_type"],
        "time": row["occurred_at"].isoformat(),
        "datacontenttype": "application/json",
        "idempotencykey": row["idempotency_key"],
    }
    return f'{json.dumps(attributes)[:-1]},"data":{row["payload"]}}}'.encode()


async def relay(options: argparse.Namespace) -> dict[str, Any]:
    observer, database = await prepare(options.dsn, due=options.count, size=options.size), database_of(options.dsn)
    with server(options.kind) as address:
        client, connection = await client_of(options.kind, address), await connect(options.dsn)
        claim, settle = await connection.prepare(CLAIM), await connection.prepare(RELAYED)
        before = await snapshot(observer, database)
        worker, mark = uuid.uuid4(), START
        while True:
            token = uuid.uuid4()
            rows = await claim.fetch(BATCH, worker, token, *mark)
            if not rows:
                break
            mark = min((row["available_at"], row["id"]) for row in rows)
            await client.publish([(str(row["id"]), cloud_event(row)) for row in rows])
            await settle.fetch([row["id"] for row in rows], token)
        after = await snapshot(observer, database)
        await client.close()
        await connection.close()
    result = await difference(observer, before, after, options.count)
    await observer.close()
    return result


async def consume(options: argparse.Namespace) -> dict[str, Any]:
    observer, database = await prepare(options.dsn, due=0), database_of(options.dsn)
    with server(options.kind) as address:
        client, connection = await client_of(options.kind, address), await asyncpg.connect(options.dsn)
        await fill(address, options.count, options.size)
        await client.subscribe()
        inbox = await connection.prepare(TAKEN)
        # The first messages are not in it, as for a worker: the connections are warm then.
        already = left = options.count - await consumed(client, inbox)
        before = await snapshot(observer, database)
        while left > 0:
            left -= await consumed(client, inbox)
        after = await snapshot(observer, database)
        check("inbox rows", await observer.fetchval("SELECT count(*) FROM core.event_handled"), options.count)
        await client.close()
        await connection.close()
    result = await difference(observer, before, after, already)
    await observer.close()
    return result


async def consumed(client: Client, inbox: Any, handled: dict[int, float] | None = None) -> int:
    messages = await client.take()
    if messages:
        events = [json.loads(body) for _, body in messages]
        if handled is not None:
            handled.update((event["data"]["n"], time.perf_counter()) for event in events)
        await inbox.fetch([each["idempotencykey"] for each in events], [each["source"] for each in events])
        await client.acknowledge(messages)
    return len(messages)


async def broker_latency(options: argparse.Namespace) -> dict[str, Any]:
    """With a NOTIFY in every transaction, one loop that it wakes, and one that waits for the broker."""
    observer = await prepare(options.dsn, due=0)
    await observer.execute(ORDERS)
    await observer.execute(NO_BELL)
    connections = [await asyncpg.connect(options.dsn) for _ in range(options.connections)]
    handled: dict[int, float] = {}

    async def commit(connection: asyncpg.Connection, number: int) -> float:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(BUSINESS)
        identity = uuid7()
        await connection.execute(INSERT, identity, json.dumps({"n": number}), str(identity))
        await connection.execute("SELECT pg_notify('raw', '')")
        at = time.perf_counter()
        await transaction.commit()
        return at

    @asynccontextmanager
    async def worker() -> AsyncIterator[None]:
        listening, claiming = await asyncpg.connect(options.dsn), await connect(options.dsn)
        writing = await asyncpg.connect(options.dsn)
        sender, taker = await client_of(options.kind, address), await client_of(options.kind, address)
        await taker.subscribe()
        woken = asyncio.Event()
        await listening.add_listener("raw", lambda *_: woken.set())
        claim, settle = await claiming.prepare(CLAIM), await claiming.prepare(RELAYED)
        inbox = await writing.prepare(TAKEN)

        async def send() -> None:
            identity = uuid.uuid4()
            while True:
                woken.clear()
                token = uuid.uuid4()
                rows = await claim.fetch(BATCH, identity, token, *START)
                if not rows:
                    await woken.wait()
                    continue
                await sender.publish([(str(row["id"]), cloud_event(row)) for row in rows])
                await settle.fetch([row["id"] for row in rows], token)

        async def take() -> None:
            while True:
                await consumed(taker, inbox, handled)

        running = [asyncio.create_task(send()), asyncio.create_task(take())]
        yield
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for each in (sender, taker, listening, claiming, writing):
            await each.close()

    with server(options.kind) as address:
        return await delivered(options, observer, connections, commit, worker, handled)
