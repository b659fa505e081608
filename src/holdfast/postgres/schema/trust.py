"""Whom a migration trusts: what others have left in the schema would run with the rights of the login that migrates."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import asyncpg

from holdfast.errors import ConfigurationError
from holdfast.postgres.queries import Queries
from holdfast.postgres.schema.ddl import refusal


class Trust:
    """The roles that a run trusts beside its own login, holdfast_owner and superusers."""

    def __init__(self, queries: Queries, roles: Collection[str] = ()) -> None:
        for role in roles:
            if not role or not role.isprintable() or any(char in "\"'\\$" for char in role):
                raise ConfigurationError(
                    "trusted_roles", f"has {role!r}", "name roles of the server, without quotation marks"
                )
        self._queries = queries
        self._roles = "{" + ",".join(f'"{role}"' for role in roles) + "}"

    def printed(self) -> str:
        """Return the statement that tells the scripts, for a transaction that others run."""
        return self._queries.asyncpg("trust_roles").filled_in({"trusted": self._roles}) + ";"

    async def tell(self, connection: Any) -> None:
        """Tell the scripts of the open transaction."""
        statement = self._queries.asyncpg("trust_roles")
        await connection.execute(statement.sql, *statement.bind({"trusted": self._roles}))

    async def require(self, connection: Any) -> None:
        """Refuse, in the open transaction, a schema that somebody else has or could have put something into."""
        await self.tell(connection)
        try:
            await connection.execute(self._queries.script("trusted.sql"))
        except asyncpg.PostgresError as error:
            raise refusal(f"looking at the schema {self._queries.schema}", error) from error
