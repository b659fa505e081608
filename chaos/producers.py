"""Services that publish: each transaction writes a business row and some events, and notes what it saw of itself.

Some roll back, some roll back a savepoint, some sit for seconds between their events and their commit, some publish
the same key twice. Some events are in order with others of their producer, and some take turns by a fairness key. An
error before the commit was sent means that nothing was published; one after it means that nobody knows.
"""

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg
import psycopg
import sqlalchemy
from sqlalchemy.orm import Session

from chaos.events import ORDINARY, PROBES
from chaos.history import History
from holdfast import NewEvent, Publisher
from holdfast.errors import PublishError

PATIENCE = 5.0
BUSINESS = "INSERT INTO chaos.business (tx) VALUES ({})"
PUBLISHER = Publisher("shop")
ORDERING_KEYS, FAIRNESS_KEYS = 10, 5  # of each producer


@dataclass(frozen=True, slots=True)
class Batch:
    """One transaction."""

    events: list[NewEvent]
    undone: list[NewEvent]  # in a savepoint that is rolled back
    rollback: bool
    hold: float  # seconds between the events and the commit
    at_once: bool  # by publish_many
    refused: dict[str, Any] | None = None  # a payload that publish must refuse, leaving the transaction usable


def names(events: Sequence[NewEvent]) -> list[tuple[str, str]]:
    return [(event.idempotency_key or "", event.event_type) for event in events]


class Producer:
    """Draws transactions from its own random numbers; kinds of producers differ in how they publish them."""

    def __init__(self, dsn: str, history: History, rng: random.Random, rate: float) -> None:
        self.dsn = dsn
        self.history = history
        self.rng = rng
        self.rate = rate  # events per second
        self.stopping = threading.Event()
        self.complaints: list[str] = []
        self.begin_anew()

    def begin_anew(self) -> None:
        """Take new ordering keys: a transaction without an answer may still commit beside the next one."""
        (self._prefix,) = self.history.keys(1)

    async def run(self) -> None:
        raise NotImplementedError

    def draw(self) -> Batch:
        rng = self.rng
        at_once = rng.random() < 0.3
        count = rng.randint(10, 40) if at_once else rng.randint(1, 4)
        events = [self._event(key) for key in self.history.keys(count)]
        if rng.random() < 0.05:
            events.append(events[0])  # twice under one key: one effect
        undone = [self._event(key) for key in self.history.keys(2)] if rng.random() < 0.03 else []
        return Batch(events, undone, rng.random() < 0.03, rng.uniform(0.5, 4) if rng.random() < 0.01 else 0, at_once)

    def _event(self, key: str) -> NewEvent:
        rng = self.rng
        event_type = rng.choice(list(ORDINARY))
        options: dict[str, Any] = {"priority": rng.choice((0, 1, 1, 1, 2))}
        if event_type == "offer.made":
            options["expires_in"] = rng.uniform(1, 5)
        elif rng.random() < 0.1:
            options["delay"] = rng.uniform(0.1, 3)
        payload = {"n": key, "filling": "x" * rng.choice((0, 10, 100, 1000))}
        match rng.random():
            case share if share < 0.15:
                options["ordering_key"] = f"{self._prefix}-{rng.randrange(ORDERING_KEYS)}"
            case share if share < 0.25:
                options["fairness_key"] = f"{rng.randrange(FAIRNESS_KEYS)}"
        return NewEvent(event_type, payload, idempotency_key=key, **options)

    def pause(self, batch: Batch) -> float:
        return min(self.rng.expovariate(self.rate / len(batch.events)), 2.0)


