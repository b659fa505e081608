"""Where settings of the command line come from: the option, else the environment."""

from __future__ import annotations

import getpass
import os
import socket
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Literal

import typer

from holdfast.checks import quoted
from holdfast.cli import databases
from holdfast.errors import ConfigurationError
from holdfast.generation import deployment_generation
from holdfast.redact import redact_dsn
from holdfast.settings import CONCURRENCY_REMEDY


class LogLevel(StrEnum):
    """What is printed of the log: this and what is more important."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogSuccesses(StrEnum):
    """Whether each event that was handled is a line of the log, and of which level."""

    NEVER = "never"
    DEBUG = "debug"
    INFO = "info"


DsnOption = Annotated[
    list[str] | None,
    typer.Option(
        "--dsn",
        metavar="[NAME=]URL",
        help="Address of the database; several, each with a name. Default: HOLDFAST_DSN, else DATABASE_URL. "
        "A password belongs there and not here, where the process list shows it.",
    ),
]
LogLevelOption = Annotated[
    LogLevel | None,
    typer.Option(
        "--log-level",
        case_sensitive=False,
        help="The least important lines to print. Default: HOLDFAST_LOG_LEVEL, else info.",
    ),
]
SchemaOption = Annotated[
    str | None,
    typer.Option("--schema", metavar="NAME", help="Schema of Holdfast. Default: HOLDFAST_SCHEMA, else core."),
]


def dsn(option: Sequence[str] | None, database: str | None = None) -> str:
    """The address of the one database that a command is for."""
    return databases.one(addresses(option), database)


def addresses(option: Sequence[str] | None) -> dict[str, str]:
    """The addresses of the databases by their names; of one that has no name, by the empty name."""
    given = [each for each in option or () if each]
    variable = os.environ.get("HOLDFAST_DSN") or os.environ.get("DATABASE_URL")
    if not given and not variable:
        raise ConfigurationError(
            "HOLDFAST_DSN", "is not set", "export HOLDFAST_DSN=postgresql://user@host:5432/database"
        )
    if any(redact_dsn(each) != each for each in given):
        print("note: --dsn shows its password in the process list; HOLDFAST_DSN does not", file=sys.stderr)
    return databases.named("--dsn", given) if given else databases.named("HOLDFAST_DSN", [variable or ""])


def listen_addresses(option: Sequence[str] | None) -> dict[str, str]:
    """The addresses for LISTEN, where they are not those for everything else, by the names of the databases."""
    given = [each for each in option or () if each]
    variable = os.environ.get("HOLDFAST_LISTEN_DSN")
    return (
        databases.named("--listen-dsn", given)
        if given
        else databases.named("HOLDFAST_LISTEN_DSN", filter(None, [variable]))
    )


def substrate(option: str | None) -> str | None:
    """The address of the broker that carries events, if one does."""
    return option or os.environ.get("HOLDFAST_SUBSTRATE") or None


def relay_secrets() -> tuple[str, ...]:
    """The secrets that relays of several databases share, separated by commas or spaces; the first one signs."""
    return tuple(os.environ.get("HOLDFAST_RELAY_SECRETS", "").replace(",", " ").split())


def sentry_dsn() -> str | None:
    """Return the Sentry DSN for dead letters."""
    return os.environ.get("SENTRY_DSN") or None


def sentry_environment(default: str | None) -> str | None:
    """Return the environment of what Sentry is told; the worker's own, unless Sentry has one of its own."""
    return os.environ.get("SENTRY_ENVIRONMENT") or default


def sentry_release(default: str | None) -> str | None:
    """Return the release of what Sentry is told; the worker's own, unless Sentry has one of its own."""
    return os.environ.get("SENTRY_RELEASE") or default


def otel_disabled() -> bool:
    """Return whether OpenTelemetry is not wanted: in this process, or of Holdfast."""
    disabled = os.environ.get("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "").split(",")
    return os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or bool(
        {"holdfast", "*"} & {name.strip() for name in disabled}
    )


def otel_provider() -> bool:
    """Return whether the environment names a tracer provider, which OpenTelemetry then makes by itself."""
    return bool(os.environ.get("OTEL_PYTHON_TRACER_PROVIDER"))


def otel_export() -> str | None:
    """Return the name of a variable that asks for traces to be exported."""
    found = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"),
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
        "OTEL_TRACES_EXPORTER": os.environ.get("OTEL_TRACES_EXPORTER"),
    }
    return next((name for name, value in found.items() if value and value != "none"), None)


