"""Pages: what each is made of, and what it gets to answer a request.

How to add a page, say `/workers`:

1. `pages/workers.py`: an `async def show(call: Call) -> Response` that reads with `async with call.operator() as
   operator`, and returns `call.render("workers.html", active="workers", title="Workers",
   cli="holdfast workers list", workers=...)`. Filters are read from `call.query`, which has at most 20 parameters of
   500 characters, and with `call.number`.
2. `templates/workers.html`: `{% extends "layout.html" %}` and `{% block content %}`; macros are in `parts.html`
   (states, times, command lines, empty states), charts in `charts.py`. No inline style or script: the policy of the
   browser refuses it. What producers wrote needs nothing special: every text is escaped, and hidden characters are
   shown.
3. At the end of the module `PAGES = (Page("/workers", "workers", get=show),)`, and the module in `pages/__init__.py`.
   The entry of the navigation stands in `navigation.py` already; it is shown when a page has its name.

A change is the `post` of a page: the token, the origin and the role (`post_role`, by default operator) are checked
before it is called. It reads `call.form`, acts with `call.operator()`, whose actor is who asks, and returns
`call.back(path, said="3 replayed")`. Its form has `<input type="hidden" name="_token" value="{{ token() }}">`. Errors
of verbs (`ConfigurationError`, `Refused`, the database's) may pass through: they become a page with problem and remedy.
In templates `may(Role.OPERATOR)` says whether who looks may do something: what they may not do is absent. A form with
`data-dialog` shows the element `#confirm` of its answer in a dialog, where there is a script. Live parts: `live.py`.
Tests walk every page; one whose path has parameters gives an `example`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import parse_qsl, urlencode

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from holdfast.access.principal import Principal, Role
from holdfast.console import formatting
from holdfast.errors import ConfigurationError
from holdfast.operator import Operator, ReadTimeout

if TYPE_CHECKING:
    from holdfast.console.app import Console

T = TypeVar("T")
MOST_PARAMETERS: Final = 20
LONGEST_PARAMETER: Final = 500
LARGEST_FORM: Final = 1_000_000
MOST_FIELDS: Final = 12_000


@dataclass(frozen=True, slots=True)
class Page:
    """An address of the console."""

    path: str
    name: str
    get: Callable[[Call], Awaitable[Response]] | None = None
    post: Callable[[Call], Awaitable[Response]] | None = None
    role: Role = Role.VIEWER
    post_role: Role = Role.OPERATOR
    example: str | None = None  # the name of an address in tests, where the path has parameters


@dataclass(slots=True)
class Call:
    """One request for a page."""

    console: Console
    request: Request
    principal: Principal
    query: Mapping[str, str]
    form: Form = field(default_factory=lambda: Form([]))
    queries: int = 0
    began: float = field(default_factory=time.perf_counter)

    @property
    def now(self) -> datetime:
        return datetime.now(UTC)

    @property
    def zone_name(self) -> str:
        return self.request.cookies.get("holdfast_zone", "UTC")[:60]

    @property
    def prefix(self) -> str:
        """Where the console is mounted."""
        return str(self.request.scope.get("root_path", "")).rstrip("/")

    @property
    def api(self) -> str:
        """The address of the HTTP API, as who asks would write it."""
        return f"{self.request.url.scheme}://{self.request.url.netloc}{self.prefix}/api/v1"

    def may(self, role: Role) -> bool:
        """Whether who asks has a role."""
        return self.principal.may(role)

    def url(self, path: str = "/", /, **query: object) -> str:
        """Return the address of a page; parameters that are None or empty are left out."""
        given = {name.replace("_", "-"): value for name, value in query.items() if value not in (None, "")}
        return f"{self.prefix}{path}{'?' + urlencode(given, doseq=True) if given else ''}"

    @asynccontextmanager
    async def operator(self) -> AsyncIterator[Operator]:
        """An operator that acts as who asks."""
        async with self.console.operators.acting(self.principal.name) as operator:
            yield operator

    def number(self, name: str) -> int | None:
        """Return a parameter that is a whole number."""
        given = self.query.get(name)
        if given is None or given == "":
            return None
        if not given.isascii() or not given.isdecimal() or len(given) > 18:
            raise ConfigurationError(name, "is not a whole number", "write digits, or leave it out")
        return int(given)

    def render(self, template: str, http_status: int = 200, /, **values: Any) -> HTMLResponse:
        """Return a page."""
        return HTMLResponse(self.console.templates.render(self, template, values), http_status)

    def fragment(self, template: str, /, **values: Any) -> str:
        """Return a part of a page."""
        return self.console.templates.render(self, template, values)

    def back(self, path: str, /, said: str | None = None, **query: object) -> Response:
        """Return an answer to a form: the page to go to, which says what was done."""
        answer = RedirectResponse(self.url(path, **query), 303)
        if said is not None:
            self.console.guard.leave_message(self.request, answer, said)
        return answer


async def in_time(read: Awaitable[T], otherwise: T) -> tuple[T, bool]:
    """Return what a part of a page is made of, or something else where reading it took too long, and whether it did."""
    try:
        return await read, False
    except ReadTimeout:
        return otherwise, True


class Form:
    """The fields of a form, of which each may stand there several times."""

    def __init__(self, fields: list[tuple[str, str]]) -> None:
        self._fields = fields

    def get(self, name: str, default: str = "") -> str:
        """Return the first field of a name."""
        return next((value for key, value in self._fields if key == name), default)

    @property
    def fields(self) -> list[tuple[str, str]]:
        """All fields, in their order."""
        return list(self._fields)

    def plus(self, name: str, value: str) -> Form:
        """Return a form that has one field more."""
        return Form([*self._fields, (name, value)])

    def all(self, name: str) -> list[str]:
        """Return all fields of a name."""
        return [value for key, value in self._fields if key == name]

    def __contains__(self, name: str) -> bool:
        return any(key == name for key, _ in self._fields)


def read_query(request: Request) -> dict[str, str]:
    """Return the parameters of an address; of several with one name, the last."""
    text = request.scope["query_string"].decode("latin-1")
    try:
        found = parse_qsl(text, keep_blank_values=True, max_num_fields=MOST_PARAMETERS, errors="replace")
    except ValueError:
        raise ConfigurationError(
            "the address", f"has more than {MOST_PARAMETERS} parameters", "leave some out"
        ) from None
    for name, value in found:
        if len(name) > 60 or len(value) > LONGEST_PARAMETER:
            raise ConfigurationError(
                "the address", f"has a parameter of more than {LONGEST_PARAMETER} characters", "shorten it"
            )
    return dict(found)


async def read_form(request: Request) -> Form:
    """Return the fields of a form that was sent as browsers send them by default."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > LARGEST_FORM:
            raise ConfigurationError("the form", "is larger than a megabyte", "choose fewer at once")
    if kind != "application/x-www-form-urlencoded":
        return Form([])
    try:
        text = body.decode("utf-8")
        return Form(parse_qsl(text, keep_blank_values=True, max_num_fields=MOST_FIELDS))
    except ValueError:
        raise ConfigurationError("the form", "cannot be read", "go back and send it again") from None


def theme_of(request: Request) -> str:
    """Return the theme that was chosen: light, dark, or empty for that of the system."""
    chosen = request.cookies.get("holdfast_theme", "")
    return chosen if chosen in ("light", "dark") else ""


def zone_of(call: Call) -> Any:
    """Return the time zone that was chosen."""
    return formatting.zone(call.zone_name)
