"""holdfast console token: a new token, and its line for the token file."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from holdfast.access.principal import Role
from holdfast.access.tokens import new_token, token_line
from holdfast.cli.console import RoleName


def console_token(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose token it is; the name stands in the audit.")],
    role: Annotated[RoleName, typer.Option("--role", help="What it may be used for.")] = RoleName.VIEWER,
) -> None:
    """Print a new token to stderr, once, and the line for the token file to stdout."""
    token = new_token()
    typer.echo(token_line(name, Role.named(role), token))
    print(f"the token, which is not shown again: {token}", file=sys.stderr)
