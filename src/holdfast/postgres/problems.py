"""Errors of the driver and the server, with what helps against each."""

from __future__ import annotations

import socket
from typing import Final

import asyncpg

DATABASE_ERRORS: Final = (asyncpg.PostgresError, asyncpg.InterfaceError, OSError)


def remedy_of(error: BaseException) -> str:
    """What an operator can do about an error of the database; empty when that is unknown."""
    match error:
        case asyncpg.InvalidAuthorizationSpecificationError():  # a wrong password is one of these
            return "check the user and the password in HOLDFAST_DSN"
        case asyncpg.InvalidCatalogNameError():
            return "create the database, or correct its name in HOLDFAST_DSN"
        case asyncpg.TooManyConnectionsError() | asyncpg.CannotConnectNowError():
            return "wait a moment and run it again"
        case asyncpg.InsufficientPrivilegeError():
            return "use a login that may do this"
        case socket.gaierror():
            return "check the host name in HOLDFAST_DSN"
        case OSError():
            return "check that Postgres runs, and the host and port in HOLDFAST_DSN"
    return ""
