"""The `holdfast` command.

Only this package takes settings from the environment, but for the number of the deployment (holdfast.generation).
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from holdfast.installing import require_extra


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends in SystemExit with 0 (ok), 1 (a problem), 2 (bad usage) or 130 (Ctrl-C)."""
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
