"""A database that the tests of one file share, as in tests/postgres, and small releases to migrate with.

shared_dsn   a database with Holdfast's schema, made once per file and server
outbox       an `Outbox` on a connection to it, empty at the start of each test
make_source  a release of a few migrations, as in tests/migrations
"""

from tests.migrations.conftest import make_source
from tests.postgres.conftest import outbox, shared_dsn

__all__ = ["make_source", "outbox", "shared_dsn"]
