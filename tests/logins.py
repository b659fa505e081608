"""Users that are members of the roles, as applications and people are."""

from __future__ import annotations

from urllib.parse import urlsplit

from tests.servers import SessionServer

OWNER, PRODUCER, WORKER, OPERATOR = ROLES = (
    "holdfast_owner",
    "holdfast_producer",
    "holdfast_worker",
    "holdfast_operator",
)
RUNTIME = (PRODUCER, WORKER, OPERATOR)


class Logins:
    """Users that are members of the roles, as applications and people are."""

    password = "matrix"

    def __init__(self, server: SessionServer, dsn: str) -> None:
        self._server = server
        self._dsn = dsn
        self.names = {role: role.replace("holdfast", "login") for role in RUNTIME} | {"stranger": "login_stranger"}
        self.names["bank"] = "login_bank"  # another producer

    def dsn_of(self, name: str) -> str:
        parts = urlsplit(self._dsn)
        return self._dsn.replace(parts.netloc, f"{name}:{self.password}@{parts.hostname}:{parts.port}")

    def create(self) -> None:
        admin = self._server.admin()
        for role, name in self.names.items():
            admin.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{self.password}'")
            if role in RUNTIME:
                admin.execute(f"GRANT {role} TO {name}")
        admin.execute(f"GRANT {PRODUCER} TO {self.names['bank']}")

    def drop(self) -> None:
        for name in self.names.values():
            self._server.admin().execute(f"DROP ROLE {name}")
