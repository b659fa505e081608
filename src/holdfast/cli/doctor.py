"""holdfast doctor: whether the installation is what it should be, and what is in its way."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.text import Text

from holdfast.cli import environment, output
from holdfast.cli.environment import DsnOption, SchemaOption
from holdfast.cli.options import JsonOption
from holdfast.names import schema_name
from holdfast.postgres import doctor as clinic
from holdfast.postgres.connection import Address, connect
from holdfast.postgres.doctor import Finding, Report, Severity
from holdfast.postgres.schema.ownership import OWNER

_STYLES: dict[Severity, str] = {"problem": "bold red", "warning": "yellow", "note": "cyan"}

_MOST_LINES = 12

Line = tuple[tuple[str, str], ...]  # parts of it, each with its style


class Part(StrEnum):
    """Which half of the checks."""

    DRIFT = "drift"
    HEALTH = "health"


def doctor(
    dsn: DsnOption = None,
    schema: SchemaOption = None,
    only: Annotated[
        Part | None,
        typer.Option("--only", help="drift: compare the schema with this release. health: everything else."),
    ] = None,
    as_json: JsonOption = False,
    list_checks: Annotated[bool, typer.Option("--list", help="Name every check, and look at nothing.")] = False,
) -> None:
    """Look for drift of the schema and for what is in the way of delivery. Exits with 1 when something is a problem."""
    if list_checks:
        _list(only, as_json)
        return
    name = schema_name(environment.schema(schema))
    report = asyncio.run(_examine(environment.dsn(dsn), name, only))
    if as_json:
        output.print_json(as_data(report))
    else:
        _show(report)
    if not report.healthy:
        raise typer.Exit(1)


async def _examine(address: str, schema: str, only: Part | None) -> Report:
    where = Address(address)
    await where.probe()
    connection = await connect(where, "doctor", statement_timeout=30)
    try:
        return await clinic.examine(connection, schema, only=only.value if only else None, pooled=where.pooled)
    finally:
        await connection.close(timeout=2)


def _list(only: Part | None, as_json: bool) -> None:
    checks = [check for check in clinic.CHECKS if only in (None, check.part)]
    if as_json:
        output.print_json([{"name": c.name, "part": c.part, "about": c.about, "codes": c.codes} for c in checks])
    else:
        output.print_table(("part", "check", "what must hold"), [(c.part, c.name, c.about) for c in checks])


# --- for machines ---


def as_data(report: Report) -> dict[str, Any]:
    """One document. `healthy` is false exactly when the command exits with 1."""
    return {
        "schema": report.schema,
        "server": report.server,
        "owner": report.owner,
        "healthy": report.healthy,
        "problems": len(report.of("problem")),
        "warnings": len(report.of("warning")),
        "notes": len(report.of("note")),
        "checks": report.checks,
        "passed": report.passed,
        "findings": report.findings,
    }


# --- for people ---


def _show(report: Report) -> None:
    console = output.console()
    for line in _lines(report):
        # Names may be chosen by others: they must not move the cursor.
        console.print(Text.assemble(*((output.clean(text), style) for text, style in line)), soft_wrap=True)


def _lines(report: Report) -> list[Line]:
    lines: list[Line] = [((f"schema {report.schema} on Postgres {report.server}", "dim"),)]
    for severity in clinic.SEVERITIES:
        if found := report.of(severity):
            lines.append(((f"{len(found)} {severity}{'s' if len(found) > 1 else ''}", _STYLES[severity]),))
            lines += [line for finding in found for line in _finding(finding)]
    every, passed = len(report.checks), len(report.passed)
    verdict = f"all {every} checks passed" if passed == every else f"{passed} of {every} checks passed"
    lines.append(((verdict, "green" if passed == every else ""),))
    if report.owner == OWNER and any(finding.remedy.endswith(";") for finding in report.findings):
        lines.append(((f"Statements are for the schema's owner: SET ROLE {OWNER};", "dim"),))
    return lines


def _finding(finding: Finding) -> list[Line]:
    first, *others = finding.remedy.splitlines()
    if len(others) > _MOST_LINES:
        # The text of a function, most likely.
        others = [*others[:_MOST_LINES], f"… {len(others) - _MOST_LINES} more lines, all of them with --json"]
    return [
        (("  " + finding.code, "bold"), ("  " + finding.what, "")),
        (("      " + finding.evidence, "dim"),),
        (("      try: ", "dim"), (first, "")),
        *((("           " + other, ""),) for other in others),
    ]
