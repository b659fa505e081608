"""Publishes the rows that wait in another library's table, batch by batch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter
from typing import Any

import asyncpg

from holdfast.errors import ConfigurationError, HoldfastError, PublishError
from holdfast.importing.libraries import LIBRARIES, PeerLibrary
from holdfast.importing.refusals import refusal
from holdfast.importing.renaming import Renaming
from holdfast.new_event import NewEvent
from holdfast.postgres.imports import ImportAudit, PeerTable
from holdfast.postgres.publisher import Publisher

BATCH = 500


@dataclass(frozen=True, slots=True)
class Imported:
    """The result of an import: events by type, rows that other workers still hold, and the names that were renamed."""

    events: dict[str, int] = field(default_factory=dict)
    busy: int = 0
    renamed: frozenset[str] = frozenset()

    @property
    def total(self) -> int:
        """How many events were published."""
        return sum(self.events.values())


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a user's own table; None stands for the usual name."""

    id: str | None = None
    type: str | None = None
    payload: str | None = None
    done: str | None = None


async def import_pending(
    connection: asyncpg.Connection,
    publisher: Publisher,
    library: str,
    *,
    actor: str,
    reason: str | None = None,
    table: str | None = None,
    columns: Columns | None = None,
    renamed: Mapping[str, str] | None = None,
    trusted_roles: Collection[str] = (),
    dry_run: bool = False,
    on_progress: Callable[[int], None] = lambda _total: None,
) -> Imported:
    """Publish the rows that wait, and take them from their table, in transactions of 500 rows.

    A row that cannot be an event ends the import with an error that names it; the batches before it are committed, and
    the next import goes on from there. The audit has a line for each batch, with the name of the `actor`. With
    `dry_run` nothing is changed. The table, and the functions of its triggers, must belong to this login, to a
    superuser or to one of `trusted_roles`, and may belong to a role of which a login that is no superuser is a member.
    """
    found = LIBRARIES.get(library)
    if found is None:
        raise ConfigurationError("library", f"is {library!r}", f"choose one of {', '.join(LIBRARIES)}")
    chosen = {name: column for name, column in asdict(columns or Columns()).items() if column is not None}
    if chosen and not found.columns:
        remedy = f"leave it out: the columns of {library} are known"
        raise ConfigurationError(f"--{min(chosen)}-column", "is for a table of your own", remedy)
    found = found if table is None else replace(found, table=table)
    named = {**found.columns, **chosen}
    peer = await PeerTable.find(connection, found.kind, found.table, named, trusted_roles)
    audit = ImportAudit(publisher.schema, actor, reason, library, found.table, publisher.source)
    counted: Counter[str] = Counter()
    renaming = Renaming(renamed or {})
    transaction = connection.transaction() if dry_run else None
    if transaction is not None:
        await transaction.start()
    try:
        while taken := await _batch(connection, publisher, found, peer, named, renaming, audit):
            counted += taken
            on_progress(counted.total())
    finally:
        if transaction is not None:
            await transaction.rollback()
    return Imported(dict(sorted(counted.items())), await peer.busy(connection), renaming.met)


async def _batch(
    connection: asyncpg.Connection,
    publisher: Publisher,
    library: PeerLibrary,
    peer: PeerTable,
    columns: Mapping[str, str],
    renaming: Renaming,
    audit: ImportAudit,
) -> Counter[str]:
    async with connection.transaction():
        taken = [
            _event(publisher, library, peer, name, text, columns, renaming)
            for name, text in await peer.take(connection, BATCH)
        ]
        events = [event for _, event in sorted(taken, key=itemgetter(0))]
        if events:
            await publisher.publish_many(connection, events)
            await audit.note(connection, len(events))
        return Counter(event.event_type for event in events)


def _event(
    publisher: Publisher,
    library: PeerLibrary,
    peer: PeerTable,
    name: str,
    text: str,
    columns: Mapping[str, str],
    renaming: Renaming,
) -> tuple[Any, NewEvent]:
    """Return the id of a row and its event; refuse a row that cannot be published, with an error that names it."""
    try:
        row = json.loads(text)
        event = library.event(row, columns, renaming)
        publisher.row_of(event)
    except KeyError as error:
        problem = f"{peer.name} is not such a table: it has no column {error}"
        raise ConfigurationError("--table", problem, "name the table of that library") from error
    except (HoldfastError, ValueError, RecursionError) as error:
        renamed = isinstance(error, PublishError) and error.field == "event_type"
        remedy = f"{'rename its type with --rename OLD=NEW, or ' if renamed else ''}{peer.aside(name)}"
        raise refusal(f"row {name}", error, remedy) from error
    return row[columns.get("id", "id")], event
