"""The `holdfast` command.

Only this package takes settings from the environment, but for the number of the deployment (holdfast.generation).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from holdfast.installing import require_extra


def _open_closed_streams() -> None:
    """Let a stream that the caller has closed, as `>&-` and some supervisors do, be one that nobody reads."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (as long as the process lives)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends in SystemExit with 0 (ok), 1 (a problem), 2 (bad usage) or 130 (Ctrl-C)."""
    _open_closed_streams()
    try:
        require_extra("cli", "typer", "rich")
    except ModuleNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        from holdfast.cli.app import run

        sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))
    except KeyboardInterrupt:  # while modules are imported; typer catches one that meets a command
        sys.exit(128 + signal.SIGINT)