def runtime_dir() -> str:
    """The directory with the sockets of the workers of this user on this machine."""
    temporary = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108 (RuntimeDir refuses one of another user)
    return os.environ.get("HOLDFAST_RUNTIME_DIR") or os.path.join(temporary, f"holdfast-{os.getuid()}")


def has_runtime_dir() -> bool:
    """Whether the directory was chosen."""
    return bool(os.environ.get("HOLDFAST_RUNTIME_DIR"))


def service_manager() -> tuple[str, float | None] | None:
    """The socket of the service manager and the time of its watchdog, for this process and not for its children."""
    path = os.environ.pop("NOTIFY_SOCKET", "")
    watchdog = os.environ.pop("WATCHDOG_USEC", "")
    watched = os.environ.pop("WATCHDOG_PID", "") in ("", str(os.getpid()))
    if not path.startswith(("/", "@")):
        return None
    return path, int(watchdog) / 1_000_000 if watched and watchdog.isdecimal() and int(watchdog) else None


def health(option: str | None) -> tuple[str, str] | None:
    """Where health is served, after the name of what says so; None: nowhere."""
    return _named("--health", option, "HOLDFAST_HEALTH", os.environ.get("HOLDFAST_HEALTH"))


def metrics(option: str | None) -> tuple[str, str] | None:
    """Where metrics are served, after the name of what says so; None: nowhere."""
    return _named("--metrics", option, "HOLDFAST_METRICS", os.environ.get("HOLDFAST_METRICS"))


def _named(option: str, given: str | None, variable: str, found: str | None) -> tuple[str, str] | None:
    if given is not None:
        return option, given
    return (variable, found) if found else None


def log_level(option: LogLevel | None) -> LogLevel:
    """What is printed of the log."""
    found = option or os.environ.get("HOLDFAST_LOG_LEVEL") or LogLevel.INFO
    try:
        return LogLevel(found.lower())
    except ValueError:
        choices = ", ".join(LogLevel)
        raise ConfigurationError("HOLDFAST_LOG_LEVEL", "is not a level of the log", f"set one of: {choices}") from None


def log_successes(option: LogSuccesses | None, level: LogLevel) -> LogSuccesses:
    """The level of an entry for each event that was handled."""
    found = option or os.environ.get("HOLDFAST_LOG_SUCCESSES")
    if not found:
        return LogSuccesses.DEBUG if level is LogLevel.DEBUG else LogSuccesses.NEVER
    try:
        return LogSuccesses(found.lower())
    except ValueError:
        remedy = f"set one of: {', '.join(LogSuccesses)}"
        raise ConfigurationError("HOLDFAST_LOG_SUCCESSES", "is not a level of successes", remedy) from None


def log_sample(option: float | None) -> float:
    """The share of those entries that is written."""
    if option is not None:
        return option
    found = os.environ.get("HOLDFAST_LOG_SAMPLE") or "1"
    try:
        share = float(found)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigurationError("HOLDFAST_LOG_SAMPLE", "is not a share", "set a number from 0 to 1, like 0.01")
    return share


def service(option: str | None) -> str | None:
    """The application's name in logs."""
    return option or os.environ.get("HOLDFAST_SERVICE") or None


def deployment_environment(option: str | None) -> str | None:
    """The name of the environment in logs, like production."""
    return option or os.environ.get("HOLDFAST_ENVIRONMENT") or None


def service_version(option: str | None) -> str | None:
    """The application's version in logs."""
    return option or os.environ.get("HOLDFAST_SERVICE_VERSION") or None


def console_secret() -> str | None:
    """What signs the cookies of the console."""
    return os.environ.get("HOLDFAST_CONSOLE_SECRET") or None


def oidc_secret() -> str | None:
    """The secret of the console, as a client of an OpenID provider."""
    return os.environ.get("HOLDFAST_OIDC_SECRET") or None


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


def concurrency(option: str) -> int | Literal["auto"]:
    """The concurrency of a worker: a number, or "auto"."""
    if option == "auto":
        return "auto"
    if not option.isdecimal():
        raise ConfigurationError("--concurrency", f"is {quoted(option)}", CONCURRENCY_REMEDY)
    return int(option)


def actor(option: str | None) -> str:
    """Who acts, for the audit."""
    found = option or os.environ.get("HOLDFAST_ACTOR")
    if found:
        return found
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # a container's user may have no name
        return f"{os.getuid()}@{socket.gethostname()}"
