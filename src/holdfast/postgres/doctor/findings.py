"""What an examination says, and from where on it says so."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from holdfast.postgres.schema.ownership import OWNER

if TYPE_CHECKING:
    from holdfast.postgres.doctor.examination import Examination

Severity = Literal["problem", "warning", "note"]
Part = Literal["drift", "health"]

SEVERITIES: tuple[Severity, ...] = ("problem", "warning", "note")
PARTS: tuple[Part, ...] = ("drift", "health")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be.

    `code` and `object` are for programs and stay as they are. `remedy` is SQL for the schema's owner, with a semicolon
    after each statement, or a command on a line of its own, or both with a comment between them; it is written to be
    run after it was read. A remedy for an administrator begins with a comment that says so.
    """

    severity: Severity
    code: str
    object: str
    what: str
    evidence: str
    remedy: str


def with_rest(findings: list[Finding], rows: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Return the findings of rows that a limit may have cut off, with one more for those that are not among them.

    Each row has the `total` of all.
    """
    left = rows[0]["total"] - len(rows) if rows else 0
    if not left:
        return findings
    last = findings[-1]
    return [
        *findings,
        Finding(
            last.severity,
            last.code,
            f"{left} more",
            "there are more of these than are named here",
            f"{rows[0]['total']} in all, of which {len(rows)} are named",
            "look again when these are gone: holdfast doctor",
        ),
    ]


@dataclass(frozen=True, slots=True)
class Check:
    """One question. `codes` are the findings that may answer it, each with its meaning."""

    name: str
    part: Part
    about: str
    codes: tuple[str, ...]
    run: Callable[[Examination], Awaitable[Iterable[Finding]]]


@dataclass(frozen=True, slots=True)
class Report:
    """The answers. A check that could not look is among the findings, as `could-not-look`."""

    schema: str
    server: str
    owner: str | None
    checks: tuple[str, ...]
    passed: tuple[str, ...]
    findings: tuple[Finding, ...]  # the worst first

    def of(self, severity: Severity) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == severity]

    @property
    def statements_role(self) -> str | None:
        """The role that has to run the statements among the remedies, when the schema belongs to it."""
        statements = any(
            finding.remedy.endswith(";") and not finding.remedy.startswith("-- as an administrator")
            for finding in self.findings
        )
        return OWNER if statements and self.owner == OWNER else None

    @property
    def healthy(self) -> bool:
        """Whether nothing is a problem."""
        return not self.of("problem")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """From where on something is reported. What is held ten times as long is a problem, and a warning before."""

    held_for: timedelta = timedelta(minutes=5)  # by one transaction, a snapshot that keeps dead rows
    held_transactions: int = 1_000_000  # how many others have begun since then
    dead_rows: int = 10_000  # and five times as many as autovacuum waits for
    updates: int = 10_000  # before their share of heap-only updates says something
    hot_share: float = 0.3  # a claim is heap-only, a settle is not: about half is usual
    queue_usage: float = 0.25  # of the server's notification queue
    expired_for: timedelta = timedelta(minutes=1)  # a lease, before a worker should have claimed the event again
    missed_heartbeat: timedelta = timedelta(seconds=20)  # of a worker; they come every ten seconds
    overdue: timedelta = timedelta(minutes=1)  # a slot of a schedule
    clock: timedelta = timedelta(seconds=2)
    blocked: timedelta = timedelta(seconds=10)  # a transaction that has written to the inbox
    lock_wait: timedelta = timedelta(seconds=2)  # of a session that delivers
    many_rows: int = 5_000_000  # in the outbox
    too_many_rows: int = 20_000_000
    weekly_failures: int = 10
    journal_bytes: int = 64 * 1024**2  # of the roll-up: what its readers look at
    weekly_p99: timedelta = timedelta(seconds=0.5)  # of the time in the outbox
    frozen: timedelta = timedelta(seconds=10)  # a client that does not read what it is sent


class CannotLook(Exception):
    """A check has no answer: what kept it from looking, what would help, and how bad it is not to know."""

    def __init__(self, reason: str, remedy: str, severity: Severity = "problem") -> None:
        super().__init__(reason, remedy)
        self.reason = reason
        self.remedy = remedy
        self.severity = severity
