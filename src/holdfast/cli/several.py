"""What commands print that read several databases: the lines of each, and which of them could not be read."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TypeVar

import typer

from holdfast.cli.problems import in_one_line, report

T = TypeVar("T")


def read(found: Mapping[str, T | BaseException]) -> dict[str, T]:
    """Return what was read, by the names of the databases."""
    return {name: result for name, result in found.items() if not isinstance(result, BaseException)}


def errors(found: Mapping[str, T | BaseException]) -> dict[str, str]:
    """Return why the others were not read."""
    return {name: in_one_line(result) for name, result in found.items() if isinstance(result, BaseException)}


def end(found: Mapping[str, T | BaseException]) -> None:
    """Say which databases were not read, and end the command with 1 if there is one."""
    failed = {name: result for name, result in found.items() if isinstance(result, BaseException)}
    for name, error in failed.items():
        print(f"database {name}:", file=sys.stderr)
        report(error, database=name)
    if failed:
        raise typer.Exit(1)
