"""Files with one line for each principal: `name:role:secret`. Empty lines and lines that begin with # are skipped."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.access.principal import Role
from holdfast.checks import line
from holdfast.errors import ConfigurationError

_LARGEST = 1_000_000
ROLES: Final = {str(role): role for role in Role}


@dataclass(frozen=True, slots=True)
class Entry:
    """One line."""

    name: str
    role: Role
    secret: str

    @property
    def proof(self) -> str:
        """What a session is bound to: with a new secret the sessions of the old one end."""
        return hashlib.sha256(f"{self.name}:{self.secret}".encode()).hexdigest()[:32]


class Entries:
    """The lines of a file, read again when it has changed. A file that has become wrong lets nobody in."""

    def __init__(self, path: Path, kind: str, is_valid: Callable[[str], bool]) -> None:
        self._path = path
        self._kind = kind
        self._is_valid = is_valid
        self._seen: tuple[int, ...] | None = None
        self._entries: dict[str, Entry] = {}
        self._current()

    def all(self) -> list[Entry]:
        """Return the lines."""
        return list(self._usable().values())

    def find(self, name: str) -> Entry | None:
        """Return the line of a name."""
        return self._usable().get(name)

    def _usable(self) -> dict[str, Entry]:
        try:
            return self._current()
        except ConfigurationError:
            return {}

    def _current(self) -> dict[str, Entry]:
        try:
            found = os.stat(self._path)
            version = (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_mode)
            if version != self._seen:
                if found.st_mode & 0o022:
                    raise self._wrong("can be written by others", f"chmod 600 {self._path}")
                if found.st_mode & 0o077 and found.st_uid == os.getuid():
                    raise self._wrong("can be read by others", f"chmod 600 {self._path}")
                self._entries = self._parsed(self._path.read_text(encoding="utf-8"))
                self._seen = version
        except (OSError, UnicodeDecodeError) as error:
            self._seen, self._entries = None, {}
            raise self._wrong(f"cannot be read: {type(error).__name__}", f"check {self._path}") from None
        return self._entries

    def _parsed(self, text: str) -> dict[str, Entry]:
        if len(text) > _LARGEST:
            raise self._wrong("is larger than a megabyte", "keep one line for each person")
        found: dict[str, Entry] = {}
        for number, written in enumerate(text.splitlines(), start=1):
            if not written.strip() or written.startswith("#"):
                continue
            name, _, rest = written.strip().partition(":")
            role, _, secret = rest.partition(":")
            if role not in ROLES or not self._is_valid(secret):
                problem = f"has a line {number} that is not name:role:hash"
                raise self._wrong(problem, "make the line with: holdfast console password, or token")
            if name in found:
                raise self._wrong(f"names {line('name', name)} twice, in line {number} as well", "keep one of them")
            found[line("name", name)] = Entry(name, ROLES[role], secret)
        if not found:
            raise self._wrong("has no line", "make one with: holdfast console password, or token")
        return found

    def _wrong(self, problem: str, remedy: str) -> ConfigurationError:
        self._seen, self._entries = None, {}
        return ConfigurationError(self._kind, problem, remedy)
