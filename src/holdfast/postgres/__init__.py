"""Everything that knows SQL. Applications import `migrate` from here; the rest is for the other packages."""

from typing import TYPE_CHECKING

from holdfast.lazy import lazy_names

if TYPE_CHECKING:
    from holdfast.postgres.schema import migrate
else:
    __getattr__, __dir__ = lazy_names(__name__, {"migrate": "holdfast.postgres.schema"})

__all__ = ["migrate"]
