"""First mistakes: every public entry point refuses a wrong argument with an error that names field and remedy.

docs/errors.md promises that: an AttributeError from within would send people into the source.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import asyncpg
import pytest

from holdfast import (
    HandlerRegistry,
    NewEvent,
    Operator,
    Publisher,
    Reactions,
    Reject,
    Retry,
    RetryPolicy,
    Snooze,
    Worker,
    WorkerSettings,
)
from holdfast.errors import ConfigurationError, FieldError, HoldfastError
from holdfast.integrations.fastapi import worker_lifespan
from holdfast.integrations.sqlalchemy import DomainEvents

pytestmark = pytest.mark.newcomer

DSN = "postgresql://h/db"
registry = HandlerRegistry()


@registry.handler("order.placed", name="shop.ship")
async def ship(event: object) -> None: ...


def decorated(function: Any = ship, **options: Any) -> object:
    return HandlerRegistry().handler("order.placed", **{"name": "shop.ship"} | options)(function)


WRONG: dict[str, Callable[[Any], object]] = {
    "Worker(dsn)": lambda wrong: Worker(wrong, registry),
    "Worker(registry)": lambda wrong: Worker(DSN, wrong),
    "Worker(settings)": lambda wrong: Worker(DSN, registry, wrong),
    "Worker(observers)": lambda wrong: Worker(DSN, registry, observers=wrong),
    "Worker(redact)": lambda wrong: Worker(DSN, registry, redact=wrong),
    "Reactions(dsn)": lambda wrong: Reactions(wrong, registry),
    "Reactions(registry)": lambda wrong: Reactions(DSN, wrong),
    "Reactions(grace)": lambda wrong: Reactions(DSN, registry, grace=wrong),
    "Reactions(observers)": lambda wrong: Reactions(DSN, registry, observers=wrong),
    "Reactions(redact)": lambda wrong: Reactions(DSN, registry, redact=wrong),
    "react": lambda wrong: Reactions(DSN, registry).react(wrong),
    "Operator(dsn)": lambda wrong: Operator(wrong, actor="ada"),
    "Operator(actor)": lambda wrong: Operator(DSN, actor=wrong),
    "Publisher(source)": lambda wrong: Publisher(wrong),
    "Publisher(payload_limit)": lambda wrong: Publisher("shop", payload_limit=wrong),
    "NewEvent(type)": lambda wrong: NewEvent(wrong, {}),
    "NewEvent.from_envelope": lambda wrong: NewEvent.from_envelope(wrong),
    "publish(tx)": lambda wrong: Publisher("shop").publish(wrong, "order.placed", {}),
    "publish(event)": lambda wrong: Publisher("shop").publish(None, wrong),
    "publish_alone(connection)": lambda wrong: Publisher("shop").publish_alone(wrong, "order.placed", {}),
    "publish_alone(event)": lambda wrong: Publisher("shop").publish_alone(None, wrong),  # type: ignore[call-overload]
    "NewEvent.of": lambda wrong: NewEvent.of(wrong),
    "HandlerRegistry(lifespan)": lambda wrong: HandlerRegistry(lifespan=wrong),
    "HandlerRegistry(middleware)": lambda wrong: HandlerRegistry(middleware=wrong),
    "publish_event(tx)": lambda wrong: Publisher("shop").publish_event(wrong, NewEvent("order.placed", {})),
    "publish_many(tx)": lambda wrong: Publisher("shop").publish_many(wrong, []),
    "row_of": lambda wrong: Publisher("shop").row_of(wrong),
    "handler(function)": lambda wrong: decorated(wrong),
    "handler(name)": lambda wrong: decorated(name=wrong),
    "handler(retry)": lambda wrong: decorated(retry=wrong),
    "schedule": lambda wrong: HandlerRegistry().schedule("order.placed", name=wrong, cron="0 3 * * *"),
    "include": lambda wrong: HandlerRegistry().include(wrong),
    "DomainEvents(publisher)": lambda wrong: DomainEvents(wrong),
    "DomainEvents(reactions)": lambda wrong: DomainEvents(Publisher("shop"), wrong),
    "attach": lambda wrong: DomainEvents(Publisher("shop")).attach(wrong),
    "worker_lifespan": lambda wrong: worker_lifespan(wrong),
    "WorkerSettings": lambda wrong: WorkerSettings(concurrency=wrong),
    "RetryPolicy": lambda wrong: RetryPolicy(max_attempts=wrong),
    "Retry(delay)": lambda wrong: Retry(wrong),
    "Retry(reason)": lambda wrong: Retry(reason=wrong),
    "Snooze": lambda wrong: Snooze(wrong),
    "Reject": lambda wrong: Reject(wrong),
}


@pytest.mark.parametrize("entry", WRONG)
def test_a_wrong_argument_is_refused_by_name(entry: str) -> None:
    """By the constructor or the call, before anything is connected (PUB-3)."""
    for wrong in (object(), {"a": object()}, -1.5, b"x", ("a",)):
        with pytest.raises(HoldfastError) as refused:
            WRONG[entry](wrong)
        assert refused.value.field and refused.value.remedy  # type: ignore[attr-defined]


def test_arguments_in_the_wrong_order() -> None:
    with pytest.raises(ConfigurationError, match="registry is str, not HandlerRegistry"):
        Worker(registry, DSN)  # type: ignore[arg-type]


async def test_what_is_not_an_event_is_refused_before_any_sql(dsn: str) -> None:
    """The transaction stays usable (PUB-3)."""
    connection = await asyncpg.connect(dsn)
    publisher = Publisher("shop")
    wrong: tuple[Any, ...] = ([("order.placed", {})], [{"a": 1}], ["order.placed"], {"a": 1}, 1, NewEvent("a.b", {}))
    try:
        async with connection.transaction():
            for events in wrong:
                with pytest.raises(FieldError, match="NewEvent"):
                    await publisher.publish_many(connection, events)
            for event in ("order.placed", None, ("order.placed", {})):
                with pytest.raises(FieldError, match="NewEvent"):
                    await publisher.publish_event(connection, event)  # type: ignore[call-overload]
            with pytest.raises(FieldError, match="EventEnvelope"):
                await publisher.bind(connection).publish("order.placed")  # type: ignore[arg-type]
            await publisher.publish(connection, "order.placed", {})
        assert await connection.fetchval("SELECT count(*) FROM core.outbox") == 1
    finally:
        await connection.close()
