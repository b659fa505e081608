"""The kinds of transactions that a handler may take as `tx`, recognised by the class that it is annotated with.

Recognised by names, so that no library has to be installed for handlers that do not use it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class TransactionKind:
    """One class that `tx` may be, and what makes its objects."""

    package: str
    classes: tuple[str, ...]
    asynchronous: bool
    shown: str  # how code names the class
    source: str = ""  # what Worker(transactions=...) needs for it, in words; empty: nothing
    example: str = ""  # a name for that

    def __str__(self) -> str:
        return self.shown


# The worker opens these connections by itself.
ASYNCPG: Final = TransactionKind("asyncpg", ("Connection", "PoolConnectionProxy"), True, "asyncpg.Connection")
SQLALCHEMY_ASYNC_SESSION: Final = TransactionKind(
    "sqlalchemy", ("AsyncSession",), True, "sqlalchemy.ext.asyncio.AsyncSession", "an async_sessionmaker", "Session"
)
SQLALCHEMY_SESSION: Final = TransactionKind(
    "sqlalchemy", ("Session",), False, "sqlalchemy.orm.Session", "a sessionmaker", "Session"
)
SQLALCHEMY_ASYNC_CONNECTION: Final = TransactionKind(
    "sqlalchemy", ("AsyncConnection",), True, "sqlalchemy.ext.asyncio.AsyncConnection", "an AsyncEngine", "engine"
)
SQLALCHEMY_CONNECTION: Final = TransactionKind(
    "sqlalchemy", ("Connection",), False, "sqlalchemy.Connection", "an Engine", "engine"
)
PSYCOPG_ASYNC: Final = TransactionKind(
    "psycopg", ("AsyncConnection",), True, "psycopg.AsyncConnection", "a psycopg_pool.AsyncConnectionPool", "pool"
)
PSYCOPG: Final = TransactionKind(
    "psycopg", ("Connection",), False, "psycopg.Connection", "a psycopg_pool.ConnectionPool", "pool"
)
# Django knows its databases from its settings.
DJANGO: Final = TransactionKind(
    "django",
    ("BaseDatabaseWrapper", "ConnectionProxy"),
    False,
    "django.db.backends.base.base.BaseDatabaseWrapper",
)
KINDS: Final = (
    ASYNCPG,
    SQLALCHEMY_ASYNC_SESSION,
    SQLALCHEMY_SESSION,
    SQLALCHEMY_ASYNC_CONNECTION,
    SQLALCHEMY_CONNECTION,
    PSYCOPG_ASYNC,
    PSYCOPG,
    DJANGO,
)


_PACKAGES: Final = frozenset(kind.package for kind in KINDS)


def kind_of(annotation: Any) -> TransactionKind | None:
    """Return the kind of transactions of a class; None for a class of any other sort."""
    for cls in getattr(annotation, "__mro__", ()):
        package = cls.__module__.partition(".")[0]
        for kind in KINDS:
            if kind.package == package and cls.__name__ in kind.classes:
                return kind
    return None


def kinds_named(written: str) -> list[TransactionKind]:
    """Return the kinds that an annotation may mean if its name is not defined where the program runs."""
    named = re.findall(r"(?:(\w+)(?:\.\w+)*\.)?(\w+)(?![\w.])", written)
    return [kind for kind in KINDS if any(_may_name(kind, *each) for each in named)]


def _may_name(kind: TransactionKind, package: str, name: str) -> bool:
    # A package that is not known may be another name for one of them.
    return name in kind.classes and (package == kind.package or package not in _PACKAGES)


def shown(kinds: Iterable[TransactionKind]) -> str:
    """Return the names of kinds, for a text."""
    return ", ".join(map(str, kinds))
