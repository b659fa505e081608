"""holdfast schedules: when events are published by the clock, and by whom."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from holdfast.cli import output
from holdfast.cli.options import Change, JsonOption, PayloadOption, Target, Where, spread
from holdfast.operator import Operator, schedules
from holdfast.operator.schedules import Turned, Verb
from holdfast.postgres.schedules import ScheduleSeen

app = typer.Typer(help="Schedules: events that are published at their times.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The schedule's name.")]


@app.command("list")
@spread
def list_(where: Where, as_json: JsonOption = False) -> None:
    """List schedules with their next slots, the last ones that were fired, and whether somebody fires them."""
    found = where.run(schedules.listing)
    if as_json:
        output.print_json([_as_data(each) for each in found])
        return
    output.print_table(
        ("schedule", "when", "event type", "state", "next slot", "last slot", "fired", "generation"),
        [(*(s.name, s.when, s.event_type, s.state, s.next_slot, s.last_slot, s.fired), s.generation) for s in found],
    )


@app.command("show")
@spread
def show(where: Where, name: NameArgument, payload: PayloadOption = False, as_json: JsonOption = False) -> None:
    """Show a schedule and the slots that come next."""
    found = where.run(lambda operator: schedules.show(operator, name, payload=payload))
    seen = found.schedule
    if as_json:
        output.print_json(_as_data(seen) | {"upcoming": found.upcoming})
        return
    facts: dict[str, object] = {
        "state": f"paused by {seen.paused_by}" if seen.state == "paused" else seen.state,
        "when": seen.when,
        "missed slots": seen.missed,
        "event type": seen.event_type,
        "source": seen.source,
        "target": seen.target,
        "next slots": found.upcoming,
        "last slot": seen.last_slot,
        "last fired": seen.last_fired_at,
        "fired": seen.fired,
        "declared": f"{seen.declared_at:%Y-%m-%d %H:%M:%S} by generation {seen.generation}",
        "last attended": seen.attended_at,
        **({"payload": seen.payload} if payload else {}),
    }
    output.print_table((seen.name, ""), list(facts.items()))


@app.command("trigger")
@spread
def trigger(where: Target, name: NameArgument, change: Change) -> None:
    """Publish the event of a schedule now. Its slots stay as they are."""

    async def act(operator: Operator) -> str:
        seen = (await schedules.show(operator, name)).schedule
        change.confirm(f"Publish {seen.event_type} for {name} now?")
        return str(await schedules.trigger(operator, name, reason=change.reason, dry_run=change.dry_run))

    identity = where.run(act)
    if change.as_json:
        event = None if change.dry_run else identity
        output.print_json({"schedule": name, "event_id": event, "dry_run": change.dry_run})
    else:
        output.print_line(f"{name} {change.would}triggered" + ("" if change.dry_run else f": event {identity}"))


@app.command("pause")
@spread
def pause(where: Target, name: NameArgument, change: Change) -> None:
    """Fire no more slots of a schedule until it is resumed. Those that come meanwhile are left out for good."""
    _turn(where, name, "pause", change)


@app.command("resume")
@spread
def resume(where: Target, name: NameArgument, change: Change) -> None:
    """Fire the slots of a schedule again, from now on."""
    _turn(where, name, "resume", change)


@app.command("remove")
@spread
def remove(where: Target, name: NameArgument, change: Change) -> None:
    """Take away a schedule that no living worker declares any more."""

    async def act(operator: Operator) -> None:
        options: dict[str, Any] = {"reason": change.reason}
        await schedules.remove(operator, name, dry_run=True, **options)
        change.confirm(f"Remove the schedule {name}?")
        if not change.dry_run:
            await schedules.remove(operator, name, **options)

    where.run(act)
    if change.as_json:
        output.print_json({"schedule": name, "removed": not change.dry_run, "dry_run": change.dry_run})
    else:
        output.print_line(f"{name} {change.would}removed")


def _turn(where: Target, name: str, verb: Verb, change: Change) -> None:
    async def act(operator: Operator) -> Turned:
        options: dict[str, Any] = {"reason": change.reason}
        found = await schedules.turn(operator, name, verb, dry_run=True, **options)
        if found.changed:
            change.confirm(f"{verb.capitalize()} the schedule {name}?")
        return found if change.dry_run else await schedules.turn(operator, name, verb, **options)

    done = where.run(act)
    if change.as_json:
        output.print_json(done)
    elif done.changed:
        output.print_line(f"{name} {change.would}{verb}d")
    else:
        output.print_line(f"{name} was {'paused' if verb == 'pause' else 'not paused'} already")
    if not done.changed:
        raise typer.Exit(1)


def _as_data(seen: ScheduleSeen) -> dict[str, Any]:
    data = output.as_data(seen)
    if seen.payload is None:
        del data["payload"]
    else:
        data["payload"] = json.loads(seen.payload)
    return {"state": seen.state} | data
