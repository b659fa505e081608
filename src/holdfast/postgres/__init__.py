"""Everything that knows SQL. Applications import `migrate` from here; the rest is for the other packages."""

from holdfast.postgres.schema import migrate

__all__ = ["migrate"]
