"""Principals: people, or tools that act for them, with the role that they have."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.checks import line, quoted
from holdfast.errors import ConfigurationError
from holdfast.operator.roles import Role

__all__ = ["Principal", "Role"]


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody who was recognised. The name is the actor of the audit."""

    name: str
    role: Role

    def __post_init__(self) -> None:
        line("name", self.name)
        if not isinstance(self.role, Role):
            raise ConfigurationError("role", f"{quoted(self.role)} is not a role", "use Role.VIEWER, or a higher one")

    def may(self, role: Role) -> bool:
        """Whether the principal has this role, or a higher one."""
        return self.role >= role
