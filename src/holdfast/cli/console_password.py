"""holdfast console password: the line of a person for the password file."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from holdfast.access.passwords import password_line
from holdfast.access.principal import Role
from holdfast.cli.console import RoleName
from holdfast.errors import ConfigurationError

_SHORTEST = 12


def console_password(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name to log in with; it stands in the audit.")],
    role: Annotated[RoleName, typer.Option("--role", help="What they may do.")] = RoleName.VIEWER,
) -> None:
    """Ask for a password and print the line for the password file; without a terminal it is read from the input."""
    if sys.stdin.isatty():
        given = typer.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    else:
        given = sys.stdin.readline().rstrip("\n")
    if len(given) < _SHORTEST:
        raise ConfigurationError("password", f"has fewer than {_SHORTEST} characters", "choose a longer one")
    typer.echo(password_line(name, Role.named(role), given))
