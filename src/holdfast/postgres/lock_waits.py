"""Which sessions wait for a lock, and which session stands at the root of the chain in front of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# The sessions of workers in which events are claimed and settled, by the names that they have.
DELIVERING: Final = r"^holdfast (claim|settle|leases|schedule|maintenance)\M"


@dataclass(frozen=True, slots=True)
class LockWait:
    """A session that waits, and the one that it waits for in the end: a row of `list_lock_waits`."""

    pid: int
    application: str
    waited: float  # seconds
    blocker_pid: int  # 0: a prepared transaction
    blocker_login: str
    blocker_application: str
    blocker_state: str  # ?: of a login whose sessions this one may not see
    blocker_seconds: float | None  # since its transaction began

    @property
    def blocker(self) -> str:
        """The session in front, in words."""
        if not self.blocker_pid:
            return "a prepared transaction (pg_prepared_xacts)"
        since = "" if self.blocker_seconds is None else f", {self.blocker_state} for {self.blocker_seconds:.0f} s"
        return f"pid {self.blocker_pid}, login {self.blocker_login}, application {self.blocker_application}{since}"

    @property
    def remedy(self) -> str:
        """The statement that ends the session in front, for an administrator."""
        if not self.blocker_pid:
            return "SELECT gid, prepared FROM pg_prepared_xacts; -- then ROLLBACK PREPARED"
        return f"SELECT pg_terminate_backend({self.blocker_pid});"
