"""Publishes the tasks that wait in a queue of Celery on Redis.

A task is moved to a second list, published, and removed from that list. If the import is interrupted in between, the
next import finds the task there. The idempotency key is the id of the task, so a task that is published twice is
handled once.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

import asyncpg

from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.importing.pending import BATCH, Imported
from holdfast.importing.refusals import refusal
from holdfast.importing.renaming import Renaming
from holdfast.installing import require_extra
from holdfast.new_event import EventOptions, NewEvent
from holdfast.postgres.imports import ImportAudit
from holdfast.postgres.publisher import Publisher

_UNACKNOWLEDGED = "unacked"
# The lists of one queue: tasks with a priority have lists of their own.
_PRIORITIES = ("", "\x06\x163", "\x06\x166", "\x06\x169")
_CONNECT_TIMEOUT, _TIMEOUT = 5.0, 10.0
_REMEDY = (
    "rename its type with --rename OLD=NEW, or remove it from its list; only tasks that are written as JSON can be read"
)


async def import_celery(
    connection: asyncpg.Connection,
    publisher: Publisher,
    broker: str,
    *,
    actor: str,
    reason: str | None = None,
    queue: str = "celery",
    renamed: Mapping[str, str] | None = None,
    dry_run: bool = False,
    on_progress: Callable[[int], None] = lambda _total: None,
) -> Imported:
    """Publish every task that waits in a queue, and take it from there; the audit has a line for each batch."""
    audit = ImportAudit(publisher.schema, actor, reason, "celery", queue, publisher.source)
    if not broker.startswith(("redis://", "rediss://", "unix://")):
        remedy = "write redis://host:6379/0; with another broker let Celery's workers finish what waits"
        raise ConfigurationError("--broker", "is no address of Redis", remedy)
    require_extra("redis", "redis")
    from redis.asyncio import Redis
    from redis.exceptions import RedisError

    counted: Counter[str] = Counter()
    renaming = Renaming(renamed or {})
    client = Redis.from_url(broker, socket_timeout=_TIMEOUT, socket_connect_timeout=_CONNECT_TIMEOUT)
    try:
        async with client as redis:
            waiting = _Waiting(redis, queue)

            def events_of(messages: Iterable[bytes]) -> list[NewEvent]:
                return [event_of(each, renaming, publisher) for each in messages]

            if dry_run:
                counted.update(event.event_type for event in events_of(await waiting.all()))
            # A task that cannot be an event is refused while it is still in its queue, where Celery's workers find it.
            while not dry_run and events_of(await waiting.next()):
                taken = await waiting.take()
                events = events_of(reversed(taken))
                async with connection.transaction():
                    await publisher.publish_many(connection, events)
                    await audit.note(connection, len(events))
                await waiting.forget(taken)
                counted.update(event.event_type for event in events)
                on_progress(counted.total())
            busy = await redis.hlen(_UNACKNOWLEDGED)
    except RedisError as error:
        remedy = "see to it, and run the import again: it goes on"
        raise ConfigurationError("--broker", f"does not answer: {error}", remedy) from error
    return Imported(dict(sorted(counted.items())), busy, renaming.met)


class _Waiting:
    """The tasks that wait in a queue, and those that were moved aside to be published."""

    def __init__(self, redis: Any, queue: str) -> None:
        self._redis = redis
        self._lists = [f"{queue}{each}" for each in _PRIORITIES]
        self._aside = f"{queue}.holdfast"

    async def all(self) -> list[bytes]:
        """Return every task that waits, without taking any."""
        return [each for name in (self._aside, *self._lists) for each in await self._redis.lrange(name, 0, -1)]

    async def next(self) -> list[bytes]:
        """Return the tasks that `take` would take next, and perhaps more, without taking any."""
        lists = (self._aside, *self._lists)
        return [each for name in lists for each in await self._redis.lrange(name, -BATCH, -1)]

    async def take(self) -> list[bytes]:
        """Move tasks to the second list, and return all that is there, also what an interrupted import has left."""
        for name in self._lists:
            while await self._redis.llen(self._aside) < BATCH:
                if not await self._redis.lmove(name, self._aside, "RIGHT", "LEFT"):
                    break
        found: list[bytes] = await self._redis.lrange(self._aside, 0, -1)
        return found

    async def forget(self, taken: list[bytes]) -> None:
        """Remove these tasks, and no others, from the second list: another import may have added some."""
        async with self._redis.pipeline() as pipe:
            for each in taken:
                pipe.lrem(self._aside, -1, each)
            await pipe.execute()


def event_of(message: bytes | str, renaming: Renaming, publisher: Publisher) -> NewEvent:
    """Return the event of a task: its name is the type, its keyword arguments are the payload.

    A task with positional arguments has both in the payload, as `args` and `kwargs`.
    """
    task = f"the task that begins with {message[:60]!r}"
    try:
        found = json.loads(message)
        headers = found["headers"]
        task = f"task {headers['id']}"
        arguments, named = _arguments(found)
        options: EventOptions = {"idempotency_key": f"celery:{headers['id']}"}
        if headers.get("eta"):
            options["available_at"] = datetime.fromisoformat(headers["eta"])
        payload: dict[str, Any] = {"args": arguments, "kwargs": named} if arguments else named
        event = NewEvent(renaming.event_type(headers["task"]), payload, **options)
        publisher.row_of(event)
        return event
    except (HoldfastError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise refusal(task, error, _REMEDY) from error


def _arguments(message: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    if message.get("content-type") != "application/json":
        raise ValueError(f"it is written as {message.get('content-type')}")
    body = message["body"]
    if message.get("properties", {}).get("body_encoding") == "base64":
        body = b64decode(body)
    arguments, named, *_ = json.loads(body)
    return arguments, named
