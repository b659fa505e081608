"""Verbs for handlers, workers and generations."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from holdfast.flow import MOST_IN_THE_FLEET
from holdfast.operator.catalogue.overview import Nothing
from holdfast.operator.catalogue.verb import Arguments, Catalogue, Change, Id, Name, Text, Whole
from holdfast.operator.generations import MovedGeneration
from holdfast.operator.handlers import FlowChange, ViaChange
from holdfast.operator.operator import Operator
from holdfast.operator.roles import Role
from holdfast.operator.workers import ReleasedWorker
from holdfast.postgres.operations.flow import Limit
from holdfast.postgres.operations.generations import Generation
from holdfast.postgres.operations.handlers import HandlerStatus
from holdfast.postgres.operations.status import WorkerStatus

VERBS = Catalogue()


class RetireHandler(Change):
    handler: Name
    event_type: Name | None = Field(None, description="One subscription; left out: all of them.")


class NamedHandler(Arguments):
    handler: Name


class TurnHandler(NamedHandler, Change):
    pass


class LimitHandler(TurnHandler):
    fleet_concurrency: Annotated[int, Field(ge=1, le=MOST_IN_THE_FLEET)] | None = None
    rate: Annotated[Text, Field(min_length=1, max_length=40, description="Like 100/s or 30/m.")] | None = None
    clear: list[Limit] = Field([], max_length=2, description="Limits that go back to what the code declares.")


class HandlersVia(Change):
    handlers: list[Name] = Field(min_length=1, max_length=100)
    via: Annotated[Text, Field(max_length=30, description="outbox, or a broker: nats, redis, rabbitmq or kafka.")]


class HandlerDrained(NamedHandler, Change):
    broker: Annotated[Text, Field(max_length=30)]


class ReleaseWorker(Change):
    worker: Id
    force: bool = False


class Begin(Change):
    label: Annotated[Text, Field(min_length=1, max_length=100)] | None = None


class RetireGeneration(Change):
    generation: Whole
    force: bool = False


class MoveGeneration(Change):
    generation: Whole
    to: Whole
    force: bool = False


@VERBS.reads("handlers.list")
async def handlers(operator: Operator, given: Nothing) -> list[HandlerStatus]:
    """Every handler that ever subscribed, with its backlog and the workers that serve it."""
    return await operator.handlers.all()


@VERBS.changes("handlers.retire", Role.ADMIN)
async def retire_handler(operator: Operator, given: RetireHandler) -> dict[str, int]:
    """End the subscriptions of a handler, or one of them. Events that already wait for it stay."""
    ended = await operator.handlers.retire(given.handler, given.event_type, reason=given.reason, dry_run=given.dry_run)
    return {"ended": ended}


@VERBS.reads("handlers.show")
async def handler(operator: Operator, given: NamedHandler) -> HandlerStatus:
    """One handler, with its backlog and what holds it back."""
    return await operator.handlers.show(given.handler)


@VERBS.changes("handlers.limit")
async def limit(operator: Operator, given: LimitHandler) -> FlowChange:
    """Set limits of a handler for the whole fleet: deliveries at the same time, and a rate."""
    return await operator.handlers.limit(
        given.handler,
        fleet_concurrency=given.fleet_concurrency,
        rate=given.rate,
        clear=given.clear,
        reason=given.reason,
        dry_run=given.dry_run,
    )


@VERBS.changes("handlers.pause")
async def pause(operator: Operator, given: TurnHandler) -> FlowChange:
    """Claim nothing more for a handler, until it is resumed. Its events wait; what runs may finish."""
    return await operator.handlers.pause(given.handler, reason=given.reason, dry_run=given.dry_run)


@VERBS.changes("handlers.resume")
async def resume(operator: Operator, given: TurnHandler) -> FlowChange:
    """End the pause of a handler, and wake its workers."""
    return await operator.handlers.resume(given.handler, reason=given.reason, dry_run=given.dry_run)


@VERBS.changes("handlers.open")
async def open_breaker(operator: Operator, given: TurnHandler) -> FlowChange:
    """Open the breaker of a handler: one event probes now and then, and the first that succeeds closes it."""
    return await operator.handlers.open(given.handler, reason=given.reason, dry_run=given.dry_run)


@VERBS.changes("handlers.close")
async def close_breaker(operator: Operator, given: TurnHandler) -> FlowChange:
    """Close the breaker of a handler, without waiting for a probe."""
    return await operator.handlers.close(given.handler, reason=given.reason, dry_run=given.dry_run)


@VERBS.changes("handlers.via", Role.ADMIN)
async def via(operator: Operator, given: HandlersVia) -> ViaChange:
    """Let the outbox or a broker carry the events of handlers from now on. Their consumers have to be there."""
    return await operator.handlers.via(given.handlers, given.via, reason=given.reason, dry_run=given.dry_run)


@VERBS.changes("handlers.drained", Role.ADMIN)
async def drained(operator: Operator, given: HandlerDrained) -> dict[str, bool]:
    """Note that a broker has nothing left for a handler that gets its events another way."""
    found = await operator.handlers.drained(given.handler, given.broker, reason=given.reason, dry_run=given.dry_run)
    return {"changed": found}


@VERBS.reads("workers.list")
async def workers(operator: Operator, given: Nothing) -> list[WorkerStatus]:
    """The workers that have not stopped: the living ones first."""
    return await operator.workers.all()


@VERBS.changes("workers.release")
async def release(operator: Operator, given: ReleaseWorker) -> ReleasedWorker:
    """Release the events that a worker holds that is gone. Refused, unless forced, while it lives."""
    return await operator.workers.release(given.worker, force=given.force, reason=given.reason, dry_run=given.dry_run)


@VERBS.reads("generations.list")
async def generations(operator: Operator, given: Nothing) -> list[Generation]:
    """Every known generation: what it still has to do, who serves it, and what is in the way of retiring it."""
    return await operator.generations.all()


@VERBS.changes("generations.begin", Role.ADMIN)
async def begin(operator: Operator, given: Begin) -> dict[str, int]:
    """Begin a generation; from then on it is that of writers that do not name one."""
    number = await operator.generations.begin(given.label, reason=given.reason, dry_run=given.dry_run)
    return {"generation": number}


@VERBS.changes("generations.retire", Role.ADMIN)
async def retire_generation(operator: Operator, given: RetireGeneration) -> Generation:
    """Mark a generation as retired. Refused while it has open events or living workers, unless forced."""
    return await operator.generations.retire(
        given.generation, force=given.force, reason=given.reason, dry_run=given.dry_run
    )


@VERBS.changes("generations.move", Role.ADMIN)
async def move(operator: Operator, given: MoveGeneration) -> MovedGeneration:
    """Move the pending events of a generation to another one."""
    return await operator.generations.move(
        given.generation, given.to, force=given.force, reason=given.reason, dry_run=given.dry_run
    )
