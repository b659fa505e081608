"""Errors of the database, as user interfaces report them."""

from __future__ import annotations

from holdfast.postgres.problems import DATABASE_ERRORS, remedy_of

__all__ = ["DATABASE_ERRORS", "remedy_of"]
