"""Whether the tables are looked after: dead rows, heap-only updates, autovacuum, transaction numbers."""

from __future__ import annotations

import asyncpg

from holdfast.postgres.doctor.examination import Examination
from holdfast.postgres.doctor.findings import CannotLook, Check, Finding

_TIMES_DUE = 5
_FREEZE_TIMES = (2, 5)  # of what autovacuum allows itself: a warning, a problem


async def _dead_rows(examination: Examination) -> list[Finding]:
    findings = []
    for row in await _tables(examination):
        if row["dead"] >= examination.limits.dead_rows and row["dead"] > _TIMES_DUE * row["due_at"]:
            name = f"{examination.schema}.{row['name']}"
            before = row["vacuumed_before"]
            vacuumed = "never vacuumed" if before is None else f"vacuumed {before:.0f} s ago"
            findings.append(
                Finding(
                    "warning",
                    "dead-rows",
                    name,
                    f"dead rows pile up in {name}",
                    f"{row['dead']} dead, {row['live']} live; autovacuum is due at {row['due_at']:.0f}; {vacuumed}",
                    f"VACUUM {examination.in_schema(row['name'])};",
                )
            )
    return findings


async def _hot_updates(examination: Examination) -> list[Finding]:
    # Partitions of the outbox have counts of their own.
    counted = [row for row in await _tables(examination) if row["is_outbox"]]
    updates = sum(row["updates"] for row in counted)
    if updates < examination.limits.updates:
        return []
    share = sum(row["hot_updates"] for row in counted) / updates
    if share >= examination.limits.hot_share:
        return []
    return [
        Finding(
            "warning",
            "hot-updates-few",
            f"{examination.schema}.outbox",
            f"few updates of {examination.schema}.outbox are heap-only: each claim writes to every index",
            f"{share:.0%} of {updates}; about half is usual",
            "look for an index on status or the lease, another fillfactor, or a held xmin horizon",
        )
    ]


async def _tables(examination: Examination) -> list[asyncpg.Record]:
    await examination.require_installed()
    (server,) = await examination.rows("server_upkeep")
    if not server["track_counts"]:
        raise CannotLook(
            "the server does not count rows", "ALTER SYSTEM SET track_counts = on; SELECT pg_reload_conf();"
        )
    return await examination.rows("table_upkeep")


async def _autovacuum(examination: Examination) -> list[Finding]:
    (server,) = await examination.rows("server_upkeep")
    return [
        Finding(
            "problem",
            "autovacuum-off",
            setting,
            "the server does not vacuum by itself: claims walk past ever more dead rows",
            f"{setting} = off",
            f"ALTER SYSTEM SET {setting} = on; SELECT pg_reload_conf();",
        )
        for setting in ("autovacuum", "track_counts")
        if not server[setting]
    ]


async def _wraparound(examination: Examination) -> list[Finding]:
    (server,) = await examination.rows("server_upkeep")
    findings = []
    for kind in ("transactions", "multixacts"):
        age, most = server[kind], server[f"most_{kind}"]
        warn, alarm = (times * most for times in _FREEZE_TIMES)
        if age >= warn:
            findings.append(
                Finding(
                    "problem" if age >= alarm else "warning",
                    "wraparound-near",
                    kind,
                    f"the database has not been frozen for {age} {kind}, and stops at two thousand million",
                    f"autovacuum should have done it after {most}",
                    "VACUUM (FREEZE); -- and look for what holds the xmin horizon",
                )
            )
    return findings


CHECKS = (
    Check(
        "dead-rows",
        "health",
        "dead rows are fewer than five times what autovacuum waits for",
        ("dead-rows",),
        _dead_rows,
    ),
    Check(
        "hot-updates",
        "health",
        "of the outbox's updates three in ten are heap-only; about half is usual",
        ("hot-updates-few",),
        _hot_updates,
    ),
    Check("autovacuum", "health", "autovacuum is on", ("autovacuum-off",), _autovacuum),
    Check(
        "wraparound", "health", "the database is far from transaction id wraparound", ("wraparound-near",), _wraparound
    ),
)
