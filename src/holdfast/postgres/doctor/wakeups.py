"""Checks how workers are woken: the wake-up mode, the listeners, the server's notification queue and its lock."""

from __future__ import annotations

import asyncio

from holdfast.postgres.doctor.examination import Examination
from holdfast.postgres.doctor.findings import Check, Finding, with_rest
from holdfast.postgres.doctor.workers import unconnected

_LOOKS = 5
_BETWEEN_LOOKS = 0.05

_MODES = {
    "always": "every commit that publishes sends a NOTIFY, and producers wait for each other",
    "never": "no commit wakes a worker; events wait for the next poll",
}


async def _mode(examination: Examination) -> list[Finding]:
    await examination.require_installed()
    option = "" if examination.schema == "core" else f" --schema {examination.schema}"
    return [
        Finding(
            "note",
            f"wakeup-{mode}",
            examination.schema,
            _MODES[mode],
            f"the wake-up mode is {mode}",
            f"holdfast notify when_idle{option}",
        )
        for (mode,) in await examination.rows("read_wakeup_mode")
        if mode in _MODES
    ]


async def _listeners(examination: Examination) -> list[Finding]:
    status = await examination.status()
    cut_off = {worker.id for worker in await unconnected(examination)}  # which is another finding
    living = [worker.name for worker in status.workers if worker.living and worker.id not in cut_off]
    listening = (await examination.rows("read_notifications"))[0]["listeners"]
    if listening >= len(living) or status.wakeup_mode == "never":
        return []
    return [
        Finding(
            "warning",
            "listeners-missing",
            examination.schema,
            "workers only poll: a handler blocks their event loop, a transaction pooler stands before their database, "
            "or they run with --no-listen",
            f"{len(living)} living ({', '.join(living[:5])}{', …' if len(living) > 5 else ''}), {listening} listening",
            "on their machines see whether the event loop is blocked (holdfast worker status); behind a pooler, start "
            "them with --listen-dsn and the address of the Postgres server itself",
        )
    ]


async def _pooler(examination: Examination) -> list[Finding]:
    if not examination.pooled:
        return []
    return [
        Finding(
            "note",
            "pooler",
            examination.schema,
            "this address goes through a transaction pooler, where LISTEN does not work",
            "another backend answers than the one that was connected to",
            "give workers with this address another one for LISTEN: --listen-dsn, or HOLDFAST_LISTEN_DSN",
        )
    ]


async def _queue(examination: Examination) -> list[Finding]:
    usage = (await examination.rows("read_notifications"))[0]["queue_usage"]
    if usage < examination.limits.queue_usage:
        return []
    return [
        Finding(
            "problem" if usage >= 2 * examination.limits.queue_usage else "warning",
            "notify-queue-filling",
            "notification queue",
            "the server's notification queue fills up; when it is full, commits that notify fail",
            f"{usage:.2%} in use",
            "end the session that listens and stays in a transaction, most likely the first of: "
            "SELECT pid, xact_start, query FROM pg_stat_activity ORDER BY 2;",
        )
    ]


async def _frozen(examination: Examination) -> list[Finding]:
    rows = await examination.rows("list_frozen_sessions", frozen=examination.limits.frozen)
    findings = [
        Finding(
            "problem",
            "listener-frozen",
            f"pid {row['pid']}",
            "a client does not read what the server sends it: notifications pile up, and dead rows stay",
            f"{row['application']}, login {row['login']}, for {row['seconds']:.0f} s",
            f"workers end sessions of a silent worker by themselves; else: SELECT pg_terminate_backend({row['pid']});",
        )
        for row in rows
    ]
    return with_rest(findings, rows)


async def _lock(examination: Examination) -> list[Finding]:
    """Several looks: that one commit waits for another's for a moment says nothing."""
    seen = []
    for number in range(_LOOKS):
        if number:
            await asyncio.sleep(_BETWEEN_LOOKS)
        (row,) = await examination.rows("notify_lock_waits")
        if row["sessions"]:
            seen.append((row["sessions"], row["longest"]))
    if len(seen) < 2:
        return []
    most, longest = max(sessions for sessions, _ in seen), max(seconds for _, seconds in seen)
    return [
        Finding(
            "warning",
            "notify-lock-waits",
            "notification lock",
            "commits that notify wait for each other",
            f"in {len(seen)} of {_LOOKS} looks, up to {most} sessions, for up to {longest:.1f} s",
            "holdfast notify when_idle, if it is not set; and look for other senders of NOTIFY in this cluster",
        )
    ]


CHECKS = (
    Check(
        "wakeup-mode",
        "health",
        "publishing wakes sleeping workers (when_idle); another mode is a note",
        ("wakeup-always", "wakeup-never"),
        _mode,
    ),
    Check(
        "listeners", "health", "every living worker has a connection that listens", ("listeners-missing",), _listeners
    ),
    Check(
        "pooler",
        "health",
        "the connection does not go through a transaction pooler; if it does, that is a note",
        ("pooler",),
        _pooler,
    ),
    Check(
        "notify-queue",
        "health",
        "less than a quarter of the server's notification queue is in use",
        ("notify-queue-filling",),
        _queue,
    ),
    Check(
        "frozen-clients",
        "health",
        "no client leaves what the server sends it unread for ten seconds",
        ("listener-frozen",),
        _frozen,
    ),
    Check(
        "notify-lock",
        "health",
        "commits do not wait for the lock of NOTIFY (in two of five samples)",
        ("notify-lock-waits",),
        _lock,
    ),
)
