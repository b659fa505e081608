"""holdfast worker status: how the workers of this user on this machine are, for probes and for people."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from holdfast.cli import environment
from holdfast.observability.health import Health
from holdfast.observability.runtime_dir import NoAnswer, RuntimeDir, ask


def worker_status(
    ready: Annotated[
        bool, typer.Option("--ready", help="Exit with 0 only if it is ready: it delivers. Default: if it is live.")
    ] = False,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Only the worker with this --name. Default: all.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON, a list.")] = False,
) -> None:
    """Say how the worker on this machine is, without the database: exits with 0 if it is live, else with 1."""
    folder = RuntimeDir(environment.runtime_dir())
    private = _is_private(folder)
    # Where no directory was named, an answer from one that another user may have made proves nothing.
    sockets = folder.workers() if private or environment.has_runtime_dir() else []
    found = [health for pid, path in sockets if (health := _asked(pid, path)) is not None]
    if name is not None:
        found = [health for health in found if health.name in (name, "")]
    if as_json:
        typer.echo(json.dumps([health.as_data() for health in found]))
    else:
        for health in found:
            typer.echo(_printable(f"worker {health.name or '?'} (pid {health.pid}): {health}"))
    if not found:
        whose = "of this user" if name is None else f"of this user named {name}"
        problem = (
            f"no worker {whose} runs here: none has a socket in {folder.path}; "
            "start it, or set HOLDFAST_RUNTIME_DIR as it has it"
            if private
            else f"no worker {whose} can be asked: {folder.path} is not a directory of this user alone; "
            "set HOLDFAST_RUNTIME_DIR, here and for the worker, to one that is"
        )
        typer.echo(_printable(f"error: {problem}"), err=True)
    if not found or not all(health.ready if ready else health.live for health in found):
        raise typer.Exit(1)


def _is_private(folder: RuntimeDir) -> bool:
    try:
        return folder.private
    except OSError:
        return False


def _asked(pid: int, path: str) -> Health | None:
    try:
        return ask(path)
    except NoAnswer as silence:
        return Health(None, not_live=(str(silence),), pid=pid)
    except PermissionError:
        return Health(None, not_live=("its socket belongs to another user",), pid=pid)


def _printable(text: str) -> str:
    """One line that a terminal shows as it is."""
    return "".join(character if character.isprintable() else " " for character in text)
