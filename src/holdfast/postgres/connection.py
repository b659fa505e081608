"""A database connection that one loop owns, and that comes back after every outage."""

import asyncio
import contextlib
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any
from weakref import WeakSet

import asyncpg

from holdfast.errors import ConfigurationError
from holdfast.postgres.addresses import (
    CONNECT_TIMEOUT,
    hosts_of,
    next_host_first,
    readable_address,
    unreadable,
)
from holdfast.postgres.faults import CONNECTION_FAULTS, LoginRefused, NoAnswer, OldPrimary
from holdfast.postgres.transport import requires_tls
from holdfast.redact import redact_dsn

# How long the statement of a batch waits for one of its rows.
LOCK_TIMEOUT = 0.2
# No schema that another role could write to: a function, operator or type of theirs would run with our rights.
SEARCH_PATH = "pg_catalog, pg_temp"

# Whatever the role's own defaults are: claims skip what others hold and must not fail on it, and no transaction of ours
# is read-only or ended by a limit that it does not know of.
_DEFAULTS = {
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    "lock_timeout": "0",
}

# The first eight digits of the name of the file that is written now. It grows by one when a standby takes over.
_TIMELINE = "SELECT pg_catalog.substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 1, 8)"


# Connections on which a statement needs no transaction with our settings around it.
_direct: WeakSet[asyncpg.Connection] = WeakSet()


class Address:
    """Where a database is, and whether a transaction pooler stands in between.

    Behind one, a session is not ours from one transaction to the next: nothing may be set, prepared, locked or
    listened for in it, and every statement needs a transaction of its own.
    """

    def __init__(self, dsn: str, *, owner: str = "", field: str = "dsn") -> None:
        self.dsn = readable_address(dsn, field)
        self.owner = owner  # named by every session, so that others know whose it is
        self.pooled = False
        self.major = 0  # of the server, once `probe` has asked
        self._lock = threading.Lock()  # the lease keeper connects from a thread of its own
        self.reached = False  # somebody has, since the last fault
        self._next_try = 0.0
        self._timeline = ""  # the latest one of the servers that were reached

    async def wait_to_connect(self) -> None:
        """Until somebody gets through there, all who want to connect try one after the other, about once a second."""
        while True:
            with self._lock:
                now = time.monotonic()
                if self.reached or now >= self._next_try:
                    # The first one was at once: a little more than a second makes it one a second on the whole.
                    self._next_try = now + random.uniform(1.2, 1.5)
                    return
            await asyncio.sleep(0.02)

    def found(self, reached: bool) -> None:
        """What became of a try, or of a connection."""
        with self._lock:
            if self.reached and not reached:
                self._next_try = 0.0  # the first one after a fault need not wait
            self.reached = reached

    async def probe(self) -> None:
        """Find out what the other side is."""
        connection = await open_connection(self.dsn, statement_cache_size=0, command_timeout=CONNECT_TIMEOUT)
        try:
            self.pooled = await is_pooled(connection)
            self.major = connection.get_server_version().major
        finally:
            await connection.close(timeout=2)

    async def require_latest(self, connection: asyncpg.Connection, dsn: str) -> None:
        """Refuse a server from which another one has taken over: what is written there now will be gone.

        `dsn` is the address that led there; the next connection goes to the next host of it. Servers that do not tell
        their timeline are trusted.
        """
        if self.pooled:
            return
        try:
            timeline = str(await connection.fetchval(_TIMELINE, timeout=CONNECT_TIMEOUT))
        except CONNECTION_FAULTS:
            raise
        except asyncpg.PostgresError:
            return
        if timeline < self._timeline:
            # Of the address that was used: several loops may find out at once, and must not turn it back.
            self.dsn = next_host_first(dsn)
            raise OldPrimary(
                f"the server is an old primary: it writes timeline {int(timeline, 16)}, and timeline "
                f"{int(self._timeline, 16)} was seen before; shut it down, or restart the worker if this is the server "
                "that is meant"
            )
        self._timeline = timeline

    def options(self, purpose: str, settings: Mapping[str, str], *, lent: bool = False) -> dict[str, Any]:
        """For asyncpg.connect. A connection that is `lent` to the application keeps the application's search_path."""
        name = {"application_name": f"holdfast {purpose} {self.owner}".rstrip()}
        if self.pooled:
            return {"server_settings": name, "statement_cache_size": 0}
        defaults = _DEFAULTS if lent else {**_DEFAULTS, "search_path": SEARCH_PATH}
        return {"server_settings": {**name, **defaults, **settings}}


