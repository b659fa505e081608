"""holdfast import: publish what waits in another library, and take it from there."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import typer

from holdfast.cli import environment, output
from holdfast.cli.options import Change, Target, spread
from holdfast.errors import ConfigurationError
from holdfast.importing import Columns, Imported, import_from

_MOST_NAMES = 10


class Library(StrEnum):
    """Where events come from."""

    PGQUEUER = "pgqueuer"
    PROCRASTINATE = "procrastinate"
    FASTSTREAM_OUTBOX = "faststream-outbox"
    CELERY = "celery"
    TABLE = "table"


@spread
def import_(
    library: Annotated[Library, typer.Argument(help="Where they wait; `table` is an outbox of your own.")],
    target: Target,
    change: Change,
    source: Annotated[str, typer.Option(metavar="NAME", help="The source of the events.")] = "import",
    table: Annotated[
        str | None, typer.Option(metavar="SCHEMA.TABLE", help="The table, if it does not have its usual name.")
    ] = None,
    id_column: Annotated[str | None, typer.Option(metavar="NAME", help="Of a table of your own. Default: id.")] = None,
    type_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of a table of your own. Default: event_type.")
    ] = None,
    payload_column: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of a table of your own. Default: payload.")
    ] = None,
    done_column: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The time that is NULL, or boolean that is false, while a row waits. Default: published_at.",
        ),
    ] = None,
    broker: Annotated[str | None, typer.Option(metavar="URL", help="The Redis of Celery.")] = None,
    queue: Annotated[str, typer.Option(metavar="NAME", help="The queue of Celery.")] = "celery",
    rename: Annotated[
        list[str] | None, typer.Option(metavar="OLD=NEW", help="The event type of a name; may be repeated.")
    ] = None,
    trusted_role: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE", help="A role beside this login that may own the table and its triggers; may be repeated."
        ),
    ] = None,
) -> None:
    """Publish what waits in another library, and take it from there. What its workers hold is left to them."""
    columns = Columns(id_column, type_column, payload_column, done_column)
    renamed = _renamed(rename or [])

    def run(on_progress: Callable[[int], None], *, dry_run: bool) -> Imported:
        return asyncio.run(
            import_from(
                target.address,
                environment.schema(target.schema),
                library.value,
                source=source,
                actor=target.who,
                reason=change.reason,
                table=table,
                columns=columns,
                broker=broker,
                queue=queue,
                renamed=renamed,
                trusted_roles=trusted_role or [],
                dry_run=dry_run,
                on_progress=on_progress,
            )
        )

    waiting = "what waits"
    if change.asks or (renamed and not change.dry_run):
        counted = run(lambda _total: None, dry_run=True)
        _require_met(renamed, counted)
        waiting = output.counted(counted.total, "event")
    change.confirm(f"Publish {waiting} of {table or library.value}, and take them from there?")
    published = 0
    with output.progress_bar(quiet=change.as_json) as progress:
        task = progress.add_task("importing", total=None)

        def on_progress(total: int) -> None:
            nonlocal published
            published = total
            progress.start()
            progress.update(task, completed=total)

        try:
            found = run(on_progress, dry_run=change.dry_run)
        except KeyboardInterrupt:
            done = 0 if change.dry_run else published
            print(f"stopped: {output.counted(done, 'event')} published; the next import goes on", file=sys.stderr)
            raise
    if change.dry_run:
        _require_met(renamed, found)
    if change.as_json:
        output.print_json({"events": found.events, "total": found.total, "busy": found.busy})
        return
    verb = "would be published" if change.dry_run else "published"
    if found.events:
        output.print_table(("event type", verb), list(found.events.items()))
    output.print_line(f"{output.counted(found.total, 'event')} {verb}")
    if found.busy:
        output.print_line(
            f"{output.counted(found.busy, 'row')} held by its workers, or by some that died: start one until they are "
            "done or free, stop it, and import again"
        )


def _renamed(given: list[str]) -> dict[str, str]:
    pairs = [each.partition("=") for each in given]
    if wrong := next((each for each, pair in zip(given, pairs, strict=True) if not pair[0] or not pair[2]), None):
        raise ConfigurationError("--rename", f"is {wrong!r}", "write OLD=NEW, like send_mail=mail.requested")
    return {old: new for old, _, new in pairs}


def _require_met(renamed: dict[str, str], found: Imported) -> None:
    """Refuse a name that nothing has, while something waits under a name of its own: that one may be meant."""
    kept = sorted(set(found.events) - {renamed[old] for old in found.renamed})
    if kept and (unmet := sorted(set(renamed) - found.renamed)):
        remedy = f"leave it out, or write a name that waits: {', '.join(kept[:_MOST_NAMES])}"
        raise ConfigurationError(
            "--rename", f"{unmet[0]}={renamed[unmet[0]]}: nothing that waits has this name", remedy
        )
