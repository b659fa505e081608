"""How the command line reports an error: one line for the problem, one for the remedy.

On a terminal they are broken at words.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from typing import Final

from holdfast.brokers.engine import BrokerUnavailable
from holdfast.cli.next_commands import as_typed
from holdfast.cli.output import clean, error_width, wrapped
from holdfast.errors import ConfigurationError, HoldfastError, LifespanError, SchemaMismatch
from holdfast.installing import MissingExtra
from holdfast.operator import DATABASE_ERRORS, is_away, remedy_of
from holdfast.redact import redact_dsn

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# A connection that was there: a restart, a failover, an administrator.
_ENDED: Final = re.compile("clos|terminat")
# What a broker's client says when there is no answer at all.
_UNREACHED: Final = re.compile("be reached|did not answer|takes events|[Cc]onnect")
# What Python says of an address that takes no connection, and asyncpg of a server that is none of Postgres.
_REFUSED: Final = re.compile(r"\[Errno (\d+)\] Connect call failed \('([^']*)', (\d+)[^)]*\)")
_NO_POSTGRES: Final = "unexpected connection_lost() call"
_LOST: Final = "run it again; if it changes something, see first whether it has: holdfast audit"
_SILENT: Final = "the database was reached, and did not answer in time"
REPORTED: Final = (HoldfastError, MissingExtra, *DATABASE_ERRORS)


def report(error: BaseException, address: str = "HOLDFAST_DSN", database: str | None = None) -> int:
    """Print the error without its traceback, and return the exit code.

    `address`: where that of the database stands. `database`: the one of several that was read.
    """
    of = f" of {database}" if database else ""
    remedy = as_typed(_one_line(_remedy(error, f"{address}{of}")), database)
    _print(f"error: {in_one_line(error, address)}")
    if remedy:
        _print(f"try: {remedy}")
    return 2 if isinstance(error, ConfigurationError | MissingExtra) else 1


def in_one_line(error: BaseException, address: str = "HOLDFAST_DSN") -> str:
    """Return what has happened, without the remedy."""
    return _one_line(_problem(error, address))


def _print(line: str) -> None:
    print("\n".join(wrapped(line, error_width())), file=sys.stderr)


def _problem(error: BaseException, address: str) -> str:
    problem = getattr(error, "problem", None)
    remedy = getattr(error, "remedy", None)
    if isinstance(problem, str):
        if not isinstance(error, ConfigurationError):
            return problem
        # An argument in Python, and here what the user has set.
        return f"{address if error.field == 'dsn' else error.field} {problem}"
    text = _plain(str(error)) or (_SILENT if isinstance(error, TimeoutError) else type(error).__name__)
    # Errors that carry a remedy end their text with it, and it gets a line of its own.
    return text.removesuffix(f"; {remedy}") if isinstance(remedy, str) else text


def _plain(text: str) -> str:
    """Return what a client says about a connection in the words of who runs the server."""
    if text == _NO_POSTGRES:
        return "the connection was closed before a Postgres server had answered"
    return _REFUSED.sub(lambda found: f"no connection to {found[2]}:{found[3]}: {os.strerror(int(found[1]))}", text)


def _remedy(error: BaseException, address: str) -> str:
    if isinstance(error, OSError) and error.errno in _FULL:
        return "make room where the output goes, or send it elsewhere"
    remedy = getattr(error, "remedy", None)
    if isinstance(error, SchemaMismatch) and error.is_missing:
        return f"check the database in {address} and the name in --schema; to install it there: {error.remedy}"
    if isinstance(remedy, str) and remedy:
        return remedy
    if isinstance(error, LifespanError):
        return "see to what it opens, or correct it; --debug shows where it happened"
    if isinstance(error, BrokerUnavailable) and _UNREACHED.search(str(error)):
        return "check that the broker runs, and the host and port in its address"
    if isinstance(error, TimeoutError) and not str(error):  # a statement that was sent
        return f"see whether the server is frozen or overloaded; then {_LOST}"
    return remedy_of(error, address) or (_LOST if is_away(error) and _ENDED.search(str(error)) else "")


def _one_line(text: str) -> str:
    return clean(redact_dsn(" ".join(text.split())))
