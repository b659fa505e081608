"""A database that the tests of one file share, as in tests/postgres.

shared_dsn   a database with Holdfast's schema, made once per file and server
outbox       an `Outbox` on a connection to it, empty at the start of each test
"""

from tests.postgres.conftest import outbox, shared_dsn

__all__ = ["outbox", "shared_dsn"]
