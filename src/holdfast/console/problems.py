"""What a page shows instead of its content: an error with its remedy, as the command line says it."""

from __future__ import annotations

from typing import Final

from starlette.responses import Response

from holdfast.console.page import Call
from holdfast.errors import ConfigurationError, NotFound, RemediedError
from holdfast.operator import DATABASE_ERRORS, DatabaseAway, OperatorsBusy, ReadTimeout, is_away, remedy_of
from holdfast.redact import redact_secrets

BY_TIME: Final = ("/events", "/failures", "/audit", "/requests", "/plans/new")  # lists with a filter by time
NARROW: Final = "1h"


def shown(call: Call, error: BaseException) -> Response:
    """Return the page of an error."""
    if isinstance(error, (DatabaseAway, OperatorsBusy, ReadTimeout)) or is_away(error):
        return _database(call, error)
    if isinstance(error, DATABASE_ERRORS):
        return _refused(call, error)
    status = 404 if isinstance(error, NotFound) else 409 if isinstance(error, RemediedError) else 400
    return _page(call, status, "This cannot be done", _problem(error), _remedy(error))


def _database(call: Call, error: BaseException) -> Response:
    outage = call.console.hub.outage
    title = "That took too long" if isinstance(error, ReadTimeout) else "The database does not answer"
    narrower = _narrower(call) if isinstance(error, ReadTimeout) else None
    since = outage.since if outage else None
    return _page(call, 503, title, _problem(error), _remedy(error), since=since, again=True, narrower=narrower)


def _narrower(call: Call) -> str | None:
    """Return the address of the same list of the last hour, if it can be narrowed so."""
    path = call.request.url.path.removeprefix(call.prefix)
    if path not in BY_TIME or call.query.get("since") == NARROW:
        return None
    kept = {name: value for name, value in call.query.items() if name not in ("since", "until", "before", "sample")}
    return call.url(path, **kept, since=NARROW)


def _refused(call: Call, error: BaseException) -> Response:
    # Its text may quote rows and parameters: the name of the error has to do.
    problem = f"it answered with {type(error).__name__}"
    remedy = remedy_of(error) or "try again; if it lasts, see the doctor, and the log of the database"
    return _page(call, 503, "The database has refused that", problem, redact_secrets(remedy))


def forbidden(call: Call) -> Response:
    """Return the page for what a role may not do."""
    remedy = "ask somebody who may, or for another role"
    return _page(call, 403, "Not with this role", f"{call.principal.name} is {call.principal.role}", remedy)


def forged(call: Call) -> Response:
    """Return the page for a form that is not ours."""
    return _page(
        call,
        403,
        "The form is not ours, or too old",
        "its token does not match",
        "go back, load the page, send it again",
    )


def missing(call: Call) -> Response:
    """Return the page for an address that leads nowhere."""
    return _page(call, 404, "There is no such page", "the address leads nowhere", "use the navigation, or search")


def _page(
    call: Call,
    status: int,
    title: str,
    problem: str,
    remedy: str,
    *,
    since: object = None,
    again: bool = False,
    narrower: str | None = None,
) -> Response:
    said = {"title": title, "problem": problem, "remedy": remedy, "since": since, "again": again}
    return call.render("problem.html", status, **said, narrower=narrower, status=status)


def _problem(error: BaseException) -> str:
    problem = getattr(error, "problem", None)
    if isinstance(problem, str):
        found = f"{error.field} {problem}" if isinstance(error, ConfigurationError) else problem
    else:
        found = str(error) or type(error).__name__
    return redact_secrets(found)


def _remedy(error: BaseException) -> str:
    remedy = getattr(error, "remedy", None)
    return redact_secrets(remedy if isinstance(remedy, str) else remedy_of(error))
