"""Who can get in whose way: sources that any producer may write to, and locks that foreign sessions hold."""

from __future__ import annotations

from holdfast.characters import sql_string
from holdfast.postgres.doctor.examination import Examination
from holdfast.postgres.doctor.findings import Check, Finding, with_rest

_LATEST = 10_000


async def _sources(examination: Examination) -> list[Finding]:
    await examination.require_installed()
    rows = await examination.rows("list_unowned_sources", most=_LATEST)
    findings = [
        Finding(
            "note",
            "source-unowned",
            row["source"],
            "every producer of this database may publish, cancel and reschedule events of this source",
            "no role owns it, and several logins are producers",
            f"INSERT INTO {examination.in_schema('sources')} VALUES ({sql_string(row['source'])}, '<its role>');",  # noqa: S608 - for people
        )
        for row in rows
    ]
    if rows and rows[0]["total"] > len(rows):
        findings.append(
            Finding(
                "note",
                "source-unowned",
                f"{rows[0]['total'] - len(rows)} more sources",
                "more sources than are named here belong to no role",
                f"{rows[0]['total']} sources in the latest {_LATEST} events",
                "find who publishes under them: holdfast events list",
            )
        )
    return findings


async def _locks(examination: Examination) -> list[Finding]:
    await examination.require_installed()
    rows = await examination.rows("list_foreign_locks")
    findings = [
        Finding(
            "warning",
            "lock-foreign",
            row["name"],
            "another session holds a lock of ours: wake-ups take up to a second, or schema changes are refused",
            f"pid {row['pid']}, login {row['login']}, application {row['application']}, for {row['seconds']:.0f} s",
            f"SELECT pg_terminate_backend({row['pid']});",
        )
        for row in rows
    ]
    return with_rest(findings, rows)


async def _inbox(examination: Examination) -> list[Finding]:
    await examination.require_installed()
    await examination.require_sessions()
    rows = await examination.rows("list_inbox_writers", blocked=examination.limits.blocked)
    findings = [
        Finding(
            "warning",
            "inbox-blocked",
            f"pid {row['pid']}",
            "a session has written to the inbox and not committed: events with the same keys are handled, and cannot "
            "be settled",
            f"login {row['login']}, application {row['application']}, {row['state']}, since {row['seconds']:.0f} s ago",
            f"SELECT pg_terminate_backend({row['pid']});",
        )
        for row in rows
    ]
    return with_rest(findings, rows)


CHECKS = (
    Check(
        "sources",
        "health",
        "every source of the latest events has an owner, where several logins may publish",
        ("source-unowned",),
        _sources,
    ),
    Check(
        "inbox",
        "health",
        "no session keeps what it has written to the inbox uncommitted for ten seconds",
        ("inbox-blocked",),
        _inbox,
    ),
    Check("locks", "health", "no foreign session holds an advisory lock of ours", ("lock-foreign",), _locks),
)
