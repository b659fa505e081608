"""Where settings of the command line come from: the option, else the environment."""

from __future__ import annotations

import getpass
import os
import socket
import sys
from enum import StrEnum
from typing import Annotated

import typer

from holdfast.errors import ConfigurationError
from holdfast.generation import deployment_generation
from holdfast.redact import redact_dsn


class LogLevel(StrEnum):
    """What is printed of the log: this and what is more important."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


DsnOption = Annotated[
    str | None,
    typer.Option(
        "--dsn",
        metavar="URL",
        help="Address of the database. Default: HOLDFAST_DSN, else DATABASE_URL. "
        "A password belongs there and not here, where the process list shows it.",
    ),
]
LogLevelOption = Annotated[
    LogLevel | None,
    typer.Option("--log-level", help="The least important lines to print. Default: HOLDFAST_LOG_LEVEL, else info."),
]
SchemaOption = Annotated[
    str | None,
    typer.Option("--schema", metavar="NAME", help="Schema of Holdfast. Default: HOLDFAST_SCHEMA, else core."),
]


def dsn(option: str | None) -> str:
    """The database's address."""
    found = option or os.environ.get("HOLDFAST_DSN") or os.environ.get("DATABASE_URL")
    if not found:
        raise ConfigurationError(
            "HOLDFAST_DSN", "is not set", "export HOLDFAST_DSN=postgresql://user@host:5432/database"
        )
    if option and redact_dsn(option) != option:
        print("note: --dsn shows its password in the process list; HOLDFAST_DSN does not", file=sys.stderr)
    return found


def listen_dsn(option: str | None) -> str | None:
    """The address for LISTEN, when it is not the one for everything else."""
    return option or os.environ.get("HOLDFAST_LISTEN_DSN") or None


def sentry_dsn() -> str | None:
    """Return the Sentry DSN for dead letters."""
    return os.environ.get("SENTRY_DSN") or None


def log_level(option: LogLevel | None) -> LogLevel:
    """What is printed of the log."""
    found = option or os.environ.get("HOLDFAST_LOG_LEVEL") or LogLevel.INFO
    try:
        return LogLevel(found.lower())
    except ValueError:
        choices = ", ".join(LogLevel)
        raise ConfigurationError("HOLDFAST_LOG_LEVEL", "is not a level of the log", f"set one of: {choices}") from None


def editor() -> str:
    """The command that edits a file."""
    return os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"


def redactor(option: str | None) -> str | None:
    """The name of the function that is applied to error texts."""
    return option or os.environ.get("HOLDFAST_REDACT") or None


def schema(option: str | None) -> str:
    """The schema's name."""
    return option or os.environ.get("HOLDFAST_SCHEMA") or "core"


def generation(option: int | None) -> int:
    """The number of this deployment."""
    return deployment_generation() if option is None else option


def actor(option: str | None) -> str:
    """Who acts, for the audit."""
    found = option or os.environ.get("HOLDFAST_ACTOR")
    if found:
        return found
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # a container's user may have no name
        return f"{os.getuid()}@{socket.gethostname()}"
