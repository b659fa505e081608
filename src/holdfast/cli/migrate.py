"""holdfast migrate: status, apply, print."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from holdfast.cli import environment, output
from holdfast.cli.command_group import command_group
from holdfast.cli.databases import DatabaseOption
from holdfast.cli.environment import DsnOption, SchemaOption
from holdfast.cli.next_commands import address_place
from holdfast.operator import installation
from holdfast.operator.installation import SchemaState, Step

app = command_group("Bring the database to the schema this version needs.")


class Roles(StrEnum):
    """Whether the schema belongs to roles of its own."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


RolesOption = Annotated[
    Roles,
    typer.Option(
        "--roles",
        help="auto: roles of its own where this login can have them, else everything belongs to this login. "
        "always: refuse to do without. never: do without.",
    ),
]

TrustedRoles = Annotated[
    list[str] | None,
    typer.Option(
        "--trusted-role",
        metavar="ROLE",
        help="A role beside this login that may own the schema or what is in it; may be repeated.",
    ),
]


@app.command("status")
def status(
    dsn: DsnOption = None,
    database: DatabaseOption = None,
    schema: SchemaOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the migrations that are applied and pending, and the code that the schema serves. Changes nothing."""
    name = environment.schema(schema)
    found = asyncio.run(installation.state(environment.dsn(dsn, database), schema=name))
    if as_json:
        typer.echo(json.dumps(_as_json(name, found), indent=2))
    else:
        _show(name, found)


@app.command("apply")
def apply(
    dsn: DsnOption = None,
    database: DatabaseOption = None,
    schema: SchemaOption = None,
    roles: RolesOption = Roles.AUTO,
    trusted_role: TrustedRoles = None,
) -> None:
    """Apply what is pending. Several processes may do it at once."""
    name, address = environment.schema(schema), environment.dsn(dsn, database)
    console = Console(stderr=True)
    pending = len(asyncio.run(installation.state(address, schema=name)).pending)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("connecting", total=pending)

        def on_step(step: Step) -> None:
            progress.update(bar, description=step.text if step.action != "hint" else None)
            if step.action == "applied":
                progress.advance(bar)
            if step.action in ("wait", "retry", "applied", "hint"):
                progress.console.print(step.text, soft_wrap=True, highlight=False, markup=False)

        trusted = trusted_role or []
        done = asyncio.run(
            installation.apply(address, schema=name, roles=roles.value, trusted_roles=trusted, on_step=on_step)
        )
    typer.echo(f"schema {name}: {len(done)} migration{'s' if len(done) != 1 else ''} applied, now up to date")


@app.command("print")
def print_(
    schema: SchemaOption = None,
    roles: Annotated[bool, typer.Option("--roles/--no-roles", help="With or without the roles and grants.")] = True,
    since: Annotated[int, typer.Option("--since", min=0, help="Leave out the migrations up to this number.")] = 0,
    trusted_role: TrustedRoles = None,
) -> None:
    """Print the SQL for review, psql, Alembic or Django. Needs no database."""
    name, trusted = environment.schema(schema), trusted_role or []
    typer.echo(installation.printable(name, roles=roles, since=since, trusted_roles=trusted), nl=False)


def _as_json(schema: str, found: SchemaState) -> dict[str, object]:
    return {
        "schema": schema,
        "database_version": found.database_version,
        "code_version": found.code_version,
        "up_to_date": found.up_to_date,
        "functions_changed": found.functions_changed,
        "contract": None if found.contract is None else asdict(found.contract),
        "code_contract": installation.code_contract().provides,
        "applied": [
            {
                "version": line.version,
                "name": line.name,
                "checksum": line.checksum,
                "applied_at": line.applied_at.isoformat(),
                "applied_by": line.applied_by,
            }
            for line in found.applied
        ],
        "pending": [
            {"version": migration.version, "name": migration.name, "checksum": migration.checksum}
            for migration in found.pending
        ],
    }


def _show(schema: str, found: SchemaState) -> None:
    rows: list[tuple[object, ...]] = [
        (f"{line.version:04d}_{line.name}", "applied", line.applied_at, line.applied_by) for line in found.applied
    ]
    rows += [(str(migration), "pending", "", "") for migration in found.pending]
    if found.functions_changed:
        rows.append(("functions", "pending", "", ""))
    output.print_table(("migration", "state", "applied (UTC)", "by"), rows)
    output.print_line(
        f"schema {schema}: the database has version {found.database_version}, the code {found.code_version}"
        + ("" if not found.up_to_date else "; nothing to do")
    )
    if not found.database_version:
        output.print_line(
            f"there is no schema {schema} of Holdfast in this database: if there should be one, check the database in "
            f"{address_place()} and the name in --schema",
            "yellow",
        )
    if not found.up_to_date:
        output.print_hint("to apply what is pending: holdfast migrate apply")
    if found.contract is not None:
        output.print_line(
            f"the schema has {found.contract} and serves {found.contract.served}; "
            f"this code has contract {installation.code_contract().provides}"
        )
