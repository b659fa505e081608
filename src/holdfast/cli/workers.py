"""holdfast workers: the running workers, what they serve, and releasing what one holds."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from holdfast.cli import output
from holdfast.cli.command_group import command_group
from holdfast.cli.options import Change, JsonOption, Target, Where, spread
from holdfast.operator import Operator, ReleasedWorker, WorkerStatus

_SHOWN = 2  # handlers of a worker; `handlers list` has them all

app = command_group("Workers: which run, and what they serve.")


@app.command("list")
@spread
def list_(where: Where, as_json: JsonOption = False) -> None:
    """List the workers that have not stopped in order, the latest heartbeat first."""
    found = where.run(lambda operator: operator.workers.all())
    if as_json:
        output.print_json(found)
        output.print_left_out(found, as_json=True)
        return
    output.print_table(
        ("worker", "process", "version", "generation", "channels", "handlers", "started", "heartbeat", "id"),
        [
            (
                w.name,
                f"{w.host}:{w.pid}",
                w.version,
                w.generation,
                w.channels,
                _some(w.handlers),
                w.started_at,
                heartbeat(w),
                w.id,
            )
            for w in found
        ],
    )
    output.print_left_out(found)


def heartbeat(worker: WorkerStatus) -> str:
    """When a worker was last heard of, and what is wrong with it: one that was killed counts as living for a minute."""
    age = f"{worker.silent_for:.0f} s"
    if not worker.living:
        return f"SILENT for {age}"
    if worker.late:
        return f"GONE, heard of {age} ago" if worker.gone else f"LATE, heard of {age} ago"
    return f"{age} ago" if worker.connected else f"{age} ago, no session"


def _some(handlers: list[str]) -> str:
    more = f" and {len(handlers) - _SHOWN} more" if len(handlers) > _SHOWN else ""
    return f"{', '.join(handlers[:_SHOWN])}{more}"


@app.command("release")
@spread
def release(
    where: Target,
    worker: Annotated[str, typer.Argument(metavar="ID", help="The worker's id; holdfast workers list shows it.")],
    change: Change,
    force: Annotated[bool, typer.Option("--force", help="Release them although the worker lives.")] = False,
) -> None:
    """Release the events of a worker that was killed, and take it off the list. Refused while it lives."""

    async def act(operator: Operator) -> ReleasedWorker:
        options: dict[str, Any] = {"force": force, "reason": change.reason}
        found = await operator.workers.release(worker, dry_run=True, **options)
        change.confirm(f"Release {output.events(found.released)} that worker {worker} holds?")
        return found if change.dry_run else await operator.workers.release(worker, **options)

    done = where.run(act)
    if change.as_json:
        output.print_json(done)
    else:
        left = f"; {done.left} are still locked by a transaction" if done.left else ""
        output.print_line(f"{output.events(done.released)} of worker {done.worker} {change.would}released{left}")
        if done.unlisted:
            output.print_line(f"the worker {'would be' if change.dry_run else 'is'} no longer listed")
    if not done.released and not done.unlisted:
        raise typer.Exit(1)
