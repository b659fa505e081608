"""Whether the installation outgrows its shape: rows kept, counts not folded, failures and times of a week."""

from __future__ import annotations

from holdfast.postgres.doctor.examination import Examination
from holdfast.postgres.doctor.findings import Check, Finding
from holdfast.postgres.operations.rates import RollupLag, Signals, signals_of


async def _signals(examination: Examination) -> Signals:
    await examination.require_installed()
    (row,) = await examination.rows("read_signals")
    return signals_of(row)


async def _growth(examination: Examination) -> list[Finding]:
    signals, limits = await _signals(examination), examination.limits
    rows = signals.outbox_rows
    if rows is None or rows <= (limits.too_many_rows if signals.partitioned else limits.many_rows):
        return []
    too_many = rows > limits.too_many_rows
    partition = "partition it by time, which lets retention drop whole partitions: holdfast partitions enable"
    relay = "carry events to other services by a broker: docs/runbooks/scaling-out.md"
    step = relay if signals.partitioned else partition
    return [
        Finding(
            "warning" if too_many else "note",
            "outbox-large",
            f"{examination.schema}.outbox",
            "the outbox keeps more rows than a single table should for long",
            f"about {rows:,}, by the server's statistics; partition it from {limits.many_rows:,} on, and look for "
            f"another way to carry events from {limits.too_many_rows:,} on",
            f"holdfast retention show\n-- keep delivered events for fewer days; or {step}",
        )
    ]


async def _failures(examination: Examination) -> list[Finding]:
    failures = (await _signals(examination)).failures
    if failures <= examination.limits.weekly_failures:
        return []
    return [
        Finding(
            "warning",
            "failures-weekly",
            f"{examination.schema}.rollup",
            "more deliveries failed in the last week than should",
            f"{failures:,} failed; more than {examination.limits.weekly_failures} are reported",
            "holdfast failed groups",
        )
    ]


async def _slowness(examination: Examination) -> list[Finding]:
    slowest, limit = (await _signals(examination)).outbox_p99, examination.limits.weekly_p99.total_seconds()
    if slowest is None or slowest <= limit:
        return []
    return [
        Finding(
            "warning",
            "outbox-slow-weekly",
            f"{examination.schema}.rollup",
            "for a week, one delivery in a hundred has waited in the outbox longer than it should",
            f"the 99th percentile of the time in the outbox is {slowest:.2g} s; more than {limit:g} s is reported",
            "holdfast status\n-- shows which handlers; start more workers, or raise their concurrency; if the table is "
            "what is slow, partition it: holdfast partitions enable; past that, a broker: docs/runbooks/scaling-out.md",
        )
    ]


async def _folding(examination: Examination) -> list[Finding]:
    await examination.require_installed()
    (row,) = await examination.rows("read_lag")
    lag, journal = RollupLag(**row), f"{examination.schema}.rollup_journal"
    found = []
    if lag.is_behind:
        found.append(
            Finding(
                "warning",
                "rollup-behind",
                journal,
                "counts are not folded into the roll-up, and rates are incomplete",
                f"{lag.lines:,} lines or more, the oldest of {lag.seconds:,.0f} s ago; workers fold every ten seconds",
                "holdfast workers list\n-- start one if none lives; otherwise look for rollup_failed in their logs and "
                "for a transaction of a worker's login that does not end",
            )
        )
    if lag.bytes > examination.limits.journal_bytes:
        found.append(
            Finding(
                "note",
                "rollup-journal-large",
                journal,
                "the journal of the roll-up has grown, and rates may be a few seconds late",
                f"{lag.bytes:,} bytes; more than {examination.limits.journal_bytes:,} are reported",
                f"VACUUM (TRUNCATE) {journal};",
            )
        )
    return found


CHECKS = (
    Check("growth", "health", "the outbox has at most five million rows, as estimated", ("outbox-large",), _growth),
    Check("weekly-failures", "health", "at most ten deliveries failed within a week", ("failures-weekly",), _failures),
    Check(
        "weekly-times",
        "health",
        "within a week, 99 of 100 deliveries were handled half a second after they were due",
        ("outbox-slow-weekly",),
        _slowness,
    ),
    Check(
        "rollup",
        "health",
        "counts are folded into the roll-up, every few seconds",
        ("rollup-behind", "rollup-journal-large"),
        _folding,
    ),
)
