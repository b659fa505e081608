"""Publishes the tasks that wait in a queue of Celery on Redis.

A task is moved to a list of its own, published, and removed from that list: an import that ends in between finds it
there the next time. Its idempotency key is the id of the task, so what is published twice is handled once.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import asyncpg

from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.importing.pending import BATCH, Imported
from holdfast.installing import require_extra
from holdfast.new_event import EventOptions, NewEvent
from holdfast.postgres.publisher import Publisher

_UNACKNOWLEDGED = "unacked"


async def import_celery(
    connection: asyncpg.Connection,
    publisher: Publisher,
    broker: str,
    *,
    queue: str = "celery",
    renamed: Mapping[str, str] | None = None,
    dry_run: bool = False,
    on_progress: Callable[[int], None] = lambda _total: None,
) -> Imported:
    """Publish every task that waits in a queue, and take it from there."""
    if not broker.startswith(("redis://", "rediss://", "unix://")):
        remedy = "write redis://host:6379/0; with another broker let Celery's workers finish what waits"
        raise ConfigurationError("--broker", "is no address of Redis", remedy)
    require_extra("redis", "redis")
    from redis.asyncio import Redis

    aside = f"{queue}.holdfast"
    counted: Counter[str] = Counter()
    async with Redis.from_url(broker) as redis:
        if dry_run:
            waiting = await redis.lrange(aside, 0, -1) + await redis.lrange(queue, 0, -1)
            counted.update(event_of(each, renamed or {}).event_type for each in waiting)
        else:
            while True:
                while await redis.llen(aside) < BATCH and await redis.lmove(queue, aside, "RIGHT", "LEFT"):
                    pass
                taken = await redis.lrange(aside, 0, -1)
                if not taken:
                    break
                events = [event_of(each, renamed or {}) for each in reversed(taken)]
                async with connection.transaction():
                    await publisher.publish_many(connection, events)
                await redis.delete(aside)
                counted.update(event.event_type for event in events)
                on_progress(counted.total())
        busy = await redis.hlen(_UNACKNOWLEDGED)
    return Imported(dict(sorted(counted.items())), busy)


def event_of(message: bytes | str, renamed: Mapping[str, str]) -> NewEvent:
    """Return the event of a task: its name is the type, its keyword arguments are the payload.

    A task with positional arguments has both in the payload, as `args` and `kwargs`.
    """
    task = "a task"
    try:
        found = json.loads(message)
        headers = found["headers"]
        task = f"task {headers['id']}"
        arguments, named = _arguments(found)
        options: EventOptions = {"idempotency_key": f"celery:{headers['id']}"}
        if headers.get("eta"):
            options["available_at"] = datetime.fromisoformat(headers["eta"])
        payload: dict[str, Any] = {"args": arguments, "kwargs": named} if arguments else named
        return NewEvent(renamed.get(headers["task"], headers["task"]), payload, **options)
    except (HoldfastError, KeyError, TypeError, ValueError) as error:
        remedy = "rename its type with --rename OLD=NEW; only tasks that are written as JSON can be read"
        raise ConfigurationError(task, f"cannot be an event: {type(error).__name__}: {error}", remedy) from error


def _arguments(message: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    if message.get("content-type") != "application/json":
        raise ValueError(f"it is written as {message.get('content-type')}")
    body = message["body"]
    if message.get("properties", {}).get("body_encoding") == "base64":
        body = b64decode(body)
    arguments, named, *_ = json.loads(body)
    return arguments, named
