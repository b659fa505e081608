"""The web console: `create_console` makes the application that `holdfast console` serves, or that yours mounts.

    app.mount("/holdfast", create_console(dsn, provider=Embedded(who_asks)))

How to add a page: see `holdfast.console.page`.
"""

from typing import TYPE_CHECKING

from holdfast.installing import require_extra
from holdfast.lazy import lazy_names

require_extra("console", "starlette")
require_extra("console", "jinja2")

if TYPE_CHECKING:
    from holdfast.console.app import Console, create_console
    from holdfast.console.settings import ConsoleSettings
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Console": "holdfast.console.app",
            "ConsoleSettings": "holdfast.console.settings",
            "create_console": "holdfast.console.app",
        },
    )

__all__ = ["Console", "ConsoleSettings", "create_console"]
