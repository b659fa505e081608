"""How the command line says what went wrong: one line, and one line that helps."""

from __future__ import annotations

import socket
import sys
from typing import Final

import asyncpg

from holdfast.cli.output import clean
from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.redact import redact_dsn

REPORTED: Final = (HoldfastError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError)


def report(error: BaseException) -> int:
    """Print the error without its traceback, and return the exit code."""
    remedy = _remedy(error)
    print(f"error: {_one_line(_problem(error))}", file=sys.stderr)
    if remedy:
        print(f"try: {_one_line(remedy)}", file=sys.stderr)
    return 2 if isinstance(error, ConfigurationError) else 1


def _problem(error: BaseException) -> str:
    problem = getattr(error, "problem", None)
    remedy = getattr(error, "remedy", None)
    if isinstance(problem, str):
        return f"{error.field} {problem}" if isinstance(error, ConfigurationError) else problem
    text = str(error) or type(error).__name__
    # Errors that carry a remedy end their text with it, and it gets a line of its own.
    return text.removesuffix(f"; {remedy}") if isinstance(remedy, str) else text


def _remedy(error: BaseException) -> str:
    remedy = getattr(error, "remedy", None)
    if isinstance(remedy, str):
        return remedy
    match error:
        case asyncpg.InvalidAuthorizationSpecificationError():  # a wrong password is one of these
            return "check the user and the password in HOLDFAST_DSN"
        case asyncpg.InvalidCatalogNameError():
            return "create the database, or correct its name in HOLDFAST_DSN"
        case asyncpg.TooManyConnectionsError() | asyncpg.CannotConnectNowError():
            return "wait a moment and run it again"
        case asyncpg.InsufficientPrivilegeError():
            return "use a login that may do this"
        case socket.gaierror():
            return "check the host name in HOLDFAST_DSN"
        case OSError():
            return "check that Postgres runs, and the host and port in HOLDFAST_DSN"
    return ""


def _one_line(text: str) -> str:
    return clean(redact_dsn(" ".join(text.split())))
