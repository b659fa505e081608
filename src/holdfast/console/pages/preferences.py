"""How the console looks in one browser: theme, time zone and single keys, kept in cookies."""

from __future__ import annotations

from zoneinfo import available_timezones

from starlette.responses import RedirectResponse, Response

from holdfast.access.principal import Role
from holdfast.console.page import Call, Page
from holdfast.errors import ConfigurationError

_LASTS = 365 * 86_400


async def show(call: Call) -> Response:
    """Show what can be chosen."""
    return call.render("preferences.html", title="Preferences", zones=sorted(available_timezones()))


async def choose(call: Call) -> Response:
    """Keep what was chosen."""
    answer = call.back("/preferences", said="Kept in this browser.")
    assert isinstance(answer, RedirectResponse)  # noqa: S101
    theme, zone, keys = call.form.get("theme"), call.form.get("zone", "UTC"), call.form.get("keys", "on")
    if theme not in ("", "light", "dark") or keys not in ("on", "off"):
        raise ConfigurationError("theme", "is unknown", "choose one of the list")
    if zone != "UTC" and zone not in available_timezones():
        raise ConfigurationError("zone", "is unknown", "choose one of the list")
    # Scripts set them too, so they are not HttpOnly; they say nothing of anybody.
    for name, value in (("theme", theme), ("zone", zone), ("keys", keys)):
        secure = call.console.guard.is_https(call.request)
        answer.set_cookie(f"holdfast_{name}", value, _LASTS, path="/", secure=secure, samesite="strict")
    return answer


PAGES = (Page("/preferences", "preferences", get=show, post=choose, post_role=Role.VIEWER),)
