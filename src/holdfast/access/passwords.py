"""The password file: one line for each person, `name:role:hash`, made by `holdfast console password`."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from pathlib import Path
from typing import Final

from holdfast.access.files import Entries
from holdfast.access.principal import Principal, Role
from holdfast.checks import line

# What OWASP recommends for scrypt: 128 MB would stop small machines, 32 MB does not.
_COST: Final = (2**15, 8, 1)
_MOST_COST: Final = (2**17, 16, 4)
_MEMORY: Final = 256 * 2**20
LONGEST: Final = 1_024


class Passwords:
    """People with passwords. The file is read again when it has changed, so that a removed line ends its sessions."""

    def __init__(self, path: str | Path) -> None:
        self._entries = Entries(Path(path), "password file", hash_is_valid)

    def verify(self, name: str, password: str) -> Principal | None:
        """Return who it is; an unknown name takes as long as a wrong password."""
        entry = self._entries.find(name)
        stored = entry.secret if entry else _DECOY
        matches = _matches(password[:LONGEST], stored)
        return Principal(entry.name, entry.role) if entry and matches else None

    def current(self, name: str, proof: str) -> Principal | None:
        """Return the principal of a name, if its line has not changed since the session was begun."""
        entry = self._entries.find(name)
        return Principal(entry.name, entry.role) if entry and hmac.compare_digest(entry.proof, proof) else None

    def proof(self, name: str) -> str:
        """Return what a session of a name is bound to."""
        entry = self._entries.find(name)
        return entry.proof if entry else ""


def password_line(name: str, role: Role, password: str) -> str:
    """Return the line of a person."""
    line("name", name)
    return f"{name}:{role}:{hashed(password)}"


def hashed(password: str) -> str:
    """Return a password as the file has it."""
    salt = secrets.token_bytes(16)
    n, r, p = _COST
    return f"scrypt${n}${r}${p}${_text(salt)}${_text(_derive(password, salt, n, r, p))}"


def hash_is_valid(stored: str) -> bool:
    """Return whether it is a hash that can be checked at a bearable cost."""
    try:
        _parts(stored)
    except ValueError:
        return False
    return True


def _parts(stored: str) -> tuple[int, int, int, bytes, bytes]:
    kind, *costs, salt, key = stored.split("$")
    n, r, p = (int(cost) for cost in costs)
    if (
        kind != "scrypt"
        or n < 2
        or n & (n - 1)
        or not all(1 <= each <= most for each, most in zip((n, r, p), _MOST_COST, strict=True))
    ):
        raise ValueError("not a hash of scrypt")
    return n, r, p, base64.b64decode(salt, validate=True), base64.b64decode(key, validate=True)


def _matches(password: str, stored: str) -> bool:
    n, r, p, salt, key = _parts(stored)
    return hmac.compare_digest(_derive(password, salt, n, r, p), key)


def _derive(password: str, salt: bytes, n: int, r: int, p: int) -> bytes:
    return hashlib.scrypt(password.encode(errors="replace"), salt=salt, n=n, r=r, p=p, maxmem=_MEMORY, dklen=32)


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


_DECOY: Final = f"scrypt${_COST[0]}${_COST[1]}${_COST[2]}${_text(bytes(16))}${_text(bytes(32))}"
