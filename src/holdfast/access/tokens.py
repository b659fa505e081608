"""The token file: one line for each tool or person, `name:role:hash`, made by `holdfast console token`."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from pathlib import Path
from typing import Final

from holdfast.access.files import Entries
from holdfast.access.principal import Principal, Role
from holdfast.access.provider import Asking
from holdfast.checks import line

_HASH: Final = re.compile(r"sha256\$[0-9a-f]{64}")
_PREFIX: Final = "hft_"
LONGEST: Final = 200


class Tokens:
    """Bearers of tokens. A token has 256 random bits: a plain hash of it cannot be guessed, and is quick to check."""

    def __init__(self, path: str | Path) -> None:
        self._entries = Entries(Path(path), "token file", lambda stored: _HASH.fullmatch(stored) is not None)

    def verify(self, token: str) -> Principal | None:
        """Return whose token it is. Every line is compared, so that the time says nothing of which one matched."""
        given, found = hashed(token[:LONGEST]), None
        for entry in self._entries.all():
            if hmac.compare_digest(given, entry.secret):
                found = Principal(entry.name, entry.role)
        return found

    async def principal(self, asking: Asking) -> Principal | None:
        """Return whose token a request has."""
        token = asking.bearer()
        return None if token is None else self.verify(token)

    def current(self, name: str, proof: str) -> Principal | None:
        """Return the principal of a name, if its line has not changed since the session was begun."""
        entry = self._entries.find(name)
        return Principal(entry.name, entry.role) if entry and hmac.compare_digest(entry.proof, proof) else None

    def proof(self, name: str) -> str:
        """Return what a session of a name is bound to."""
        entry = self._entries.find(name)
        return entry.proof if entry else ""


def new_token() -> str:
    """Return a new token."""
    return _PREFIX + secrets.token_urlsafe(32)


def token_line(name: str, role: Role, token: str) -> str:
    """Return the line of a token."""
    line("name", name)
    return f"{name}:{role}:{hashed(token)}"


def hashed(token: str) -> str:
    """Return a token as the file has it."""
    return f"sha256${hashlib.sha256(token.encode(errors='replace')).hexdigest()}"
