"""Verbs for the wake-up mode: when a commit that published events notifies the workers."""

from __future__ import annotations

from holdfast.operator import arguments
from holdfast.operator.session import Session
from holdfast.postgres.wakeup import mode
from holdfast.postgres.wakeup.mode import Mode


class WakeUp:
    """The wake-up mode, as `operator.wakeup`. A change is DDL, on a connection of its own."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def mode(self) -> str:
        """`when_idle`, `always`, `never`, or `missing` when the trigger is not there."""
        return await mode.mode(self._session.dsn, self._session.schema)

    async def set_mode(self, wanted: Mode, *, reason: str | None = None) -> str:
        """Set the mode for all producers of the schema; the mode before."""
        actor, why = self._session.actor, arguments.reason(reason)
        return await mode.set_mode(self._session.dsn, wanted, self._session.schema, actor=actor, reason=why)