async def connect(
    address: Address,
    purpose: str,
    *,
    statement_timeout: float,
    transaction_timeout: float = 0,
    idle_timeout: float = 0,
    lock_timeout: float = 0,
    durable: bool = True,
    lent: bool = False,
    connection_class: type[asyncpg.Connection] = asyncpg.Connection,
) -> asyncpg.Connection:
    """One connection, set up so that neither side waits for a peer that is gone.

    If it is not `durable`, its last commits may be undone by a crash of the server. If it is `lent`, handlers of the
    application run their statements on it: every statement of ours on it has to name schemas by itself. A login that
    the server refuses is a connection fault here; a program that starts finds out by `Address.probe`, which raises
    what the server said.
    """
    settings = {
        "statement_timeout": _milliseconds(statement_timeout),
        "tcp_keepalives_idle": "5",
        "tcp_keepalives_interval": "3",
        "tcp_keepalives_count": "3",
    }
    if lock_timeout:
        settings["lock_timeout"] = _milliseconds(lock_timeout)
    if not durable:
        settings["synchronous_commit"] = "off"
    if address.major >= 17:
        # A client that vanishes between a statement and its Sync is neither running nor idle in a transaction.
        settings["transaction_timeout"] = _milliseconds(transaction_timeout)
    if idle_timeout:
        settings["idle_session_timeout"] = _milliseconds(idle_timeout)
    # Longer than the server's own limit: it should be the one to answer.
    patience = statement_timeout + 2 if statement_timeout else None
    options = address.options(purpose, settings, lent=lent)
    await address.wait_to_connect()
    dsn = address.dsn
    try:
        connection = await open_connection(dsn, command_timeout=patience, connection_class=connection_class, **options)
    except CONNECTION_FAULTS:
        address.found(False)
        raise
    except asyncpg.PostgresError as refusal:
        address.found(False)
        raise LoginRefused(str(refusal)) from refusal
    try:
        await address.require_latest(connection, dsn)
    except BaseException as fault:  # a cancellation among them
        connection.terminate()
        if isinstance(fault, CONNECTION_FAULTS):
            address.found(False)
        raise
    address.found(True)
    if not address.pooled and not lent:
        _direct.add(connection)
    return connection


def is_direct(connection: asyncpg.Connection) -> bool:
    """Return whether `connect` has opened it, with our settings, and to the server itself."""
    return connection in _direct


@contextlib.asynccontextmanager
async def own_transaction(connection: asyncpg.Connection, *, lock_timeout: float = 0) -> AsyncIterator[None]:
    """A transaction that begins with our settings, in one message: behind a pooler the session has only the login's."""
    if connection.is_in_transaction():
        async with connection.transaction():
            yield
        return
    await connection.execute(
        f"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL search_path = {SEARCH_PATH}; "
        f"SET LOCAL lock_timeout = {_milliseconds(lock_timeout)}"
    )
    try:
        yield
    except BaseException:
        with contextlib.suppress(*CONNECTION_FAULTS):
            await connection.execute("ROLLBACK")
        raise
    await connection.execute("COMMIT")


