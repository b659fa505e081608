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

from collections.abc import Callable, Collection, MutableMapping
from typing import Any

from holdfast.installing import require_extra

require_extra("alembic", "alembic", "sqlalchemy")

from alembic import op

from holdfast.checks import function, whole
from holdfast.errors import ConfigurationError
from holdfast.integrations._waiting import wait_for
from holdfast.names import schema_name
from holdfast.postgres import migrate
from holdfast.postgres.schema.ownership import RolesMode

# The type of Alembic's `include_name`: a function of a name, its kind, and the names above it.
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


def migrate_holdfast(
    *,
    schema: str = "core",
    roles: RolesMode = "auto",
    since: int = 0,
    to: int | None = None,
    dsn: str | None = None,
    trusted_roles: Collection[str] = (),
) -> None:
    """Bring Holdfast's schema to the installed release, as `holdfast migrate apply` does, in a revision's upgrade.

    It has a connection and transactions of its own, to the address of Alembic's engine or to `dsn`: indexes are built
    without keeping producers waiting, and a schema that is up to date is left as it is. With `alembic upgrade --sql` it
    prints the script of the migrations after number `since`, up to number `to`.
    """
    schema_name(schema)
    last = migrate.installed_version()
    remedy = f"this release has the migrations up to {last}: install the one that the revision was written for"
    if to is not None:
        whole("to", to, 1, last, remedy=remedy)
    whole("since", since, 0, last if to is None else to, remedy=None if to else remedy)
    context = op.get_context()
    if context.as_sql:
        script = migrate.printable(schema, roles=roles != "never", since=since, to=to, trusted_roles=trusted_roles)
        context.impl.static_output(script)
        return
    # In a thread: an env.py for an asynchronous engine has an event loop in this one.
    address = _address() if dsn is None else dsn
    wait_for(migrate.apply(address, schema=schema, roles=roles, trusted_roles=trusted_roles))


def _address() -> str:
    """Return the address of Alembic's engine."""
    url = op.get_bind().engine.url
    if url.get_backend_name() != "postgresql":
        raise ConfigurationError("sqlalchemy.url", f"is of {url.get_backend_name()}", "Holdfast is for Postgres")
    return url.render_as_string(hide_password=False)
