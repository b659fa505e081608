"""Publishes what waits in another library's table, batch by batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace

import asyncpg

from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.importing.sources import SOURCES, Source
from holdfast.postgres.imports import PeerTable
from holdfast.postgres.publisher import Publisher

BATCH = 500


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import did: events by type, and rows that the other library's workers still hold."""

    events: dict[str, int] = field(default_factory=dict)
    busy: int = 0

    @property
    def total(self) -> int:
        """How many events were published."""
        return sum(self.events.values())


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a table of one's own, where they have not their usual names."""

    id: str | None = None
    type: str | None = None
    payload: str | None = None
    done: str | None = None


async def import_pending(
    connection: asyncpg.Connection,
    publisher: Publisher,
    source: str,
    *,
    table: str | None = None,
    columns: Columns | None = None,
    renamed: Mapping[str, str] | None = None,
    dry_run: bool = False,
    on_progress: Callable[[int], None] = lambda _total: None,
) -> Imported:
    """Publish every row that waits and take it from its table, in the same transaction; 500 rows in each.

    A row that cannot be an event ends the import with an error that names it; the batches before it are committed, and
    the next import goes on from there. With `dry_run` nothing is changed.
    """
    found = SOURCES.get(source)
    if found is None:
        raise ConfigurationError("source", f"is {source!r}", f"choose one of {', '.join(SOURCES)}")
    chosen = {name: column for name, column in asdict(columns or Columns()).items() if column is not None}
    if chosen and not found.columns:
        remedy = f"leave it out: the columns of {source} are known"
        raise ConfigurationError(f"--{min(chosen)}-column", "is for a table of your own", remedy)
    found = found if table is None else replace(found, table=table)
    named = {**found.columns, **chosen}
    given = {name: named[name] for name in ("id", "done") if name in named}
    peer = await PeerTable.find(connection, found.kind, found.table, **given)
    counted: Counter[str] = Counter()
    transaction = connection.transaction() if dry_run else None
    if transaction is not None:
        await transaction.start()
    try:
        while taken := await _batch(connection, publisher, found, peer, named, renamed or {}):
            counted += taken
            on_progress(counted.total())
    finally:
        if transaction is not None:
            await transaction.rollback()
    return Imported(dict(sorted(counted.items())), await peer.busy(connection))


async def _batch(
    connection: asyncpg.Connection,
    publisher: Publisher,
    source: Source,
    peer: PeerTable,
    columns: Mapping[str, str],
    renamed: Mapping[str, str],
) -> Counter[str]:
    async with connection.transaction():
        events = []
        for row in await peer.take(connection, BATCH):
            try:
                event = source.event(row, columns, renamed)
                publisher.row_of(event)  # what cannot be published is told here, where the row is known
                events.append(event)
            except (HoldfastError, KeyError, ValueError) as error:
                what = f"has no column {error}" if isinstance(error, KeyError) else f"cannot be an event: {error}"
                remedy = "rename its type with --rename OLD=NEW, or put the row aside"
                raise ConfigurationError(f"row {row.get(columns.get('id', 'id'))}", what, remedy) from error
        if events:
            await publisher.publish_many(connection, events)
        return Counter(event.event_type for event in events)
