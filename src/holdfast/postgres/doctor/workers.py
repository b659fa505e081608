"""Checks the workers themselves: whether they report themselves alive, are connected, and wait for no other session."""

from __future__ import annotations

from collections.abc import Container, Sequence

from holdfast.postgres.doctor.examination import Examination
from holdfast.postgres.doctor.findings import Check, Finding
from holdfast.postgres.lock_waits import DELIVERING, LockWait
from holdfast.postgres.operations.status import WorkerStatus


async def unconnected(examination: Examination) -> list[WorkerStatus]:
    """Return the workers that count as living and have no session in this database."""
    connected = {row["worker"] for row in await examination.rows("list_worker_sessions")}
    return [
        worker for worker in (await examination.status()).workers if worker.living and str(worker.id) not in connected
    ]


async def _workers(examination: Examination) -> list[Finding]:
    missed = examination.limits.missed_heartbeat.total_seconds()
    silent = [worker for worker in (await examination.status()).workers if not worker.living]
    return [
        *(
            Finding(
                "warning",
                "worker-unconnected",
                worker.name,
                f"no session of the worker {worker.name} is connected"
                + (", and it has missed its heartbeat" if worker.silent_for > missed else ""),
                f"{_where(worker)}, last heartbeat {worker.silent_for:.0f} s ago",
                "look into its log for database_unavailable, which names the error: a refused login, an address that "
                "is gone, a process that was killed",
            )
            for worker in await unconnected(examination)
        ),
        *(
            Finding(
                "warning",
                "worker-silent",
                worker.name,
                f"the worker {worker.name} is silent, and did not stop in order",
                f"{_where(worker)}, last heartbeat {worker.silent_for:.0f} s ago",
                "see whether its process runs, and what its log says; its events are due again when their leases "
                f"expire, or at once: holdfast workers release {worker.id}",
            )
            for worker in silent
        ),
    ]


def in_the_way(waits: Sequence[LockWait], reported: Container[str]) -> list[Finding]:
    """Return a finding for each session that the doctor's own reads have waited for until they timed out."""
    fronts = {f"pid {each.blocker_pid}": each for each in waits}
    return [
        Finding(
            "problem",
            "delivery-blocked",
            front,
            f"reads of the schema wait for a lock, and so do claims: {wait.blocker} stands in front of them",
            "the doctor's own reads have waited for it until they timed out",
            _end(wait),
        )
        for front, wait in fronts.items()
        if front not in reported
    ]


def _end(wait: LockWait) -> str:
    return f"-- as an administrator; what that session has not committed is rolled back:\n{wait.remedy}"


async def _blocked(examination: Examination) -> list[Finding]:
    """One finding for each session at the root of a chain, whatever waits for it."""
    waited = examination.limits.lock_wait
    waiting: dict[int, list[LockWait]] = {}
    for row in await examination.rows("list_lock_waits", sessions=DELIVERING, pid=None, waited=waited):
        wait = LockWait(**row)
        waiting.setdefault(wait.blocker_pid, []).append(wait)
    return [
        Finding(
            "problem",
            "delivery-blocked",
            f"pid {pid}",
            f"sessions of workers wait for a lock: {waits[0].blocker} stands in front of them",
            "; ".join(f"pid {each.pid} ({each.application}) waits for {each.waited:.0f} s" for each in waits[:3])
            + (f"; and {len(waits) - 3} more" if len(waits) > 3 else ""),
            _end(waits[0]),
        )
        for pid, waits in waiting.items()
    ]


def _where(worker: WorkerStatus) -> str:
    return f"{worker.host}:{worker.pid}, generation {worker.generation}"


CHECKS = (
    Check(
        "lock-waits",
        "health",
        "no session of a worker has waited for a lock for two seconds",
        ("delivery-blocked",),
        _blocked,
    ),
    Check(
        "workers",
        "health",
        "every worker that has not stopped in order reports itself alive and is connected",
        ("worker-unconnected", "worker-silent"),
        _workers,
    ),
)
