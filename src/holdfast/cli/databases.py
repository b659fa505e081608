"""The databases that a command may use: one address, or several with a name each.

HOLDFAST_DSN='orders=postgresql://… billing=postgresql://…', or --dsn once for each, names several. A worker serves all
of them, and some commands read all of them; every other command needs to know which one, from --database.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated

import typer

from holdfast.errors import ConfigurationError
from holdfast.names import database_name

DatabaseOption = Annotated[
    str | None,
    typer.Option("--database", metavar="NAME", help="One of several databases, by its name in HOLDFAST_DSN."),
]

_NAMED = re.compile(r"([^=:/@\s]*)=(\w+://.*)", re.DOTALL)
_COMMA = re.compile(r",[^=:/@\s,]+=\w+://")
_EXAMPLE = "orders=postgresql://… billing=postgresql://…"


def named(field: str, values: Iterable[str]) -> dict[str, str]:
    """Return addresses by name. One that has no name has the empty one, and is alone."""
    found: dict[str, str] = {}
    for value in values:
        for word in value.split() if _NAMED.match(value.strip()) else [value]:
            match = _NAMED.fullmatch(word)
            if match and _COMMA.search(match[2]):
                raise ConfigurationError(field, "has a comma between two addresses", f"put a space there: {_EXAMPLE}")
            if match is None and word is not value:
                _require_address(field, word)
            name, address = (database_name(field, match[1]), match[2]) if match else ("", word)
            if name in found:
                what = f"has two addresses of {name}" if name else "has two addresses without a name"
                raise ConfigurationError(field, what, f"give each database a name: {_EXAMPLE}")
            found[name] = address
    if "" in found and len(found) > 1:
        problem = "has an address without a name among several"
        raise ConfigurationError(field, problem, f"give each database a name: {_EXAMPLE}")
    return found


def _require_address(field: str, word: str) -> None:
    """Refuse a name among several whose address is none. What follows the name is not shown: it may be a password."""
    name, equals, _ = word.partition("=")
    if equals and name.isidentifier():
        raise ConfigurationError(
            field, f"has {name}= without an address", f"write {name}=postgresql://user@host:5432/database"
        )


def are_several(databases: Mapping[str, str]) -> bool:
    """Whether the databases have names, so that what is said of one has to say which one."""
    return "" not in databases


def one(databases: Mapping[str, str], database: str | None) -> str:
    """Return the address of the one database that a command is for."""
    if database is not None:
        if database not in databases:
            known = ", ".join(sorted(databases)) if are_several(databases) else "none: HOLDFAST_DSN has one address"
            raise ConfigurationError("--database", f"is {database}, which has no address", f"named are: {known}")
        return databases[database]
    if len(databases) > 1:
        names = ", ".join(sorted(databases))
        raise ConfigurationError("--database", "is missing, and there are several databases", f"name one of: {names}")
    return next(iter(databases.values()))