class AsyncpgProducer(Producer):
    async def run(self) -> None:
        connection: asyncpg.Connection | None = None
        while not self.stopping.is_set():
            batch = self.draw()
            connection = await self.publish(connection, batch)
            await asyncio.sleep(self.pause(batch))
        if connection is not None:
            connection.terminate()

    async def publish(self, connection: asyncpg.Connection | None, batch: Batch) -> asyncpg.Connection | None:
        """Returns the connection, or None when it cannot be used any more."""
        number = self.history.attempt(names(batch.events))
        committing = False
        try:
            async with asyncio.timeout(PATIENCE + batch.hold):
                if connection is None:
                    connection = await asyncpg.connect(self.dsn, timeout=PATIENCE)
                transaction = connection.transaction()
                await transaction.start()
                await connection.execute(BUSINESS.format("$1"), number)
                await self._write(connection, batch)
                await asyncio.sleep(batch.hold)
                if batch.rollback:
                    await transaction.rollback()
                else:
                    committing = True
                    await transaction.commit()
        except Exception as error:
            self.history.saw(number, "unknown" if committing else "aborted", 0, error)
            self.begin_anew()
            if connection is not None:
                connection.terminate()
            await asyncio.sleep(0.2)
            return None
        self.history.saw(number, "aborted" if batch.rollback else "acknowledged", len(batch.events))
        return connection

    async def _write(self, connection: asyncpg.Connection, batch: Batch) -> None:
        if batch.refused is not None:
            try:
                await PUBLISHER.publish(connection, "trouble.refused", batch.refused)
                self.complaints.append(f"a payload with {list(batch.refused)} was not refused")
            except PublishError:
                pass
            except asyncpg.DataError as error:
                self.complaints.append(f"a payload reached the database: {type(error).__name__}")
                raise
        if batch.undone:
            undone = self.history.attempt(names(batch.undone))
            savepoint = connection.transaction()
            await savepoint.start()
            await PUBLISHER.publish_many(connection, batch.undone)
            await savepoint.rollback()
            self.history.saw(undone, "aborted", 0)
        if batch.at_once:
            await PUBLISHER.publish_many(connection, batch.events)
        else:
            for event in batch.events:
                await PUBLISHER.publish(connection, **published(event))


class ThreadedProducer(Producer):
    """A synchronous service. It has a thread of its own, in which `publish` may block."""

    async def run(self) -> None:
        await asyncio.to_thread(self._run)

    def _run(self) -> None:
        while not self.stopping.is_set():
            batch = self.draw()
            number = self.history.attempt(names(batch.events))
            self.committing = False
            try:
                self.publish(number, batch)
            except Exception as error:
                self.history.saw(number, "unknown" if self.committing else "aborted", 0, error)
                self.begin_anew()
                self.reset()
                self.stopping.wait(0.2)
            else:
                self.history.saw(number, "aborted" if batch.rollback else "acknowledged", len(batch.events))
            self.stopping.wait(self.pause(batch))
        self.reset()

    committing = False

    def publish(self, number: int, batch: Batch) -> None:
        raise NotImplementedError

    def reset(self) -> None:
        raise NotImplementedError


class PsycopgProducer(ThreadedProducer):
    _connection: psycopg.Connection[Any] | None = None

    def publish(self, number: int, batch: Batch) -> None:
        connection = self._connection = self._connection or psycopg.connect(self.dsn, connect_timeout=5)
        connection.execute(BUSINESS.format("%s"), [number])
        PUBLISHER.publish_many(connection, batch.events)
        time.sleep(batch.hold)
        if batch.rollback:
            connection.rollback()
        else:
            self.committing = True
            connection.commit()

    def reset(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class SqlalchemyProducer(ThreadedProducer):
    _engine: sqlalchemy.Engine | None = None

    def publish(self, number: int, batch: Batch) -> None:
        if self._engine is None:
            self._engine = sqlalchemy.create_engine(
                "postgresql+psycopg://", creator=lambda: psycopg.connect(self.dsn, connect_timeout=5)
            )
        with Session(self._engine) as session:
            session.execute(sqlalchemy.text(BUSINESS.format(":tx")), {"tx": number})
            for event in batch.events:
                PUBLISHER.publish(session, **published(event))
            time.sleep(batch.hold)
            if batch.rollback:
                session.rollback()
            else:
                self.committing = True
                session.commit()

    def reset(self) -> None:
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None


def published(event: NewEvent) -> dict[str, Any]:
    """An event as the arguments of publish."""
    fields = ("event_type", "payload", "idempotency_key", "priority", "delay", "expires_in")
    keys = ("ordering_key", "fairness_key")
    return {name: getattr(event, name) for name in fields + keys}


class Prober(AsyncpgProducer):
    """One event at a time and nothing else, to measure how soon it is heard of."""

    event_types: Sequence[str] = tuple(PROBES)

    def draw(self) -> Batch:
        (key,) = self.history.keys(1)
        return Batch([NewEvent(self.rng.choice(self.event_types), {}, idempotency_key=key)], [], False, 0, False)


class Importer(AsyncpgProducer):
    """Hundreds of events in a transaction, all or none of which may come out."""

    def draw(self) -> Batch:
        keys = self.history.keys(self.rng.randint(100, 500))
        events = [NewEvent("price.changed", {"n": key}, idempotency_key=key) for key in keys]
        return Batch(events, [], self.rng.random() < 0.03, 0, True)
