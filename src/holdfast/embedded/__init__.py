"""A private Postgres server, for demos and tests, with nothing to install by hand.

    from holdfast.embedded import EmbeddedPostgres

    with EmbeddedPostgres() as server:
        print(server.version, server.create_database("shop"))

Without a directory the server is temporary: it and its data are gone when the block ends, and also when the
process is killed. With one (`EmbeddedPostgres(Path("data"))`) the data stays and the next start finds it.
It is meant for one machine and one user; it is not a way to run a database in production.

Postgres refuses to run as root. Started by root it runs as the account `holdfast`, which is made with useradd if the
machine has none, or as `nobody` where that fails; what root writes, that account can read at most.
"""

from holdfast.embedded.account import usable_data_dir
from holdfast.embedded.binaries import PostgresBinaries, available_servers, find_binaries
from holdfast.embedded.errors import EmbeddedPostgresError
from holdfast.embedded.server import EmbeddedPostgres

__all__ = [
    "EmbeddedPostgres",
    "EmbeddedPostgresError",
    "PostgresBinaries",
    "available_servers",
    "find_binaries",
    "usable_data_dir",
]
