"""`manage.py holdfast ...`: the command line of Holdfast, on the database of the project."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

from django.core.management.base import BaseCommand, CommandError

from holdfast.integrations.django.configuration import Configuration

_LINES = 50  # of an error message


class Command(BaseCommand):  # type: ignore[misc]
    """Runs `holdfast` with the address of the project's database."""

    help = "Runs the command holdfast on the database of the project: worker, status, failed, doctor and the rest."
    requires_system_checks: tuple[()] = ()

    def run_from_argv(self, argv: list[str]) -> None:
        """Become the command: signals and the exit code are then its own."""
        command, environment = _command(argv[2:])
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(command[0], command, environment)  # of this interpreter

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("arguments", nargs=argparse.REMAINDER)

    def handle(self, *arguments: str, **options: Any) -> None:
        """Run the command for `call_command`, and write what it prints to `stdout` and `stderr` as it comes."""
        command, environment = _command([*arguments, *options.get("arguments", ())])
        pipe = subprocess.PIPE
        with (
            ThreadPoolExecutor(1, "holdfast-stderr") as beside,
            subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process,
        ):
            try:
                last = beside.submit(_copy, process.stderr, self.stderr)
                _copy(process.stdout, self.stdout)
                problem = "".join(last.result()).strip()
            except BaseException:
                process.terminate()
                raise
        if process.returncode != 0:
            raise CommandError(problem, returncode=process.returncode)


def _copy(source: IO[str] | None, to: Any) -> deque[str]:
    """Write every line, and return the last ones."""
    last: deque[str] = deque(maxlen=_LINES)
    for line in source or ():
        to.write(line, ending="", style_func=str)
        last.append(line)
    return last


def _command(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command and its environment: the settings, and the folder of manage.py to import from."""
    configuration = Configuration.read()
    path = os.pathsep.join(filter(None, [os.path.abspath(sys.path[0] or "."), os.environ.get("PYTHONPATH")]))
    own = {
        "HOLDFAST_DSN": configuration.dsn,
        "HOLDFAST_SCHEMA": configuration.schema,
        "PYTHONPATH": path,
        "_HOLDFAST_TYPED_AS": "python manage.py holdfast",  # in the remedies that it prints
        "_HOLDFAST_ADDRESS_IN": configuration.place,
    }
    return [sys.executable, "-m", "holdfast", *arguments], {**os.environ, **own}