async def is_pooled(connection: asyncpg.Connection) -> bool:
    """Return whether a pooler stands in between: it tells its clients another backend than the one that answers."""
    # In one message, so that no limit of the role's ends the transaction before it is lifted.
    await connection.execute(
        "BEGIN; SET LOCAL statement_timeout = 0; SET LOCAL idle_in_transaction_session_timeout = 0"
    )
    answering = await connection.fetchval("SELECT pg_catalog.pg_backend_pid()")
    await connection.execute("ROLLBACK")
    return bool(answering != connection.get_server_pid())


async def open_connection(dsn: str, **options: Any) -> asyncpg.Connection:
    """Every connection of ours is opened here. Errors never quote the DSN's password."""
    address = readable_address(dsn)
    try:
        return await asyncpg.connect(address, timeout=CONNECT_TIMEOUT, **options)
    except TimeoutError as error:
        if str(error):
            raise
        # asyncpg's has no text: the other side took the connection and was silent, or a firewall dropped it.
        raise NoAnswer(f"the server did not answer within {CONNECT_TIMEOUT:.0f} seconds") from error
    except socket.gaierror as error:
        raise socket.gaierror(error.errno, f"{error.strerror}: {hosts_of(address)}") from error
    except ConnectionError as error:
        if "rejected SSL upgrade" in str(error) and not requires_tls(address):
            # A server of Postgres without TLS says so, and gets what it understands.
            raise ConnectionError(f"what answers at {hosts_of(address)} is not Postgres") from error
        raise
    except asyncpg.exceptions.ClientConfigurationError as error:
        remedy = "correct what stands after the ? in it"
        raise ConfigurationError("dsn", f"was refused: {redact_dsn(str(error))}", remedy) from None
    except (ValueError, OverflowError):
        # Not chained: asyncpg quotes the part that it does not understand, which may be the password.
        raise unreadable() from None


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))


class ReservedConnection:
    """Kept open for one purpose; `use()` opens it anew when it is gone. Only its owner's loop may use it."""

    def __init__(
        self,
        address: Address,
        purpose: str,
        *,
        statement_timeout: float = 0,
        idle_timeout: float = 0,
        lock_timeout: float = 0,
        durable: bool = True,
    ) -> None:
        self._address = address
        self._purpose = purpose
        self._statement_timeout = statement_timeout
        self._idle_timeout = idle_timeout
        self._lock_timeout = lock_timeout
        self._durable = durable
        self._connection: asyncpg.Connection | None = None
        self._lock = asyncio.Lock()
        self._on_lost: Callable[[], None] = lambda: None

    def when_lost(self, call: Callable[[], None]) -> None:
        """Have this called when the other side closes the connection."""
        self._on_lost = call

    async def use(self) -> asyncpg.Connection:
        connection = self._connection
        if connection is not None and not connection.is_closed():
            return connection
        async with self._lock:
            if self._connection is None or self._connection.is_closed():
                self._connection = await connect(
                    self._address,
                    self._purpose,
                    statement_timeout=self._statement_timeout,
                    transaction_timeout=2 * self._statement_timeout,
                    idle_timeout=self._idle_timeout,
                    lock_timeout=self._lock_timeout,
                    durable=self._durable,
                )
                self._connection.add_termination_listener(self._terminated)
            return self._connection

    def _terminated(self, connection: object) -> None:
        if connection is not self._connection:
            return
        self._address.found(False)  # so that not every loop tries at once
        self._on_lost()

    @property
    def is_open(self) -> bool:
        """Whether there is a connection now."""
        return self._connection is not None and not self._connection.is_closed()

    @property
    def reachable(self) -> bool:
        """Whether whoever tried last got through to the other side."""
        return self._address.reached

    def drop(self, *, fault: bool = True) -> None:
        """Forget the connection; nothing is asked of the other side."""
        if fault:
            self._address.found(False)
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and not connection.is_closed():
            try:
                await connection.close(timeout=2)
            except CONNECTION_FAULTS:
                connection.terminate()
