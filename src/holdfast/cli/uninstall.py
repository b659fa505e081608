"""holdfast uninstall: asks twice, because the events cannot be recovered."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer

from holdfast.cli import environment, output
from holdfast.cli.databases import DatabaseOption
from holdfast.cli.environment import DsnOption, SchemaOption
from holdfast.cli.options import ask
from holdfast.errors import ConfigurationError
from holdfast.names import schema_name
from holdfast.operator import installation


def uninstall(
    dsn: DsnOption = None,
    database: DatabaseOption = None,
    schema: SchemaOption = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask for confirmation. Needs --i-know-this-deletes as well.")
    ] = False,
    deletes: Annotated[
        str | None,
        typer.Option("--i-know-this-deletes", metavar="SCHEMA", help="The schema's name, once more."),
    ] = None,
) -> None:
    """Remove Holdfast from the database, with every event it holds."""
    name, address = schema_name(environment.schema(schema)), environment.dsn(dsn, database)
    if (yes or deletes is not None) and not (yes and deletes == name):
        raise ConfigurationError(
            "--i-know-this-deletes",
            f"and --yes go together and name the schema {name}",
            f"holdfast uninstall --yes --i-know-this-deletes {name}",
        )
    holdings = asyncio.run(installation.holdings(address, name))
    if not yes:
        _ask(holdings)
    removal = asyncio.run(installation.uninstall(address, name))
    typer.echo(f"schema {name} removed, {output.events(holdings.events)} deleted")
    if removal.roles_dropped:
        output.print_line(f"roles removed: {', '.join(removal.roles_dropped)}")
    if removal.roles_kept:
        output.print_line(f"roles kept (used elsewhere, or not yours to drop): {', '.join(removal.roles_kept)}")


def _ask(holdings: installation.Holdings) -> None:
    if not sys.stdin.isatty():
        raise ConfigurationError(
            "uninstall",
            "needs confirmation, and there is no terminal to ask on",
            f"holdfast uninstall --yes --i-know-this-deletes {holdings.schema}",
        )
    output.print_line(f"The schema {holdings.schema} holds {output.events(holdings.events)}.")
    output.print_line(f"Its tables: {', '.join(holdings.tables)}.")
    if typer.prompt("Type the name of the schema to go on") != holdings.schema:
        typer.echo("That is not its name. Nothing was changed.", err=True)
        raise typer.Exit(1)
    ask(f"{output.events(holdings.events)} will be lost for good. Go on?")
