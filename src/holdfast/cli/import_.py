"""holdfast import: publish what waits in another library, and take it from there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import typer

from holdfast.cli import environment, output
from holdfast.cli.options import Change, JsonOption, Where, spread
from holdfast.errors import ConfigurationError
from holdfast.importing import Columns, Imported, import_from


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
    where: Where,
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
        typer.Option(metavar="NAME", help="The time that is NULL while a row waits. Default: published_at."),
    ] = None,
    broker: Annotated[str | None, typer.Option(metavar="URL", help="The Redis of Celery.")] = None,
    queue: Annotated[str, typer.Option(metavar="NAME", help="The queue of Celery.")] = "celery",
    rename: Annotated[
        list[str] | None, typer.Option(metavar="OLD=NEW", help="The event type of a name; may be repeated.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would happen, and change nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Publish what waits in another library, and take it from there. What its workers hold is left to them."""
    columns = Columns(id_column, type_column, payload_column, done_column)
    change = Change(None, yes, dry_run, as_json)
    change.confirm(f"Publish what waits in {table or library.value}, and take it from there?")

    def run(on_progress: Callable[[int], None]) -> Imported:
        return asyncio.run(
            import_from(
                where.address,
                environment.schema(where.schema),
                library.value,
                source=source,
                table=table,
                columns=columns,
                broker=broker,
                queue=queue,
                renamed=_renamed(rename or []),
                dry_run=change.dry_run,
                on_progress=on_progress,
            )
        )

    with output.progress_bar(quiet=change.as_json) as progress:
        task = progress.add_task("importing", total=None)

        def on_progress(total: int) -> None:
            progress.start()
            progress.update(task, completed=total)

        found = run(on_progress)
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
