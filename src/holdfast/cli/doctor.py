"""holdfast doctor: checks of the schema and of what may be in the way of delivery."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

import typer
from rich.text import Text

from holdfast.cli import output, several
from holdfast.cli.next_commands import as_typed
from holdfast.cli.options import JsonOption, Where, spread
from holdfast.operator import CHECKS, SEVERITIES, Finding, Operator, Report, Severity

_STYLES: dict[Severity, str] = {"problem": "bold red", "warning": "yellow", "note": "cyan"}

_MOST_LINES = 12
_TRY = "      try: "
_COMMENT = "-- "
_PROSE = re.compile(r"[a-z][^:;]*: ")  # a sentence before a statement, which begins with a capital

Line = tuple[tuple[str, str], ...]  # parts of it, each with its style


class Part(StrEnum):
    """Which half of the checks."""

    DRIFT = "drift"
    HEALTH = "health"


@spread
def doctor(
    where: Where,
    only: Annotated[
        Part | None,
        typer.Option("--only", help="drift: compare the schema with this release. health: everything else."),
    ] = None,
    as_json: JsonOption = False,
    list_checks: Annotated[bool, typer.Option("--list", help="List the checks without running them.")] = False,
) -> None:
    """Check the schema for drift and the installation for what blocks delivery. Exits with 1 if there is a problem."""
    if list_checks:
        _list(only, as_json)
        return

    async def examine(operator: Operator) -> Report:
        return await operator.doctor(only.value if only else None)

    if where.several:
        _examine_each(where.run_in_each(examine), as_json)
        return
    report = where.run(examine)
    if as_json:
        output.print_json(report)
    else:
        _show(report, where.database)
    if not report.healthy:
        raise typer.Exit(1)


def _examine_each(found: Mapping[str, Report | BaseException], as_json: bool) -> None:
    reports = several.read(found)
    if as_json:
        output.print_json({"databases": reports, "errors": several.errors(found)})
    else:
        for name, report in reports.items():
            output.print_line(f"database {name}", "bold")
            _show(report, name)
    several.end(found)
    if not all(report.healthy for report in reports.values()):
        raise typer.Exit(1)


def _list(only: Part | None, as_json: bool) -> None:
    checks = [check for check in CHECKS if only in (None, check.part)]
    if as_json:
        output.print_json([{"name": c.name, "part": c.part, "about": c.about, "codes": c.codes} for c in checks])
    else:
        output.print_table(("check", "part", "what must hold"), [(c.name, c.part, c.about) for c in checks])


# --- for people ---


def _show(report: Report, database: str | None) -> None:
    console = output.console()
    for line in _lines(report, console.width, database):
        # Names may be chosen by others: they must not move the cursor.
        console.print(Text.assemble(*((output.clean(text), style) for text, style in line)), soft_wrap=True)


def _lines(report: Report, width: int, database: str | None) -> list[Line]:
    lines: list[Line] = [((f"schema {report.schema} on Postgres {report.server}", "dim"),)]
    for severity in SEVERITIES:
        if found := report.of(severity):
            lines.append(((f"{len(found)} {severity}{'s' if len(found) > 1 else ''}", _STYLES[severity]),))
            lines += [line for finding in found for line in _finding(finding, width, database)]
    every, passed = len(report.checks), len(report.passed)
    verdict = f"all {every} checks passed" if passed == every else f"{passed} of {every} checks passed"
    lines.append(((verdict, "green" if passed == every else ""),))
    if report.statements_role is not None:
        lines.append(((f"Statements are for the schema's owner: SET ROLE {report.statements_role};", "dim"),))
    return lines


def _finding(finding: Finding, width: int, database: str | None) -> list[Line]:
    first, *others = _remedy_lines(as_typed(finding.remedy, database).splitlines(), width - len(_TRY))
    if len(others) > _MOST_LINES:
        # The text of a function, most likely.
        others = [*others[:_MOST_LINES], f"… {len(others) - _MOST_LINES} more lines, all of them with --json"]
    what, *more = output.wrapped(f"  {finding.code}  {finding.what}", width, hanging=4)
    return [
        ((f"  {finding.code}", "bold"), (what.removeprefix(f"  {finding.code}"), "")),
        *(((line, ""),) for line in more),
        *(((line, "dim"),) for line in output.wrapped(f"      {finding.evidence}", width)),
        ((_TRY, "dim"), (first, "")),
        *(((" " * len(_TRY) + other, ""),) for other in others),
    ]


def _remedy_lines(remedy: list[str], width: int) -> list[str]:
    """The lines of a remedy. A sentence is broken at words, and a comment into comments; a statement is not broken."""
    first, *others = remedy
    if first.startswith(_COMMENT):
        parts = output.wrapped(first.removeprefix(_COMMENT), width - len(_COMMENT))
        return [*(_COMMENT + part.strip() for part in parts), *others]
    if others or (first.endswith(";") and not _PROSE.match(first)):
        return remedy
    return [line.strip() for line in output.wrapped(first, width)]
