"""Imports work that waits in another library, as events: `holdfast import`.

Rows of a table are taken in the transaction that publishes them, so that none is lost or published twice, even if the
import is interrupted. Rows that the other library's workers hold are left to them.
"""

from collections.abc import Callable, Collection, Mapping

from holdfast.errors import ConfigurationError
from holdfast.importing.celery import import_celery
from holdfast.importing.pending import Columns, Imported, import_pending
from holdfast.postgres import migrate
from holdfast.postgres.connection import Address, connect
from holdfast.postgres.publisher import Publisher

__all__ = ["Columns", "Imported", "import_celery", "import_from", "import_pending"]

_STATEMENT_TIMEOUT = 60.0


async def import_from(
    dsn: str,
    schema: str,
    library: str,
    *,
    source: str,
    actor: str,
    reason: str | None = None,
    table: str | None = None,
    columns: Columns | None = None,
    broker: str | None = None,
    queue: str = "celery",
    renamed: Mapping[str, str] | None = None,
    trusted_roles: Collection[str] = (),
    dry_run: bool = False,
    on_progress: Callable[[int], None] = lambda _total: None,
) -> Imported:
    """Connect, and import the work that waits in another library as events of `source`; the audit names `actor`."""
    if (library == "celery") != (broker is not None):
        remedy = "write --broker redis://host:6379/0" if broker is None else "leave it out"
        raise ConfigurationError("--broker", "is what celery needs, and nothing else", remedy)
    publisher = Publisher(source, schema=schema)
    address = Address(dsn)
    await address.probe()
    connection = await connect(address, "import", statement_timeout=_STATEMENT_TIMEOUT)
    try:
        await migrate.require_compatible(connection, schema, role="producer")
        if broker is not None:
            return await import_celery(
                connection,
                publisher,
                broker,
                actor=actor,
                reason=reason,
                queue=queue,
                renamed=renamed,
                dry_run=dry_run,
                on_progress=on_progress,
            )
        return await import_pending(
            connection,
            publisher,
            library,
            actor=actor,
            reason=reason,
            table=table,
            columns=columns,
            renamed=renamed,
            trusted_roles=trusted_roles,
            dry_run=dry_run,
            on_progress=on_progress,
        )
    finally:
        await connection.close(timeout=5)
