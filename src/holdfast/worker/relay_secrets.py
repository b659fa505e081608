"""Keeps the secrets with which the relay signs, and takers check, up to date with the database and the settings."""

import time
from collections.abc import Sequence
from typing import Final

from holdfast.brokers.signing import Signatures
from holdfast.postgres.brokers import BrokerStatements
from holdfast.worker.shared_connection import SharedConnection

# Seconds. A new secret of the database is accepted for a minute before relays sign with it.
_EVERY: Final = 10.0
# Seconds, for messages with an unknown secret: forged ones must not make a worker ask the database for each.
_AT_MOST_EVERY: Final = 5.0


class RelaySecrets:
    """The secrets of one worker. It signs with the first of its settings, or else with that of its database."""

    def __init__(self, statements: BrokerStatements, database: SharedConnection, named: Sequence[str]) -> None:
        self._statements = statements
        self._database = database
        self._named = tuple(each.encode() for each in named)
        self._asked_at = float("-inf")
        self.signatures = Signatures()

    async def require(self) -> None:
        """Ask the database for the secrets, unless they are known."""
        if not self.signatures.ready:
            await self._ask()

    async def renew(self, *, unknown: bool = False) -> bool:
        """Ask the database again if some seconds have passed, fewer if a secret is `unknown`; return whether it did."""
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
