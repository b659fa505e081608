"""Templates, and what all of them may use."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from holdfast.access.principal import Role
from holdfast.console import charts, formatting, navigation
from holdfast.console.curl import curl_of
from holdfast.console.page import theme_of
from holdfast.console.security import NONCE
from holdfast.console.settings import ConsoleSettings
from holdfast.installing import package_version

if TYPE_CHECKING:
    from holdfast.console.page import Call

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class View:
    """Where a template is shown, as far as it may matter to what it writes."""

    prefix: str
    zone: str
    live: bool = False  # a fragment for everybody: the browser fills in how long ago things were

    def url(self, path: str = "/", /, **query: object) -> str:
        """Return the address of a page."""
        given = {name.replace("_", "-"): value for name, value in query.items() if value not in (None, "")}
        return f"{self.prefix}{quote(path, safe='/:@!$()*,;=~+')}{'?' + urlencode(given, doseq=True) if given else ''}"

    def ago(self, value: datetime | None) -> Markup:
        """Return a moment as how long ago it was, with the moment itself on hover and focus."""
        if value is None:
            return Markup("never")
        shown = "" if self.live else formatting.ago(value, datetime.now(UTC))
        full = formatting.moment(value, formatting.zone(self.zone))
        return Markup('<time data-ago datetime="{}" title="{}">{}</time>').format(value.isoformat(), full, shown)

    def at(self, value: datetime | None, form: str = "full") -> Markup:
        """Return a moment."""
        if value is None:
            return Markup("–")
        zone = formatting.zone(self.zone)
        full = formatting.moment(value, zone)
        return Markup('<time datetime="{}" title="{}">{}</time>').format(
            value.isoformat(), full, formatting.moment(value, zone, form)
        )


class Templates:
    """The templates of the package."""

    def __init__(self, settings: ConsoleSettings, schema: str, pages: frozenset[str]) -> None:
        self._environment = Environment(
            loader=FileSystemLoader(FOLDER / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=formatting.finalize,
        )
        self._environment.filters.update(
            count=formatting.count,
            duration=formatting.duration,
            first_line=formatting.first_line,
            percent=formatting.percent,
            short_id=formatting.short_id,
        )
        shown = tuple(
            (title, tuple(entry for entry in entries if entry.name in pages)) for title, entries in navigation.SECTIONS
        )
        self._environment.globals.update(
            charts=charts,
            environment=settings.environment,
            plural=formatting.plural,
            release=package_version(),
            schema=schema,
            sections=tuple((title, entries) for title, entries in shown if entries),
            tabs=sorted(
                (entry for _, entries in shown for entry in entries if entry.name in navigation.TABS),
                key=lambda entry: navigation.TABS.index(entry.name),
            ),
            Role=Role,
            stamp=_stamp(),
        )

    def render(self, call: Call, template: str, values: dict[str, Any]) -> str:
        """Return a page for who asks."""
        view = View(call.prefix, call.zone_name)
        request, guard = call.request, call.console.guard
        found: dict[str, Any] = {
            "view": view,
            "url": view.url,
            "ago": view.ago,
            "at": view.at,
            "call": call,
            "principal": call.principal,
            "may": lambda role: call.may(role),
            "nonce": request.scope.get(NONCE, ""),
            "token": partial(guard.form_token, request, call.principal.name),
            "theme": theme_of(request),
            "can_log_out": guard.session_of(request) is not None,
            "said": guard.message(request),
            "feed": None,
            "snapshot": None,
            "cli": None,
            "active": "",
            "title": "",
            "keys_on": request.cookies.get("holdfast_keys", "on") != "off",
            "nav": call.console.nav_counts(),
            "receipt": call.console.receipt(call),
            "curl": lambda command: curl_of(command, call.api),
        }
        return self._environment.get_template(template).render({**found, **values})

    def render_fragment(self, template: str, zone: str, prefix: str, values: dict[str, Any]) -> str:
        """Return a live part, for everybody."""
        view = View(prefix, zone, live=True)
        found = {"view": view, "url": view.url, "ago": view.ago, "at": view.at, "may": lambda role: False}
        return self._environment.get_template(template).render({**found, **values}).strip()


def _stamp() -> str:
    """Return a text that changes with the static files, so that browsers may keep them."""
    files = sorted((FOLDER / "static").iterdir())
    return hashlib.sha256(b"".join(each.read_bytes() for each in files)).hexdigest()[:12]
