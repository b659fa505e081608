"""Whether the partitions of the outbox are there when they are needed, and go when they are not."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from holdfast.postgres.doctor.examination import Examination
from holdfast.postgres.doctor.findings import Check, Finding

_MOST_MOVED = 20_000  # what partitions_extend moves out of outbox_default
_MOST_COUNTED = 100_000
_PERIODS = {"day": timedelta(days=1), "week": timedelta(weeks=1)}


async def _conversion(examination: Examination) -> list[Finding]:
    state = await _state(examination)
    name = f"{examination.schema}.outbox"
    if state["bound"] is not None:
        soon = state["bound"] - state["now"] < timedelta(days=2)
        return [
            Finding(
                "problem" if soon else "warning",
                "partitions-unfinished",
                name,
                "the outbox is on its way to partitions, and refuses events from a day on until it is there",
                f"ids from {state['bound']:%Y-%m-%d} on are refused; a worker takes that back a day before",
                "holdfast partitions enable\n-- goes on; holdfast partitions disable goes back",
            )
        ]
    if state["gathering"]:
        return [
            Finding(
                "warning",
                "partitions-unfinished",
                name,
                "the outbox is on its way from partitions to one table: an id is not unique over the tables meanwhile",
                "former partitions inherit from it",
                "holdfast partitions disable",
            )
        ]
    return []


async def _ahead(examination: Examination) -> list[Finding]:
    state = await _state(examination)
    if not state["partitioned"]:
        return []
    findings = []
    rows = await examination.rows("list_partitions")
    name = f"{examination.schema}.outbox"
    ends = max((row["upper_at"] for row in rows if row["upper_at"]), default=None)
    if ends is None or ends < state["now"] + _PERIODS[state["every"]]:
        findings.append(
            Finding(
                "warning",
                "partitions-missing",
                name,
                "no partition has been made ahead: new events go to the one for everything else, and no event is lost",
                "there is none" if ends is None else f"the last one ends {ends:%Y-%m-%d %H:%M} UTC",
                "holdfast partitions enable\n-- makes them; workers do by themselves: holdfast workers list",
            )
        )
    since = min((row["upper_at"] for row in rows if row["kind"] == "first"), default=None)
    since = since or min((row["lower_at"] for row in rows if row["lower_at"]), default=state["now"])
    (found,) = await examination.rows("count_default_rows", since=since, most=_MOST_COUNTED)
    if found[0]:
        many = found[0] > _MOST_MOVED
        findings.append(
            Finding(
                "warning" if many else "note",
                "partitions-default",
                f"{examination.schema}.outbox_default",
                "events are in the partition for everything else: a producer's clock is wrong, or partitions were late",
                f"{found[0]:,} rows" + " or more" * (found[0] == _MOST_COUNTED),
                "holdfast partitions status\n-- shows how many there are; the sources of the latest ids are those of "
                "producers whose clocks to look at",
            )
        )
    return findings


async def _kept(examination: Examination) -> list[Finding]:
    if not (await _state(examination))["partitioned"]:
        return []
    return [
        Finding(
            "note",
            "partitions-kept",
            f"{examination.schema}.{row['name']}",
            "a partition is past retention and is not dropped",
            f"it ended {row['days']} days ago; " + _why_kept(row["kept"]),
            "holdfast failed list\n-- resolve what failed there, or wait; what is past retention is deleted row by row",
        )
        for row in await examination.rows("list_kept_partitions")
    ]


def _why_kept(rows: int) -> str:
    if rows > 10_000:
        return "it has more than 10,000 rows that are still kept"
    return f"{rows:,} of its rows are still kept; no worker could lock the outbox for it, or none lives"


async def _storage(examination: Examination) -> list[Finding]:
    await examination.require_installed()
    return [
        Finding(
            "problem",
            "partition-other",
            f"{examination.schema}.{row['name']}",
            "a partition differs from the others in its storage options or its indexes",
            f"options: expected {row['usual']}; found {row['options'] or 'none'}; "
            f"indexes missing: {row['indexes_missing']}",
            f"ALTER TABLE {examination.in_schema(row['name'])} SET ({row['usual']});"
            if row["options"] != row["usual"]
            else examination.apply_command,
        )
        for row in await examination.rows("list_partition_flaws")
    ]


async def _state(examination: Examination) -> Any:
    await examination.require_installed()
    (row,) = await examination.rows("read_partitioning")
    return row


CHECKS = (
    Check(
        "partitions",
        "drift",
        "every partition of the outbox has the same storage options and indexes",
        ("partition-other",),
        _storage,
    ),
    Check(
        "partitions-conversion",
        "health",
        "no conversion of the outbox to partitions, or back, was left unfinished",
        ("partitions-unfinished",),
        _conversion,
    ),
    Check(
        "partitions-ahead",
        "health",
        "partitions are made a period ahead, and new events are in them",
        ("partitions-missing", "partitions-default"),
        _ahead,
    ),
    Check("partitions-kept", "health", "partitions past retention are dropped", ("partitions-kept",), _kept),
)
