"""Lazy packages: each name is imported when it is first used, so that a command does not import what others need."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package whose names have their homes in other modules.

    Modules of the package are names of it too, as they are where everything is imported at once.
    """

    def find(name: str) -> Any:
        if name in homes:
            home = import_module(homes[name])
            found = getattr(home, name) if hasattr(home, name) else import_module(f"{homes[name]}.{name}")
        elif name.startswith("_"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        else:
            try:
                found = import_module(f"{package}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{package}.{name}":
                    raise
                raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
        setattr(sys.modules[package], name, found)
        return found

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return find, names
