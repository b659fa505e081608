"""Holdfast's schema among the migrations of Alembic: a revision applies it, and autogenerate leaves it alone.

    # env.py
    context.configure(connection=connection, target_metadata=metadata, include_schemas=True,
                      include_name=without_holdfast())

    # a revision, one for each release of Holdfast
    def upgrade() -> None:
        migrate_holdfast()

See docs/alembic.md.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, MutableMapping
from typing import Any

from holdfast.installing import require_extra

require_extra("alembic", "alembic", "sqlalchemy")

from alembic import op

from holdfast.checks import function
from holdfast.errors import ConfigurationError
from holdfast.names import schema_name
from holdfast.postgres import migrate
from holdfast.postgres.schema.ownership import RolesMode

# What `include_name` of Alembic is: a function of a name, its kind, and the names above it.
IncludeName = Callable[[str | None, str, MutableMapping[Any, str | None]], bool]


def without_holdfast(include: IncludeName | None = None, *, schema: str = "core") -> IncludeName:
    """Return an `include_name` that leaves Holdfast's schema out of autogenerate, and asks `include` for the rest."""
    schema_name(schema)
    if include is not None:
        function("include", include, "pass your own include_name, or leave it out")

    def include_name(name: str | None, kind: str, parents: MutableMapping[Any, str | None]) -> bool:
        if (name if kind == "schema" else parents.get("schema_name")) == schema:
            return False
        return include is None or include(name, kind, parents)

    return include_name


def migrate_holdfast(*, schema: str = "core", roles: RolesMode = "auto") -> None:
    """Bring Holdfast's schema to the installed release, as `holdfast migrate apply` does, in a revision's upgrade.

    It has a connection and transactions of its own, to the same address: indexes are built without keeping producers
    waiting, and a schema that is up to date is left as it is. With `alembic upgrade --sql` it prints the script.
    """
    schema_name(schema)
    context = op.get_context()
    if context.as_sql:
        context.impl.static_output(migrate.printable(schema, roles=roles != "never"))
        return
    url = op.get_bind().engine.url
    if url.get_backend_name() != "postgresql":
        raise ConfigurationError("sqlalchemy.url", f"is of {url.get_backend_name()}", "Holdfast is for Postgres")
    _apply(url.render_as_string(hide_password=False), schema, roles)


def _apply(dsn: str, schema: str, roles: RolesMode) -> None:
    """Run it in a thread: an env.py for an asynchronous engine has an event loop in this one."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(migrate.apply(dsn, schema=schema, roles=roles))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="holdfast-migrate")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
