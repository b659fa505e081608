"""holdfast schedules: events that are published at fixed times."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from holdfast.cli import output
from holdfast.cli.command_group import command_group
from holdfast.cli.options import Change, JsonOption, PayloadOption, Target, Where, spread
from holdfast.operator import MOST_SCHEDULES, Operator, ScheduleChange
from holdfast.operator.encoding import plain

app = command_group("Schedules: events that are published at fixed times.")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The schedule's name.")]


@app.command("list")
@spread
def list_(where: Where, as_json: JsonOption = False) -> None:
    """List schedules with their next and last slots, and whether a worker fires them."""
    found = where.run(lambda operator: operator.schedules.all())
    if as_json:
        output.print_json(found)
        output.print_left_out(found, MOST_SCHEDULES, as_json=True)
        return
    output.print_table(
        ("schedule", "when", "event type", "state", "next slot", "last slot", "fired", "generation"),
        [(s.name, s.when, s.event_type, s.state, s.next_slot, s.last_slot, s.fired, s.generation) for s in found],
    )
    output.print_left_out(found, MOST_SCHEDULES)


@app.command("show")
@spread
def show(where: Where, name: NameArgument, payload: PayloadOption = False, as_json: JsonOption = False) -> None:
    """Show a schedule and its next slots."""
    found = where.run(lambda operator: operator.schedules.detail(name, payload=payload))
    seen = found.schedule
    if as_json:
        output.print_json(plain(seen) | {"upcoming": found.upcoming})
        return
    output.print_line(seen.name, "bold")
    slots = [("" if number else "next slots", slot) for number, slot in enumerate(found.upcoming)]
    output.print_facts(
        [
            ("state", f"paused by {seen.paused_by}" if seen.state == "paused" else seen.state),
            ("when", seen.when),
            ("missed slots", seen.missed),
            ("event type", seen.event_type),
            ("source", seen.source),
            ("target", seen.target),
            *slots,
            ("last slot", seen.last_slot),
            ("last fired", seen.last_fired_at),
            ("fired", seen.fired),
            ("declared", f"{seen.declared_at:%Y-%m-%d %H:%M:%S} by generation {seen.generation}"),
            ("last served", seen.served_at),
            ("payload", seen.payload),
        ]
    )


@app.command("trigger")
@spread
def trigger(where: Target, name: NameArgument, change: Change) -> None:
    """Publish the event of a schedule now. Its slots do not change."""

    async def act(operator: Operator) -> str:
        seen = (await operator.schedules.detail(name)).schedule
        change.confirm(f"Publish {seen.event_type} for {name} now?")
        return str(await operator.schedules.trigger(name, reason=change.reason, dry_run=change.dry_run))

    identity = where.run(act)
    if change.as_json:
        event = None if change.dry_run else identity
        output.print_json({"schedule": name, "event_id": event, "dry_run": change.dry_run})
    else:
        output.print_line(f"{name} {change.would}triggered" + ("" if change.dry_run else f": event {identity}"))


@app.command("pause")
@spread
def pause(where: Target, name: NameArgument, change: Change) -> None:
    """Pause a schedule until it is resumed. Slots that come meanwhile are never fired."""
    _change_state(where, name, "pause", change)


@app.command("resume")
@spread
def resume(where: Target, name: NameArgument, change: Change) -> None:
    """Resume a paused schedule, from its next slot on."""
    _change_state(where, name, "resume", change)


@app.command("remove")
@spread
def remove(where: Target, name: NameArgument, change: Change) -> None:
    """Remove a schedule that no living worker declares."""

    async def act(operator: Operator) -> None:
        options: dict[str, Any] = {"reason": change.reason}
        await operator.schedules.remove(name, dry_run=True, **options)
        change.confirm(f"Remove the schedule {name}?")
        if not change.dry_run:
            await operator.schedules.remove(name, **options)

    where.run(act)
    if change.as_json:
        output.print_json({"schedule": name, "removed": not change.dry_run, "dry_run": change.dry_run})
    else:
        output.print_line(f"{name} {change.would}removed")


def _change_state(where: Target, name: str, verb: Literal["pause", "resume"], change: Change) -> None:
    async def act(operator: Operator) -> ScheduleChange:
        act_on = operator.schedules.pause if verb == "pause" else operator.schedules.resume
        found = await act_on(name, reason=change.reason, dry_run=True)
        if found.changed:
            change.confirm(f"{verb.capitalize()} the schedule {name}?")
        return found if change.dry_run else await act_on(name, reason=change.reason)

    done = where.run(act)
    if change.as_json:
        output.print_json(done)
    elif done.changed:
        output.print_line(f"{name} {change.would}{verb}d")
    else:
        output.print_line(f"{name} was {'paused' if verb == 'pause' else 'not paused'} already")
    if not done.changed:
        raise typer.Exit(1)
