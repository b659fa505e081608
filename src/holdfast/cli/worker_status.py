"""holdfast worker status: how the workers of this user on this machine are, for probes and for people."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
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
            for line in lines(health, shutil.get_terminal_size().columns if sys.stdout.isatty() else None):
                typer.echo(line)
    if not found:
        whose = "of this user" if name is None else f"of this user named {name}"
        problem, remedy = (
            (
                f"no worker {whose} runs here: none has a socket in {folder.path}",
                "start it (holdfast worker MODULE:REGISTRY), or set HOLDFAST_RUNTIME_DIR to the directory that it uses",
            )
            if private
            else (
                f"no worker {whose} can be asked: {folder.path} is not a directory of this user alone",
                "set HOLDFAST_RUNTIME_DIR, here and for the worker, to a directory that is",
            )
        )
        width = shutil.get_terminal_size().columns if sys.stderr.isatty() else None
        for line in (*_wrapped(f"error: {problem}", width), *_wrapped(f"try: {remedy}", width)):
            typer.echo(line, err=True)
    if not found or not all(health.ready if ready else health.live for health in found):
        raise typer.Exit(1)


def lines(health: Health, width: int | None) -> list[str]:
    """Return one line, or, where a terminal is too narrow for it, the verdict and each problem below it."""
    who = f"worker {health.name or '?'} (pid {health.pid})"
    whole = _printable(f"{who}: {health}")
    if width is None or len(whole) <= width:
        return [whole]
    parts = [f"{who}: {health.verdict}{health.known}", *(f"  {each}" for each in health.reasons)]
    return [line for part in parts for line in _wrapped(part, width)]


def _wrapped(text: str, width: int | None) -> list[str]:
    """Break a line at words; without a terminal it stays one. Not by `output`, whose imports a probe would wait for."""
    if width is None:
        return [_printable(text)]
    return textwrap.wrap(
        _printable(text), width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


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
