"""The `holdfast` command.

Only this package takes settings from the environment, but for the number of the deployment (holdfast.generation).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from holdfast.installing import require_extra


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends in SystemExit with 0 (ok), 1 (a problem) or 2 (bad usage)."""
    try:
        require_extra("cli", "typer", "rich")
    except ModuleNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    from holdfast.cli.app import run

    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))
