"""holdfast relay: events on their way to a broker, what was lost there, and sending it again."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import typer

from holdfast.brokers import consumers
from holdfast.brokers.consumers import BrokerReport
from holdfast.brokers.engines import engine_of
from holdfast.cli import environment, logs, output
from holdfast.cli.command_group import command_group
from holdfast.cli.databases import DatabaseOption
from holdfast.cli.environment import DsnOption, SchemaOption
from holdfast.cli.options import Change, JsonOption, Target, Where, spread
from holdfast.cli.selection import moment
from holdfast.errors import ConfigurationError
from holdfast.handlers import HandlerRegistry
from holdfast.observability.logging import LogObserver
from holdfast.operator import CarriedHandler, Operator, RelayChange, RelayCheck, RelayRotation, Status
from holdfast.retention import inbox_days
from holdfast.settings import WorkerSettings
from holdfast.worker import Worker, process

app = command_group("Brokers: who gets events from them, what they have lost, and sending it again.")

_DEFAULT = WorkerSettings()

BrokerArgument = Annotated[str, typer.Argument(help="The broker: nats, redis, rabbitmq or kafka.")]
SubstrateOption = Annotated[
    str | None,
    typer.Option(
        "--substrate", metavar="URL", help="The address of the broker, to ask it too. Default: HOLDFAST_SUBSTRATE."
    ),
]
UntilOption = Annotated[str | None, typer.Option("--until", metavar="TIME", help="Relayed before this time.")]
LimitOption = Annotated[int, typer.Option("--limit", help="How many relayed events to look at.")]


@app.command("run")
def run(
    substrate: Annotated[str, typer.Argument(metavar="URL", help="The broker, like nats://host:4222.")],
    event_type: Annotated[
        list[str] | None,
        typer.Option(
            "--event-type",
            metavar="TYPE",
            help="Send events of this type, or pattern, although no handler of this database gets them from the "
            "broker; may be repeated.",
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Name shown to operators. Default: host and process id.")] = "",
    generation: Annotated[
        int | None, typer.Option(min=0, help="Deployment generation. Default: HOLDFAST_GENERATION, else 0.")
    ] = None,
    schema: SchemaOption = None,
    dsn: DsnOption = None,
    database: DatabaseOption = None,
) -> None:
    """Send events to a broker, until SIGTERM. A worker with --substrate does that too; this one has no handlers."""
    settings = WorkerSettings(
        schema=environment.schema(schema),
        generation=environment.generation(generation),
        name=name,
        substrate=substrate,
        relayed=tuple(event_type or ()),
        relay_secrets=environment.relay_secrets(),
    )
    log = LogObserver(
        service=environment.service(None),
        environment=environment.deployment_environment(None),
        version=environment.service_version(None),
        worker=settings.shown_name,
    )
    logs.configure(level=environment.log_level(None), bound={**log.application, **log.process})
    try:
        worker = Worker(environment.dsn(dsn, database), HandlerRegistry(), settings, observers=(log,))
        process.run_worker(worker.run(signals=True))
    finally:
        logs.flush()


@app.command("show")
@spread
def show(where: Where, substrate: SubstrateOption = None, as_json: JsonOption = False) -> None:
    """Show which handlers get their events by a broker; with its address also what it holds, and how safe it is."""
    address = environment.substrate(substrate)

    async def act(operator: Operator) -> tuple[list[CarriedHandler], Status, BrokerReport | None]:
        found, told = await operator.relay.show(), await operator.status()
        if address is None:
            return found, told, None
        engine = engine_of(address)
        interests = await operator.relay.interests(engine.name)
        channels = sorted({each.channel for each in interests})
        remembered = 86_400.0 * inbox_days((await operator.retention.report()).policies)
        return found, told, await consumers.report(engine, interests, channels, remembered)

    found, told, report = where.run(act)
    if as_json:
        output.print_json({"handlers": found, "broker": report})
        return
    if not found:
        output.print_line("no handler gets its events by a broker")
    else:
        headers = ("handler", "via", "since", "decided by", "drains", "relayed by", "taken by")
        output.print_table(headers, [_row(each) for each in found])
    for broker in sorted({each.broker for each in told.backlogs}):
        output.print_line(_last_answer(broker, told))
    if report is not None:
        _print_report(report)


def _row(each: CarriedHandler) -> tuple[object, ...]:
    relayed = each.relayed_by or ("NOBODY" if each.via != "outbox" else "-")
    taken = each.taken_by or "NOBODY"
    decided = each.decided_by or "a worker"
    return each.handler_name, each.via, each.since or "-", decided, each.draining or "-", relayed, taken


def _last_answer(broker: str, told: Status) -> str:
    ages = [each.seconds for each in told.backlogs if each.broker == broker and each.seconds is not None]
    return f"{broker}: last answer {min(ages):.0f} s ago" if ages else f"{broker}: no answer yet"


def _print_report(report: BrokerReport) -> None:
    if report.backlogs:
        output.print_table(
            (f"at {report.broker}", "waiting", "not acknowledged", "delivered again"),
            [
                (each.handler_name, _count(each.waiting), _count(each.unacknowledged), _count(each.redelivered))
                for each in report.backlogs
            ],
        )
        if any(each.waiting is None and each.unacknowledged is None for each in report.backlogs):
            output.print_line(f"? no consumer of this name at {report.broker}; is the address the worker's?", "yellow")
    for weakness in report.weaknesses:
        output.print_line(f"! {weakness.subject} {weakness.problem}; {weakness.remedy}", "yellow")


def _count(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


@app.command("check")
@spread
def check(
    where: Target,
    broker: BrokerArgument,
    change: Change,
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="Relayed since: 2h, 7d, or 2026-01-31T08:00 (UTC).")
    ] = None,
    until: UntilOption = None,
    limit: LimitOption = 10_000,
    repair: Annotated[bool, typer.Option("--repair", help="Put what is lost into the lanes of its handlers.")] = False,
) -> None:
    """Look for events that a broker has confirmed and that a handler here has not got; exit code 1 if there are any."""
    span: dict[str, Any] = {"since": moment("--since", since), "until": moment("--until", until), "rows": limit}

    async def act(operator: Operator) -> tuple[RelayCheck, RelayChange | None]:
        found = await operator.relay.check(broker, **span)
        if not repair or not found.lost:
            return found, None
        change.confirm(f"Put {output.counted(len(found.lost), 'delivery', 'deliveries')} into the lanes?")
        return found, await operator.relay.repair(broker, **span, reason=change.reason, dry_run=change.dry_run)

    found, repaired = where.run(act)
    if change.as_json:
        output.print_json({"check": found, "repaired": repaired})
    else:
        _print_lost(found, whole=until is not None)
        if repaired is not None:
            count = output.counted(repaired.count, "delivery", "deliveries")
            output.print_line(f"{count} {change.would}put into the lanes")
    if found.lost and (repaired is None or change.dry_run):
        raise typer.Exit(1)


def _print_lost(found: RelayCheck, *, whole: bool) -> None:
    """`whole`: the end of the time was named, so that nothing later is meant."""
    looked = f"{output.counted(found.looked_at, 'relayed event')} before {found.until:%H:%M} looked at"
    if not found.looked_at:
        output.print_line(looked if whole else f"{looked}; --until now looks at the rest", "yellow")
        return
    if not found.lost:
        output.print_line(f"nothing that {found.broker} has confirmed is missing: {looked}")
        return
    output.print_table(
        ("event", "handler", "event type", "relayed (UTC)"),
        [(each.event_id, each.handler_name, each.event_type, each.relayed_at) for each in found.lost],
    )


@app.command("again")
@spread
def again(
    where: Target,
    broker: BrokerArgument,
    change: Change,
    since: Annotated[
        str, typer.Option("--since", metavar="TIME", help="Relayed since: 2h, 7d, or 2026-01-31T08:00 (UTC).")
    ],
    until: UntilOption = None,
    event_type: Annotated[str | None, typer.Option("--event-type", metavar="TYPE", help="Of this event type.")] = None,
    source: Annotated[str | None, typer.Option("--source", metavar="NAME", help="Published by this source.")] = None,
) -> None:
    """Send events to a broker once more, by the time at which they were relayed."""
    begin: datetime | None = moment("--since", since)
    if begin is None:
        raise ConfigurationError("--since", "is empty", "write 2h, 7d or 2026-01-31T08:00+01:00")
    asked: dict[str, Any] = {"since": begin, "until": moment("--until", until)}
    asked |= {"event_type": event_type, "source": source, "reason": change.reason}

    async def act(operator: Operator) -> RelayChange:
        first = await operator.relay.again(broker, **asked, dry_run=True)
        change.confirm(f"Send {output.counted(first.count, 'event')} or more to {broker} again?")
        return first if change.dry_run else await operator.relay.again(broker, **asked)

    found = where.run(act)
    if change.as_json:
        output.print_json(found)
    else:
        output.print_line(f"{output.counted(found.count, 'event')} {change.would}sent to {broker} again")
    if not found.count:
        raise typer.Exit(1)


@app.command("rotate")
@spread
def rotate(
    where: Target,
    change: Change,
    drop_old: Annotated[
        bool,
        typer.Option(
            "--drop-old", help="Accept the old ones for two minutes more, not 30 days: somebody else knows one."
        ),
    ] = False,
) -> None:
    """Make a new secret of this database, which relays sign with a minute later."""

    async def act(operator: Operator) -> RelayRotation:
        change.confirm("Make a new secret, and drop the old ones?" if drop_old else "Make a new secret?")
        return await operator.relay.rotate(drop_old=drop_old, reason=change.reason, dry_run=change.dry_run)

    found = where.run(act)
    if change.as_json:
        output.print_json(found)
    else:
        count = output.counted(found.accepted, "secret")
        made, accepted = (change.would, change.would) if change.dry_run else ("is ", "are ")
        output.print_line(f"a new secret {made}made; {count} {accepted}accepted now")
