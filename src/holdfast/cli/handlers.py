"""holdfast handlers: their subscriptions, what holds them back, and the workers that serve them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, cast

import typer

from holdfast.brokers import consumers
from holdfast.brokers.engines import engine_of
from holdfast.cli import output
from holdfast.cli.command_group import command_group
from holdfast.cli.options import Change, HandlerArgument, JsonOption, Target, Where, spread
from holdfast.errors import ConfigurationError
from holdfast.flow import shown_rate
from holdfast.operator import FlowChange, HandlerFlow, HandlerStatus, Limit, Operator, Refused, ViaChange

_PAUSES = 200  # of all handlers, the latest first: among them the one that still holds
_TRIED = 200  # of its open events: among them one that has failed

app = command_group("Handlers: their subscriptions, their limits, and the workers that serve them.")

# What holds a handler back is changed by a verb of this form, and can be tried out.
Verb = Callable[..., Awaitable[FlowChange]]


@app.command("list")
@spread
def list_(where: Where, as_json: JsonOption = False) -> None:
    """List every handler with its subscriptions, its backlog, its failures, and its workers."""
    found = where.run(lambda operator: operator.handlers.all())
    if as_json:
        output.print_json(found)
        output.print_left_out(found, as_json=True)
        return
    limited = any(each.flow is not None for each in found)
    carried = any(each.via != "outbox" or each.draining for each in found)
    rows: list[tuple[object, ...]] = [
        (
            *(e.handler_name, e.domain_context, _types(e), e.open, _failed(e), _served(e)),
            *((_via(e),) if carried else ()),
            *((_flow(e.flow),) if limited else ()),
        )
        for e in found
    ]
    headers = ("handler", "domain context", "event types", "open", "failed", "served by")
    output.print_table((*headers, *(("via",) if carried else ()), *(("limits",) if limited else ())), rows)
    output.print_left_out(found)


@app.command("show")
@spread
def show(where: Where, handler: HandlerArgument, as_json: JsonOption = False) -> None:
    """Show one handler: its backlog, its limits, whether it is paused, and the state of its breaker."""
    found, why, error = where.run(lambda operator: _read(operator, handler))
    if as_json:
        output.print_json(found)
        return
    facts: list[tuple[str, object]] = [
        ("handler", found.handler_name),
        ("domain context", found.domain_context),
        ("event types", _types(found)),
        ("open", found.open),
        ("failed", _failed(found)),
        ("served by", _served(found)),
    ]
    if found.via != "outbox" or found.draining:
        facts.append(("via", _via(found)))
    if found.flow is not None:
        facts += _facts(found.flow, why)
    facts.append(("last error", error))
    output.print_facts(facts)


def _types(each: HandlerStatus) -> object:
    """Return what a handler gets; a relay gets what the handlers behind its broker are owed."""
    if each.domain_context == "relay" and not each.event_types:
        return f"of the handlers behind {each.handler_name.partition('.')[2]}"
    return each.event_types or "retired"


def _via(each: HandlerStatus) -> str | None:
    """Return what carries the events of a handler, and the broker that may still hold some; None for a relay."""
    if each.domain_context == "relay":
        return None
    return each.via if each.draining is None else f"{each.via}, {each.draining} until drained"


async def _read(operator: Operator, handler: str) -> tuple[HandlerStatus, str | None, str | None]:
    """A handler, why it is paused, which the audit has, and the error of what is tried again latest."""
    found = await operator.handlers.show(handler)
    if found.flow is None:
        return found, None, None
    error = None
    if found.flow.breaker not in (None, "closed"):
        tried = await operator.events.page(handler=handler, limit=_TRIED)
        error = next((output.first_line(each.last_error) for each in reversed(tried) if each.last_error), None)
    if found.flow.paused_at is None:
        return found, None, error
    pauses = await operator.audit.page(action="handler.pause", limit=_PAUSES)
    made = (line for line in pauses if line.arguments.get("handler") == handler and line.counts.get("changed"))
    return found, next((line.reason for line in made), None), error


@app.command("limit")
@spread
def limit(
    where: Target,
    handler: HandlerArgument,
    change: Change,
    fleet_concurrency: Annotated[
        int | None,
        typer.Option("--fleet-concurrency", metavar="N", help="Deliveries at the same time, in all workers together."),
    ] = None,
    rate: Annotated[
        str | None, typer.Option("--rate", metavar="RATE", help="Deliveries over time, like 100/s, 90/min or 10/h.")
    ] = None,
    clear: Annotated[
        list[str] | None,
        typer.Option("--clear", metavar="LIMIT", help="fleet_concurrency or rate: back to what the code declares."),
    ] = None,
) -> None:
    """Limit a handler in all workers, at once. It wins over what the code declares, until it is cleared."""
    if fleet_concurrency is None and rate is None and not clear:
        remedy = "give one of them, or --clear with the limit that goes back to what the code declares"
        raise ConfigurationError("--fleet-concurrency or --rate", "is missing", remedy)
    named: list[Limit] = [_limit(each) for each in clear or ()]
    asked: dict[str, Any] = {"fleet_concurrency": fleet_concurrency, "rate": rate, "clear": named}
    _turn(
        where,
        change,
        handler,
        f"Change the limits of {handler}?",
        lambda operator: partial(operator.handlers.limit, **asked),
        "limits changed",
        "its limits were like that before",
    )


@app.command("pause")
@spread
def pause(where: Target, handler: HandlerArgument, change: Change) -> None:
    """Claim nothing more for a handler until it is resumed. Its events wait; what runs may finish."""
    _turn(
        where,
        change,
        handler,
        f"Pause {handler}?",
        lambda operator: operator.handlers.pause,
        "paused",
        "it was paused before",
    )


@app.command("resume")
@spread
def resume(where: Target, handler: HandlerArgument, change: Change) -> None:
    """End the pause of a handler."""
    _turn(
        where,
        change,
        handler,
        f"Resume {handler}?",
        lambda operator: operator.handlers.resume,
        "resumed",
        "it was not paused",
    )


@app.command("open")
@spread
def open_(where: Target, handler: HandlerArgument, change: Change) -> None:
    """Open the breaker of a handler: its events wait, and one probes now and then, until one succeeds."""
    _turn(
        where,
        change,
        handler,
        f"Open the breaker of {handler}?",
        lambda operator: operator.handlers.open,
        "breaker opened",
        "its breaker was open before",
    )


@app.command("close")
@spread
def close(where: Target, handler: HandlerArgument, change: Change) -> None:
    """Close the breaker of a handler, without waiting for a probe."""
    _turn(
        where,
        change,
        handler,
        f"Close the breaker of {handler}?",
        lambda operator: operator.handlers.close,
        "breaker closed",
        "its breaker was closed before",
    )


def _limit(name: str) -> Limit:
    """Return what --clear names; the verb refuses what is neither."""
    return cast(Limit, name.replace("-", "_"))


def _turn(
    where: Target,
    change: Change,
    handler: str,
    question: str,
    verb_of: Callable[[Operator], Verb],
    done: str,
    already: str,
) -> None:
    """Change what holds a handler back, and say what does so afterwards. Exit code 1: it was like that before."""

    async def act(operator: Operator) -> FlowChange:
        verb = partial(verb_of(operator), handler, reason=change.reason)
        found = await verb(dry_run=True)
        if change.dry_run:
            return found
        if found.changed:
            change.confirm(question)
        return await verb()

    found = where.run(act)
    if change.as_json:
        output.print_json(found)
    else:
        what, _, how = done.rpartition(" ")
        said = " ".join(filter(None, (what, f"{change.would}{how}"))) if found.changed else f"not changed: {already}"
        output.print_line(f"{found.handler}: {said}")
        when = "afterwards" if change.dry_run else "now"
        output.print_line(f"{found.handler}: {when} {_flow(found.flow) if found.flow else 'nothing holds it back'}")
    if not found.changed:
        raise typer.Exit(1)


def _flow(flow: HandlerFlow | None) -> str:
    """What holds a handler back, in a few words."""
    if flow is None:
        return "-"
    words = ["PAUSED"] if flow.paused_at is not None else []
    if flow.breaker not in (None, "closed"):
        words.append(f"breaker {str(flow.breaker).upper() if flow.opened_at else flow.breaker}")
    if flow.fleet_concurrency is not None:
        words.append(f"{flow.fleet_concurrency} at once{_by(flow, 'fleet_concurrency')}")
    if flow.rate is not None:
        words.append(f"{shown_rate(flow.rate)}{_by(flow, 'rate')}")
    return ", ".join(words) or "breaker closed"


def _by(flow: HandlerFlow, limit: Limit) -> str:
    return " (set)" if limit in flow.set_by_operator else ""


def _facts(flow: HandlerFlow, why: str | None) -> list[tuple[str, object]]:
    facts: list[tuple[str, object]] = []
    if flow.paused_at is not None:
        because = f": {why}" if why else ""
        facts.append(("paused", f"since {output.shown(flow.paused_at)} by {flow.paused_by}{because}"))
    if flow.fleet_concurrency is not None:
        by = _setter(flow, "fleet_concurrency")
        facts.append(("fleet concurrency", f"{flow.fleet_concurrency}, {flow.in_flight} in flight; set by {by}"))
    if flow.rate is not None:
        facts.append(("rate", f"{shown_rate(flow.rate)}; set by {_setter(flow, 'rate')}"))
    if flow.breaker is not None:
        closed = f"closed, {flow.failures} failures in a row"
        facts.append(("breaker", closed if flow.breaker == "closed" else flow.breaker))
    if flow.opened_at is not None:
        due = "the next now" if flow.probe_in is None else f"the next in {flow.probe_in:.1f} s"
        if flow.paused_at is not None:
            due = "none while it is paused"
        facts += [("open since", flow.opened_at), ("probes", f"{flow.failed_probes} failed, {due}")]
    return facts


def _setter(flow: HandlerFlow, limit: Limit) -> str:
    return "operator" if limit in flow.set_by_operator else "code"


WayArgument = Annotated[str, typer.Argument(metavar="WAY", help="outbox, or the address of a broker.")]


@app.command("via")
@spread
def via(
    where: Target,
    way: WayArgument,
    handlers: Annotated[list[str], typer.Argument(metavar="HANDLER", help="The handlers' names.")],
    change: Change,
) -> None:
    """Let a broker, or the outbox again, carry the events of handlers. Consumers at the broker are made first."""
    engine = None if way == "outbox" else engine_of(way)
    name = "outbox" if engine is None else engine.name

    async def act(operator: Operator) -> tuple[ViaChange, dict[str, int]]:
        found = await operator.handlers.via(handlers, name, reason=change.reason, dry_run=True)
        left = {each.via for each in await operator.relay.show() if each.handler_name in handlers} - {"outbox", name}
        change.confirm(f"Let {name} carry the events of {', '.join(handlers)}?")
        if engine is not None and not change.dry_run:
            await consumers.make(engine, await operator.relay.wanted(handlers))
        if not change.dry_run:
            found = await operator.handlers.via(handlers, name, reason=change.reason)
        # What the relay is owed already stays with it.
        return found, {each: (await operator.handlers.show(f"relay.{each}")).open for each in sorted(left)}

    found, waiting = where.run(act)
    if change.as_json:
        output.print_json(found)
    else:
        output.print_line(f"{output.counted(found.changed, 'handler')} {change.would}moved to {name}")
        for broker, count in waiting.items():
            if count:
                wait, go = ("waits", "goes") if count == 1 else ("wait", "go")
                output.print_line(f"{output.events(count)} {wait} for {broker} and {go} when it is back", "yellow")
    if not found.changed:
        raise typer.Exit(1)


@app.command("drained")
@spread
def drained(
    where: Target,
    broker: Annotated[str, typer.Argument(metavar="URL", help="The address of the broker.")],
    handler: Annotated[str, typer.Argument(metavar="HANDLER", help="The handler's name.")],
    change: Change,
) -> None:
    """End what is left at a broker of a handler that gets its events another way: nothing may wait there any more."""
    engine = engine_of(broker)

    async def act(operator: Operator) -> bool:
        # Before the broker is asked: what the relay has sent by then is among the messages that are left there.
        await operator.handlers.drained(handler, engine.name, dry_run=True)
        interests = await operator.relay.interests(engine.name, [handler])
        left = await consumers.left(engine, interests)
        if left:
            remedy = (
                f"wait until workers with --substrate have taken them: holdfast relay show --substrate {way_of(broker)}"
            )
            raise Refused(f"{engine.name} has {output.counted(left, 'message')} left for {handler}", remedy)
        change.confirm(f"Delete the consumer of {handler} at {engine.name}?")
        changed = await operator.handlers.drained(handler, engine.name, reason=change.reason, dry_run=change.dry_run)
        if not change.dry_run:
            await consumers.remove(engine, interests)
        return changed

    changed = where.run(act)
    if change.as_json:
        output.print_json({"handler": handler, "broker": engine.name, "changed": changed, "dry_run": change.dry_run})
    else:
        output.print_line(f"{handler} {change.would}{'' if changed else 'was already '}drained from {engine.name}")


def way_of(address: str) -> str:
    """Return an address as it may be shown: without a login."""
    scheme, _, rest = address.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


@app.command("retire")
@spread
def retire(
    where: Target,
    handler: HandlerArgument,
    change: Change,
    event_type: Annotated[
        str | None, typer.Option("--event-type", metavar="TYPE", help="Only this type, as it was registered.")
    ] = None,
) -> None:
    """End the subscriptions of a handler. Events that already wait for it stay, and can be cancelled or moved."""

    async def act(operator: Operator) -> tuple[int, HandlerStatus | None]:
        options: dict[str, Any] = {"reason": change.reason, "event_type": event_type}
        ended = await operator.handlers.retire(handler, dry_run=True, **options)
        change.confirm(f"End {output.counted(ended, 'subscription')} of {handler}?")
        if not change.dry_run:
            ended = await operator.handlers.retire(handler, **options)
        return ended, next((each for each in await operator.handlers.all() if each.handler_name == handler), None)

    ended, left = where.run(act)
    if change.as_json:
        output.print_json({"handler": handler, "event_type": event_type, "ended": ended, "dry_run": change.dry_run})
    else:
        output.print_line(f"{handler}: {output.counted(ended, 'subscription')} {change.would}ended")
        if left is not None and not change.dry_run and event_type is None:
            _show_left(left)
    if not ended:
        raise typer.Exit(1)


def _show_left(each: HandlerStatus) -> None:
    """What only this handler can handle, and the commands that drop it."""
    for count, what, drop in (
        (each.open, "event", "events cancel"),
        (each.failed, "dead letter", "failed discard"),
        (each.archived, "archived dead letter", "archive discard"),
    ):
        if count:
            wait = "waits" if count == 1 else "wait"
            still = f"{output.counted(count, what)} still {wait} for it; if nobody wants them"
            output.print_line(f"{still}: holdfast {drop} --handler {each.handler_name}", "yellow")


def _failed(each: HandlerStatus) -> str:
    return f"{each.failed}, archived {each.archived}" if each.archived else str(each.failed)


def _served(each: HandlerStatus) -> str:
    return "NO WORKER, and events wait" if each.unserved else output.shown(each.workers)
