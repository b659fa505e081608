"""Database errors by what they mean: for asyncpg as tuples of classes, for every driver by SQLSTATE.

The tuples are for code that owns an asyncpg connection. The functions read the SQLSTATE, so they also know the errors
of psycopg, and those that SQLAlchemy and Django wrap.
"""

from __future__ import annotations

import socket
from typing import Final

import asyncpg

from holdfast.chain import cause_of, context_of
from holdfast.retry import CONFLICT_SQLSTATES, LOCK_NOT_AVAILABLE, QUERY_CANCELED, sqlstate_of

# These end a connection rather than a statement. A server that became read-only is a failover: look for the new one.
CONNECTION_FAULTS = (
    OSError,  # includes TimeoutError and ConnectionError
    asyncpg.InterfaceError,
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.InternalClientError,
)


class LoginRefused(ConnectionError):
    """The server answered, and let nobody in: a changed password, a renamed database, a role that may not log in.

    For a program that was connected before, that is an outage like any other: it passes when an administrator is done.
    """


class NoAnswer(TimeoutError):
    """The server was silent when a connection was opened: it is frozen or overloaded, or its packets are lost."""


class OldPrimary(ConnectionError):
    """Another server has taken over from this one."""


# A statement may meet these on a healthy connection; they pass when it is sent again. QueryCanceledError is also an
# OperatorInterventionError: catch these first.
PASSING_FAULTS = (
    asyncpg.QueryCanceledError,
    asyncpg.LockNotAvailableError,
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
)

# What a command reports in one line, with a remedy.
DATABASE_ERRORS: Final = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)

# Under concurrency a unique violation may stand for a serialization failure.
UNIQUE_VIOLATION = "23505"
_REPEATABLE = CONFLICT_SQLSTATES | {UNIQUE_VIOLATION, LOCK_NOT_AVAILABLE}
_LOCK_TIMEOUTS = frozenset((LOCK_NOT_AVAILABLE, QUERY_CANCELED))
# The connection failed, the server lacks resources or shuts down, it ended an idle session, or it became a standby.
_UNAVAILABLE = ("08", "53", "57P", "25P03", "25P04", "25006")
_DRIVER_PACKAGES = ("sqlalchemy.", "psycopg.", "asyncpg.", "django.db.")


def is_away(error: BaseException) -> bool:
    """Return whether an error of asyncpg says that the server cannot be reached, not that it refused a statement."""
    # A value that the driver cannot encode is an InterfaceError too.
    return isinstance(error, CONNECTION_FAULTS) and not isinstance(error, (*PASSING_FAULTS, ValueError))


def is_conflict(error: BaseException) -> bool:
    """Return whether the transaction lost to another one (serialization failure, deadlock) and cannot go on."""
    return sqlstate_of(error) in CONFLICT_SQLSTATES


def passes_in_new_transaction(error: BaseException) -> bool:
    """Return whether the same work may succeed when its whole transaction is run again."""
    return sqlstate_of(error) in _REPEATABLE


def is_lock_timeout(error: BaseException) -> bool:
    """Return whether a lock was not granted in time, by the lock timeout or by a shorter statement timeout."""
    return sqlstate_of(error) in _LOCK_TIMEOUTS


def is_unavailable(error: BaseException) -> bool:
    """Return whether the server, or the connection to it, is gone."""
    state = sqlstate_of(error)
    if state is None:
        # A server that is gone sends no SQLSTATE: the driver raises an OperationalError of its own.
        return is_from_driver(error) and any(base.__name__ == "OperationalError" for base in type(error).__mro__)
    return state.startswith(_UNAVAILABLE)


def is_from_driver(error: BaseException) -> bool:
    """Return whether a database driver, or a library that wraps one, raised the error or one of its causes."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if any(f"{base.__module__}.".startswith(_DRIVER_PACKAGES) for base in type(link).__mro__):
            return True
        link = cause_of(link) or context_of(link)
    return False


class TransactionsAway(ConnectionError):
    """The application's own connections, in which handlers run, do not come: their address is not the worker's."""


def remedy_of(error: BaseException, address: str = "HOLDFAST_DSN") -> str:
    """What can be done about an error of the database; empty when that is unknown. `address` says where that stands."""
    match error:
        case asyncpg.InvalidAuthorizationSpecificationError():  # a wrong password is one of these
            return f"check the user and the password in {address}"
        case asyncpg.InvalidCatalogNameError():
            return f"create the database, or correct its name in {address}"
        case asyncpg.TooManyConnectionsError() | asyncpg.CannotConnectNowError():
            return "wait a moment and run it again"
        case asyncpg.InsufficientPrivilegeError():
            return "use a login that has the role holdfast_operator, or as an administrator: GRANT it to this one"
        case asyncpg.UndefinedObjectError() if "configuration parameter" in str(error):
            return f"it stands after the ? in {address}: remove it, or write the name of a setting of the server"
        case socket.gaierror():
            return f"check the host name in {address}"
        case FileNotFoundError():
            return f"check that Postgres runs, and that host= in {address} is the folder of its socket"
        case ConnectionError() if "rejected SSL upgrade" in str(error):
            return (
                "the server has no TLS: turn it on there (ssl = on and a certificate), or, on a network that you "
                f"trust, write sslmode=prefer in {address}"
            )
        case NoAnswer():
            return (
                "see whether the server is frozen or overloaded, or a firewall stands before it; check the host and "
                f"port in {address}; then run it again"
            )
        case OSError():
            return f"check that Postgres runs, and the host and port in {address}"
    return ""
