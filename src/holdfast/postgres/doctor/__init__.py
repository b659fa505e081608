"""Checks whether an installation is what it should be, and whether anything blocks delivery.

Drift compares the schema with what the migrations make of an empty database. Health looks at what slows claims down, at
how workers are woken, and at events that no worker serves. It changes nothing and counts no settled rows, every read
has a limit, and what this login may not read is reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import asyncpg

from holdfast.installing import DISTRIBUTION, REINSTALLING, mending_remedy, missing_files, other_owners
from holdfast.postgres.doctor import (
    backlog,
    brokers,
    drift,
    growth,
    horizon,
    partitions,
    schedules,
    trust,
    upkeep,
    wakeups,
    workers,
)
from holdfast.postgres.doctor.examination import Examination
from holdfast.postgres.doctor.findings import (
    PARTS,
    SEVERITIES,
    CannotLook,
    Check,
    Finding,
    Limits,
    Part,
    Report,
    Severity,
)
from holdfast.postgres.faults import CONNECTION_FAULTS
from holdfast.postgres.lock_waits import LockWait
from holdfast.postgres.schema.ownership import OWNER

__all__ = [
    "CHECKS",
    "COULD_NOT_LOOK",
    "PARTS",
    "SEVERITIES",
    "Check",
    "Finding",
    "Limits",
    "Part",
    "Report",
    "Severity",
    "examine",
]

COULD_NOT_LOOK: Final = "could-not-look"
NEWEST_TESTED: Final = 18
_MOST_NAMED: Final = 5  # checks that could not look, in a sentence; the finding's object has all of them


async def _server(examination: Examination) -> list[Finding]:
    place = await examination.place()
    if place.major <= NEWEST_TESTED:
        return []
    return [
        Finding(
            "note",
            "server-untested",
            f"Postgres {place.major}",
            f"this release was tested with Postgres up to {NEWEST_TESTED}; a later one may print definitions "
            "otherwise, which looks like drift",
            f"the server is Postgres {place.server}",
            "install a release of Holdfast that was tested with it, if there is one",
        )
    ]


async def _package(examination: Examination) -> list[Finding]:
    folder = Path(__file__).parents[3]
    shared = [
        Finding(
            "problem",
            "package-shared",
            f"{name} {version}",
            f"{name} {version}, another project, is installed into the package holdfast: the later of the two has "
            "overwritten files of the other",
            f"{name} and {DISTRIBUTION} are both in {folder}",
            mending_remedy(name),
        )
        for name, version in other_owners().items()
    ]
    if shared or not (missing := missing_files()):
        return shared
    what = f"files of {DISTRIBUTION} are missing, as when another project was removed from its folder"
    evidence = f"{len(missing)} are not in {folder}, the first is {missing[0]}"
    return [Finding("problem", "package-incomplete", DISTRIBUTION, what, evidence, REINSTALLING)]


CHECKS: Final[tuple[Check, ...]] = (
    *drift.CHECKS,
    Check("server", "drift", "this release was tested with this Postgres", ("server-untested",), _server),
    Check(
        "package",
        "health",
        "the package holdfast has all its files, and no other project's",
        ("package-shared", "package-incomplete"),
        _package,
    ),
    *horizon.CHECKS,
    *upkeep.CHECKS,
    *wakeups.CHECKS,
    *workers.CHECKS,
    *backlog.CHECKS,
    *schedules.CHECKS,
    *trust.CHECKS,
    *growth.CHECKS,
    *partitions.CHECKS,
    *brokers.CHECKS,
)


async def examine(
    connection: asyncpg.Connection,
    schema: str = "core",
    *,
    only: Part | None = None,
    limits: Limits | None = None,
    pooled: bool = False,
    clock: Callable[[], float] = time.time,
    waits: Sequence[LockWait] = (),
) -> Report:
    """Run every check, or those of one part.

    `pooled` is what `Address.probe` found out, and `waits` grows while this session waits for locks. An error of one
    check keeps no other from looking; only a connection that is lost ends the examination.
    """
    examination = Examination(connection, schema, limits or Limits(), pooled=pooled, clock=clock)
    place = await examination.place()
    checks = [check for check in CHECKS if only in (None, check.part)]
    findings: list[Finding] = []
    passed: list[str] = []
    blind: dict[tuple[Part, Severity, str, str], list[str]] = {}
    locked = False
    for check in checks:
        try:
            found = list(await check.run(examination))
        except CannotLook as nothing:
            why = (check.part, nothing.severity, nothing.reason, nothing.remedy)
            blind.setdefault(why, []).append(check.name)
        except asyncpg.PostgresError as error:
            if isinstance(error, CONNECTION_FAULTS) and not isinstance(error, asyncpg.QueryCanceledError):
                raise
            locked |= isinstance(error, asyncpg.LockNotAvailableError)
            why = (check.part, "problem", *await _obstacle(examination, error))
            blind.setdefault(why, []).append(check.name)
        else:
            findings += found
            passed += [] if found else [check.name]
    findings += _blind_spots(blind)
    if locked:
        findings += workers.in_the_way(waits, {finding.object for finding in findings})
    return Report(
        schema,
        place.server,
        place.owner,
        tuple(check.name for check in checks),
        tuple(passed),
        tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))),
    )


async def _obstacle(examination: Examination, error: asyncpg.PostgresError) -> tuple[str, str]:
    """Why a check had no answer, and what would help."""
    text = str(error).partition("\n")[0]  # what follows is a hint for who writes SQL
    match error:
        case asyncpg.InsufficientPrivilegeError():
            login, owner = (await examination.place()).login, await examination.owner()
            grant = f"-- as an administrator:\nGRANT holdfast_operator TO {login};"
            remedy = grant if owner == OWNER else f"run it as {owner}, who owns them"
            return f"{login} may not read the tables of {examination.schema}", remedy
        case asyncpg.QueryCanceledError():
            return f"it took too long ({text})", "run it again when the server is less busy"
        case asyncpg.LockNotAvailableError():
            return f"another session holds a lock on a table ({text})", "run it again when that session is done"
        case asyncpg.SyntaxOrAccessError():
            if (other := await drift.other_release(examination)) is not None:
                return other
            return (
                f"the schema is not what this release needs ({text})",
                "put right what is reported as drift, and look again",
            )
    return f"{text} ({error.sqlstate})", "run it again; if that does not help, look into the server's log"


def _blind_spots(blind: dict[tuple[Part, Severity, str, str], list[str]]) -> Iterable[Finding]:
    """What was not seen must not be taken for what is not there, by a deployment or by who is on call."""
    for (_, severity, reason, remedy), names in blind.items():
        more = len(names) - _MOST_NAMED
        named = f"{', '.join(names[:_MOST_NAMED])}{f' and {more} more' if more > 0 else ''}"
        yield Finding(severity, COULD_NOT_LOOK, ", ".join(names), f"could not check {named}", reason, remedy)
