"""Errors of the database that mean an installation is incomplete, as errors that say what to do about it.

They are known by SQLSTATE, so those of every driver are, and those that SQLAlchemy and Django wrap. The transaction is
lost all the same: it was the database that refused.
"""

from __future__ import annotations

from holdfast.errors import HoldfastError, NotPermitted, SchemaMismatch
from holdfast.postgres.schema.contract import apply_command, read_terms
from holdfast.retry import sqlstate_of

_NOT_INSTALLED = frozenset(("3F000", "42P01"))  # no such schema, no such table
_OF_ANOTHER_RELEASE = frozenset(("42703", "42883"))  # no such column, no such function
_DENIED = "42501"
_NO_LOGIN = "28"  # the class of a wrong password, a role that is not there or may not log in, and their like
_NO_DATABASE = "3D000"
# The text of core.require_source, which says what to do by itself.
_OF_ANOTHER_ROLE = "belongs to another role"


def refusal_of(error: BaseException, schema: str, doing: str = "publish into") -> HoldfastError | None:
    """Return the error for a producer whose database has no schema, that of another release, or denies a privilege."""
    state = sqlstate_of(error)
    if state in _NOT_INSTALLED:
        return SchemaMismatch(f"{schema} (not installed)", read_terms().wanted, apply_command(schema))
    if state in _OF_ANOTHER_RELEASE:
        return SchemaMismatch(f"{schema} of another release", read_terms().wanted, apply_command(schema))
    if state == _DENIED and _OF_ANOTHER_ROLE not in str(error):
        return NotPermitted(
            f"the login of this connection may not {doing} the schema {schema}",
            "as an administrator: GRANT holdfast_producer TO the login",
        )
    return None


def refusal_of_connecting(error: BaseException) -> HoldfastError | None:
    """Return the error for an application whose login the server refuses, if it says so by SQLSTATE."""
    state = sqlstate_of(error) or ""
    if state.startswith(_NO_LOGIN):
        return NotPermitted("the server refuses the login of the application", "check the user and the password")
    if state == _NO_DATABASE:
        return NotPermitted("the database of the application does not exist", "create it, or correct its name")
    return None
