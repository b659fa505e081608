"""Verbs for brokers, as far as the database knows of them: no request makes Holdfast connect to an address."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from holdfast.operator.catalogue.overview import Nothing
from holdfast.operator.catalogue.verb import Arguments, Catalogue, Change, Moment, Name, Text
from holdfast.operator.operator import Operator
from holdfast.operator.relay import RelayChange, RelayCheck, RelayRotation
from holdfast.postgres.operations.brokers import CarriedHandler

VERBS = Catalogue()

Broker = Annotated[Text, Field(max_length=30, description="nats, redis, rabbitmq or kafka.")]
Rows = Annotated[int, Field(ge=1, le=100_000, description="How many relayed events to look at.")]


class Check(Arguments):
    broker: Broker
    since: Moment | None = Field(None, description="Left out: a day ago.")
    until: Moment | None = Field(None, description="Left out: ten minutes ago.")
    rows: Rows = 10_000


class Repair(Change):
    broker: Broker
    since: Moment | None = Field(None, description="Left out: a day ago.")
    until: Moment | None = Field(None, description="Left out: ten minutes ago.")
    rows: Rows = 10_000


class Again(Change):
    broker: Broker
    since: Moment
    until: Moment | None = Field(None, description="Left out: now.")
    event_type: Name | None = None
    source: Name | None = None


class Rotate(Change):
    drop_old: bool = Field(False, description="Accept the old ones for two minutes more, and not for 30 days.")


@VERBS.reads("relay.show")
async def show(operator: Operator, given: Nothing) -> list[CarriedHandler]:
    """Every handler that gets its events by a broker, or did, and is still given the last of them."""
    return await operator.relay.show()


@VERBS.reads("relay.check")
async def check(operator: Operator, given: Check) -> RelayCheck:
    """Events that a broker has confirmed, and that a handler of this database has not got."""
    return await operator.relay.check(given.broker, since=given.since, until=given.until, rows=given.rows)


@VERBS.changes("relay.repair")
async def repair(operator: Operator, given: Repair) -> RelayChange:
    """Put what a broker has lost into the lanes of its handlers, where no broker is needed."""
    return await operator.relay.repair(
        given.broker,
        since=given.since,
        until=given.until,
        rows=given.rows,
        reason=given.reason,
        dry_run=given.dry_run,
    )


@VERBS.changes("relay.again")
async def again(operator: Operator, given: Again) -> RelayChange:
    """Relay once more what was relayed in some time; consumers that have handled it find it in their inbox."""
    return await operator.relay.again(
        given.broker,
        since=given.since,
        until=given.until,
        event_type=given.event_type,
        source=given.source,
        reason=given.reason,
        dry_run=given.dry_run,
    )


@VERBS.changes("relay.rotate")
async def rotate(operator: Operator, given: Rotate) -> RelayRotation:
    """Make a new secret of this database, which relays sign with a minute later."""
    return await operator.relay.rotate(drop_old=given.drop_old, reason=given.reason, dry_run=given.dry_run)
