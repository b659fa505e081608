"""The processes of `holdfast worker --processes`: their commands and their environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from holdfast.cli import tracing
from holdfast.cli.environment import LogLevel
from holdfast.cli.worker_databases import Databases
from holdfast.observability.logging import LogObserver
from holdfast.settings import WorkerSettings

_VARIABLES = {
    "service": "HOLDFAST_SERVICE",
    "environment": "HOLDFAST_ENVIRONMENT",
    "version": "HOLDFAST_SERVICE_VERSION",
}
# It serves the pages of all processes.
_OF_THE_PARENT = ("HOLDFAST_HEALTH", "HOLDFAST_METRICS")


def child_variables(
    databases: Databases, settings: WorkerSettings, redactor_name: str | None, level: LogLevel, log: LogObserver
) -> dict[str, str]:
    """The environment of the processes under the supervisor."""
    # Addresses hold passwords and travel in the environment, where the process list does not show them.
    variables = {name: value for name, value in os.environ.items() if name not in _OF_THE_PARENT}
    variables |= {**databases.variables(), "HOLDFAST_LOG_LEVEL": level}
    if settings.substrate:
        variables["HOLDFAST_SUBSTRATE"] = settings.substrate
    variables |= tracing.child_environment()
    if redactor_name:
        variables["HOLDFAST_REDACT"] = redactor_name
    variables |= {"HOLDFAST_LOG_SUCCESSES": log.successes, "HOLDFAST_LOG_SAMPLE": str(log.sample)}
    return variables | {_VARIABLES[name]: value for name, value in log.application.items()}


def child_command(arguments: Sequence[str], settings: WorkerSettings, number: int, lifeline: int) -> list[str]:
    """The command of one process under the supervisor. Of the `arguments`, the first is the registry."""
    options: dict[str, object] = {
        "--concurrency": settings.concurrency,
        "--concurrency-at-most": settings.concurrency_at_most,
        "--threads": settings.threads,
        "--connections": settings.connections,
        "--batch": settings.batch,
        "--lease": settings.lease,
        "--poll-interval": settings.poll_interval,
        "--grace": settings.grace,
        "--loop-patience": settings.loop_patience,
        "--settle-after": settings.settle_after,
        "--generation": settings.generation,
        "--schema": settings.schema,
        "--dead-letters": settings.dead_letters,
        "--lifeline": lifeline,
    }
    # Also without a chosen name: the process that takes a dead one's place has its name, and replaces it in the list.
    options["--name"] = f"{settings.shown_name}/{number}"
    # -P: the directory we stand in must not come before the installed packages.
    command = [sys.executable, "-P", "-c", "from holdfast.cli import main; main()", "worker", *arguments]
    command += [word for option, value in options.items() for word in (option, str(value))]
    command += [word for channel in settings.channels for word in ("--channel", channel)]
    return command + ["--no-listen"] * (not settings.listen) + ["--no-sweep"] * (not settings.sweep)
