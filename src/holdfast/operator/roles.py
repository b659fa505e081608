"""Roles: what somebody may do with the verbs of an operator."""

from __future__ import annotations

from enum import IntEnum

from holdfast.checks import quoted
from holdfast.errors import ConfigurationError


class Role(IntEnum):
    """What a principal may do. Each role may do what those before it may.

    A viewer reads, without the values of payloads. An operator replays, discards, edits and pauses. An admin also does
    what cannot be undone, or what concerns the whole installation.

    >>> Role.VIEWER < Role.OPERATOR < Role.ADMIN
    True
    """

    VIEWER = 1
    OPERATOR = 2
    ADMIN = 3

    def __str__(self) -> str:
        return self.name.lower()

    @classmethod
    def named(cls, name: str, field: str = "role") -> Role:
        """The role with a name, as it stands in a file or in a header."""
        for role in cls:
            if str(role) == name:
                return role
        known = ", ".join(map(str, cls))
        raise ConfigurationError(field, f"{quoted(name)} is not a role", f"use one of {known}")
