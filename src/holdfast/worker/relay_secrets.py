"""Keeps the secrets of relays as the database and the settings have them: for the relay, and for what is taken."""

import time
from collections.abc import Sequence
from typing import Final

from holdfast.brokers.signing import Signatures
from holdfast.postgres.brokers import BrokerStatements
from holdfast.worker.shared_connection import SharedConnection

# A new secret of the database is accepted for a minute before anybody signs with it.
_EVERY: Final = 10.0
# Whoever writes messages with secrets that nobody knows must not have the database asked for each of them.
_AT_MOST_EVERY: Final = 5.0


class RelaySecrets:
    """The secrets of one worker. Those that its settings name are used before those of its database."""

    def __init__(self, statements: BrokerStatements, database: SharedConnection, named: Sequence[str]) -> None:
        self._statements = statements
        self._database = database
        self._named = tuple(each.encode() for each in named)
        self._asked_at = float("-inf")
        self.signatures = Signatures()

    async def require(self) -> None:
        """Ask the database, if that was not done before."""
        if not self.signatures.ready:
            await self._ask()

    async def renew(self, *, unknown: bool = False) -> bool:
        """Ask the database if it is time to, for a secret that is not known sooner; return whether it was asked."""
        if time.monotonic() - self._asked_at < (_AT_MOST_EVERY if unknown else _EVERY):
            return False
        await self._ask()
        return True

    async def _ask(self) -> None:
        async with self._database.lent() as connection:
            found = await self._statements.relay_keys(connection)
        signing = self._named[0] if self._named else found.signing
        self.signatures.use(signing, (*self._named, *found.accepted), found.apart)
        self._asked_at = time.monotonic()
