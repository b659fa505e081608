"""Finds what pytest's options name: the application's handlers, and the files and functions that make its tables."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigurationError
from holdfast.handlers import HandlerRegistry
from holdfast.testing.databases import Setup


def find_registry(target: str) -> HandlerRegistry:
    """Return the handler registry that `module:registry` names."""
    found = _named("holdfast_registry", target, "write module:registry, like app.handlers:registry")
    if not isinstance(found, HandlerRegistry):
        problem = f"names {type(found).__name__}, not a HandlerRegistry: {target!r}"
        raise ConfigurationError("holdfast_registry", problem, "write module:registry, like app.handlers:registry")
    return found


def find_setup(lines: Sequence[str], root: Path) -> list[Setup]:
    """Return the texts of the `.sql` files, and the functions, that the lines of `holdfast_setup` name."""
    remedy = "write the path of a .sql file, or module:function, a function of the database's address"
    found: list[Setup] = []
    for line in lines:
        if line.endswith(".sql"):
            if not (root / line).is_file():
                raise ConfigurationError("holdfast_setup", f"names a file that is not there: {root / line}", remedy)
            found.append((root / line).read_text(encoding="utf-8"))
            continue
        function = _named("holdfast_setup", line, remedy)
        if not callable(function):
            raise ConfigurationError("holdfast_setup", f"names nothing that can be called: {line!r}", remedy)
        found.append(function)
    return found


def _named(option: str, target: str, remedy: str) -> Any:
    module, _, name = target.partition(":")
    if not module or not name:
        raise ConfigurationError(option, f"is {target!r}", remedy)
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m pytest` has it
    try:
        return getattr(import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ConfigurationError(option, f"names what cannot be found: {error}", remedy) from error
