"""Errors as problem+json (RFC 9457): the field, the problem and the remedy, and never a value or a traceback."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from starlette.responses import Response

from holdfast.errors import ConfigurationError, HoldfastError, NotFound, PublishError, RemediedError, SchemaMismatch
from holdfast.installing import MissingExtra
from holdfast.operator import DATABASE_ERRORS, Blocked, DatabaseAway, OperatorsBusy, ReadTimeout, Refused
from holdfast.redact import redact_dsn

MEDIA_TYPE: Final = "application/problem+json"
TITLES: Final[Mapping[int, str]] = {
    400: "the request cannot be read",
    401: "no token, or one that is not known",
    403: "this role may not do that",
    404: "there is no such thing",
    405: "the method is not allowed",
    409: "refused in the present state",
    413: "the request is too large",
    415: "the request is not JSON",
    421: "this host name is not answered for",
    422: "an argument is not acceptable",
    500: "the server has failed",
    503: "the database cannot be used at the moment",
    504: "the read took too long",
}
_LONGEST: Final = 1_000


class Problem(Response):
    """An answer that says what is wrong."""

    media_type = MEDIA_TYPE

    def __init__(
        self,
        status: int,
        problem: str,
        remedy: str,
        *,
        field: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        content: dict[str, Any] = {
            "type": "about:blank",
            "title": TITLES[status],
            "status": status,
            "detail": _clean(f"{field} {problem}" if field else problem),
            "problem": _clean(problem),
            "remedy": _clean(remedy),
        }
        if field is not None:
            content["field"] = _clean(field)
        extra = {"Retry-After": "1"} if status in (503, 504) else {}
        super().__init__(json.dumps(content, ensure_ascii=False), status, {**extra, **(headers or {})})


def problem_of(error: Exception) -> Problem:
    """Return the answer to an error of a verb. What is not known is an error of the server, and says nothing else."""
    match error:
        case NotFound():
            return Problem(404, error.problem, error.remedy, field=error.field)
        case ConfigurationError() | PublishError():
            return Problem(422, error.problem, error.remedy, field=error.field)
        case ReadTimeout():
            return Problem(504, error.problem, error.remedy)
        case Refused():
            return Problem(409, error.problem, error.remedy)
        case Blocked() | OperatorsBusy() | DatabaseAway():
            return Problem(503, error.problem, error.remedy)
        case SchemaMismatch():
            return Problem(503, "the schema and this release do not work together", error.remedy)
        case RemediedError():
            return Problem(409, error.problem, error.remedy)
        case MissingExtra():
            return Problem(503, "the server lacks a package for this", str(error))
        case HoldfastError():
            return Problem(409, type(error).__name__, "see the log of the server")
    if isinstance(error, DATABASE_ERRORS):
        # Its text may quote rows, parameters or addresses.
        return Problem(503, "the database refused it, or cannot be reached", "try again; if it lasts, run the doctor")
    return Problem(500, "an error that nobody expected", "see the log of the server")


def _clean(text: str) -> str:
    return redact_dsn(text)[:_LONGEST]
