"""The `holdfast` command. Only this package takes settings from the environment."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from holdfast.installing import missing_extra


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends in SystemExit with 0 (ok), 1 (a problem) or 2 (bad usage)."""
    try:
        from holdfast.cli.app import run

        code = run(list(sys.argv[1:] if arguments is None else arguments))
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(f"error: {missing_extra('cli', error)}", file=sys.stderr)
        code = 2
    sys.exit(code)
