"""How the command line reports an error: one line for the problem, one for the remedy.

On a terminal they are broken at words.
"""

from __future__ import annotations

import errno
import re
import sys
from typing import Final

from rich.console import Console

from holdfast.cli.output import clean, wrapped
from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.installing import MissingExtra
from holdfast.operator import DATABASE_ERRORS, is_away, remedy_of
from holdfast.redact import redact_dsn

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# A connection that was there: a restart, a failover, an administrator.
_ENDED: Final = re.compile("clos|terminat")
_LOST: Final = "run it again; if it changes something, holdfast audit says whether it has"
REPORTED: Final = (HoldfastError, MissingExtra, *DATABASE_ERRORS)


def report(error: BaseException) -> int:
    """Print the error without its traceback, and return the exit code."""
    remedy = _remedy(error)
    _print(f"error: {in_one_line(error)}")
    if remedy:
        _print(f"try: {_one_line(remedy)}")
    return 2 if isinstance(error, ConfigurationError | MissingExtra) else 1


def in_one_line(error: BaseException) -> str:
    """Return what has happened, without the remedy."""
    return _one_line(_problem(error))


def _print(line: str) -> None:
    lines = wrapped(line, Console(stderr=True).width) if sys.stderr.isatty() else [line]
    print("\n".join(lines), file=sys.stderr)


def _problem(error: BaseException) -> str:
    problem = getattr(error, "problem", None)
    remedy = getattr(error, "remedy", None)
    if isinstance(problem, str):
        return f"{error.field} {problem}" if isinstance(error, ConfigurationError) else problem
    text = str(error) or type(error).__name__
    # Errors that carry a remedy end their text with it, and it gets a line of its own.
    return text.removesuffix(f"; {remedy}") if isinstance(remedy, str) else text


def _remedy(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno in _FULL:
        return "make room where the output goes, or send it elsewhere"
    remedy = getattr(error, "remedy", None)
    if isinstance(remedy, str):
        return remedy
    return remedy_of(error) or (_LOST if is_away(error) and _ENDED.search(str(error)) else "")


def _one_line(text: str) -> str:
    return clean(redact_dsn(" ".join(text.split())))
