"""What holds the xmin horizon: rows that died after it cannot be removed, and every claim walks past them."""

from __future__ import annotations

from holdfast.postgres.doctor.examination import Examination
from holdfast.postgres.doctor.findings import Check, Finding, Severity, with_rest

_FAR = 10


def _severity(examination: Examination, seconds: float, transactions: int) -> Severity:
    limits = examination.limits
    far = seconds >= _FAR * limits.held_for.total_seconds() or transactions >= _FAR * limits.held_transactions
    return "problem" if far else "warning"


async def _sessions(examination: Examination) -> list[Finding]:
    await examination.require_sessions()
    rows = await examination.rows(
        "horizon_sessions", held_for=examination.limits.held_for, held_transactions=examination.limits.held_transactions
    )
    findings = [
        Finding(
            _severity(examination, row["seconds"], row["transactions"]),
            "horizon-session",
            f"pid {row['pid']}",
            f"the session with pid {row['pid']} ({row['application']}, login {row['login']}) holds the xmin horizon",
            f"{row['state']}, {_duration(row['seconds'])} and {row['transactions']} transactions old",
            f"SELECT pg_terminate_backend({row['pid']});",
        )
        for row in rows
    ]
    return with_rest(findings, rows)


async def _prepared(examination: Examination) -> list[Finding]:
    rows = await examination.rows(
        "horizon_prepared", held_for=examination.limits.held_for, held_transactions=examination.limits.held_transactions
    )
    findings = [
        Finding(
            _severity(examination, row["seconds"], row["transactions"]),
            "horizon-prepared",
            row["gid"],
            f"the prepared transaction {row['gid']} of {row['login']} holds the xmin horizon, and its locks",
            f"prepared {_duration(row['seconds'])} and {row['transactions']} transactions ago",
            f"ROLLBACK PREPARED {row['gid']};",
        )
        for row in rows
    ]
    return with_rest(findings, rows)


async def _slots(examination: Examination) -> list[Finding]:
    rows = await examination.rows("horizon_slots", held_transactions=examination.limits.held_transactions)
    findings = [
        Finding(
            _severity(examination, 0, row["transactions"]),
            "horizon-slot",
            row["slot"],
            f"the {row['type']} replication slot {row['slot']} holds "
            + ("the xmin horizon" if row["transactions"] else "WAL")
            + ("" if row["active"] else ", and it has no consumer"),
            f"{row['transactions']} transactions, {row['kept'] or 'no WAL'}",
            f"SELECT pg_drop_replication_slot({row['slot']});",
        )
        for row in rows
    ]
    return with_rest(findings, rows)


async def _standbys(examination: Examination) -> list[Finding]:
    await examination.require_sessions()
    rows = await examination.rows("horizon_standbys", held_transactions=examination.limits.held_transactions)
    findings = [
        Finding(
            _severity(examination, 0, row["transactions"]),
            "horizon-standby",
            row["application"],
            f"a query on the standby {row['application']} ({row['address']}) holds the xmin horizon by its feedback",
            f"{row['transactions']} transactions old, walsender with pid {row['pid']}",
            "on the standby: end its oldest query, or ALTER SYSTEM SET hot_standby_feedback = off;",
        )
        for row in rows
    ]
    return with_rest(findings, rows)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


CHECKS = (
    Check(
        "sessions",
        "health",
        "no session holds the xmin horizon for five minutes: rows that died after it cannot be removed",
        ("horizon-session",),
        _sessions,
    ),
    Check(
        "prepared-transactions",
        "health",
        "no prepared transaction holds the xmin horizon",
        ("horizon-prepared",),
        _prepared,
    ),
    Check(
        "replication-slots",
        "health",
        "no replication slot holds the xmin horizon, and each has a consumer",
        ("horizon-slot",),
        _slots,
    ),
    Check(
        "standbys",
        "health",
        "no query on a standby with hot_standby_feedback holds the xmin horizon",
        ("horizon-standby",),
        _standbys,
    ),
)
