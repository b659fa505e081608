"""Verbs for workers: which run, and releasing what a worker holds that is gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from holdfast.errors import NotFound
from holdfast.operator import arguments
from holdfast.operator.session import Refused, Session
from holdfast.postgres.operations import workers
from holdfast.postgres.operations.excerpt import Excerpt
from holdfast.postgres.operations.status import WorkerStatus

BATCH = 5_000


@dataclass(frozen=True, slots=True)
class ReleasedWorker:
    """How many events of a worker were released, and how many a transaction still keeps."""

    worker: UUID
    released: int
    left: int
    dry_run: bool = False
    unlisted: bool = False  # it is no longer in the list of workers, until it is heard of again


class Workers:
    """Workers, as `operator.workers`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def all(self) -> Excerpt[WorkerStatus]:
        """The workers that have not stopped: the living ones first; the silent ones for an hour."""
        return (await self._session.connection.status()).workers

    async def release(
        self, worker: UUID | str, *, force: bool = False, reason: str | None = None, dry_run: bool = False
    ) -> ReleasedWorker:
        """Release the events that a worker holds, without counting the attempts. Its leases are void from then on.

        They would be due by themselves when the leases expire; this is for leases that expire too late, such as after
        the database's clock was set back. The worker leaves the list with it, until it is heard of again. Refused,
        unless forced, while the worker lives: its handlers would run beside those of the next worker.
        """
        identity = arguments.identity(worker, "worker", "holdfast workers list")
        asked: dict[str, Any] = {"reason": arguments.reason(reason), "worker": str(identity), "force": force}
        listed = [each for each in await self.all() if each.id == identity]
        living = [f"the worker {each.name} was heard of {each.silent_for:.0f} s ago" for each in listed if each.living]
        async with self._session.changing("worker.release", dry_run=dry_run, **asked):
            if living and not force:
                raise Refused(
                    f"{living[0]} and may be handling them",
                    "stop it, or wait until that was a minute ago; if its process is gone, --force releases them now",
                )
        async with self._session.reading() as statements:
            held = await workers.count_held(statements, identity)
        if not held and not listed:
            raise NotFound("worker", f"{identity} is unknown", "holdfast workers list")
        if dry_run:
            return ReleasedWorker(identity, held, 0, dry_run, bool(listed))
        released = 0
        while True:
            async with self._session.changing("worker.release", **asked) as statements:
                count = await workers.release(
                    statements, identity, most=BATCH, actor=self._session.actor, reason=reason
                )
            released += count
            if count < BATCH:
                left = max(0, held - released)
                return ReleasedWorker(identity, released, left, unlisted=bool(listed and not left))
