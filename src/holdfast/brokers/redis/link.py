"""One connection to Redis, opened when it is needed and dropped as a whole.

A single connection of the client is used, without its pool and its retries: retries may send a stored batch twice, and
the pool takes back connections that still wait for an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from redis.asyncio.connection import Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from holdfast.brokers.addresses import Address
from holdfast.brokers.engine import BrokerUnavailable
from holdfast.brokers.redis.replies import Replies

# The deadline of requests for which the caller gives none.
ANSWER_SECONDS: Final = 5.0
_CONNECT_SECONDS: Final = 2.0
_CHUNK: Final = 1024 * 1024
_LOST: Final = (RedisError, OSError, TimeoutError)
# Refusals of a server that is a replica or not ready: another host of the address may take writes.
_ELSEWHERE: Final = ("READONLY", "LOADING", "MASTERDOWN")

Command = Sequence[str | bytes | int]


class Link:
    """A connection to the server that takes writes."""

    def __init__(self, address: Address, name: str) -> None:
        self._address = address
        self._name = name.replace(" ", "-")
        self._connection: Connection | None = None
        self._turn = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        return self._connection is not None and self._connection.is_connected

    async def open(self, seconds: float = ANSWER_SECONDS) -> None:
        """Connect, unless the connection is open."""
        await self.ask_all((), seconds)

    async def ask(self, *command: str | bytes | int, seconds: float = ANSWER_SECONDS) -> Any:
        """Return the answer to one command; raise `ResponseError` if the server refuses it."""
        (answer,) = await self.ask_all([command], seconds)
        if isinstance(answer, ResponseError):
            raise answer
        return answer

    async def ask_all(self, commands: Sequence[Command], seconds: float = ANSWER_SECONDS) -> list[Any]:
        """Return the answers to commands that are sent together. A refusal is an answer; other faults are outages."""
        try:
            async with asyncio.timeout(seconds), self._turn:
                connection = await self._connected()
                try:
                    return await _exchange(connection, commands)
                except BaseException:
                    # Unread answers would be taken for the answers to the next commands.
                    self.drop()
                    raise
        except TimeoutError as error:
            raise BrokerUnavailable(f"Redis did not answer within {seconds:.3g} s") from error
        except _LOST as error:
            raise BrokerUnavailable(f"Redis: {error or type(error).__name__}") from error

    def note(self, refusal: ResponseError) -> None:
        """Drop the connection if a refusal says that the server takes no writes, to look for another one."""
        if str(refusal).startswith(_ELSEWHERE) or type(refusal).__name__ == "ReadOnlyError":
            self.drop()

    def drop(self) -> None:
        """End the connection at once, and discard what it has not sent yet."""
        connection, self._connection = self._connection, None
        if connection is not None:
            _abort(connection)

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(*_LOST):
                async with asyncio.timeout(_CONNECT_SECONDS):
                    await connection.disconnect()

    async def _connected(self) -> Connection:
        if self._connection is not None and self._connection.is_connected:
            return self._connection
        self.drop()
        errors: list[str] = []
        for server in self._address.servers:
            connection = self._made(server)
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    await connection.connect()
                    (role,) = await _exchange(connection, [("ROLE",)])
            except _LOST as error:
                errors.append(self._why(error))
                _abort(connection)
                continue
            except BaseException:
                _abort(connection)
                raise
            if isinstance(role, list) and role[0] != b"master":
                errors.append("a replica")
                _abort(connection)
                continue
            self._connection = connection
            return connection
        raise BrokerUnavailable(f"no Redis server takes events: {'; '.join(errors)}")

    def _why(self, error: BaseException) -> str:
        if not isinstance(error, TimeoutError | RedisTimeoutError):
            return str(error) or type(error).__name__
        # A server that does not encrypt, or is no Redis, stays silent: the text says whether TLS was tried.
        return f"no answer within {_CONNECT_SECONDS:g} s{' by TLS' if self._address.scheme == 'rediss' else ''}"

    def _made(self, server: str) -> Connection:
        parts = urlsplit(server)
        options: dict[str, Any] = {
            "host": parts.hostname or "localhost",
            "port": parts.port or 6379,
            "db": int(self._address.path or 0),
            "username": unquote(parts.username) if parts.username else None,
            "password": unquote(parts.password) if parts.password else None,
            "client_name": self._name,
            "socket_timeout": None,
            "socket_connect_timeout": _CONNECT_SECONDS,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
        }
        if parts.scheme == "rediss":
            return SSLConnection(ssl_ca_certs=self._address.options.get("cafile"), **options)
        return Connection(**options)


async def _exchange(connection: Connection, commands: Sequence[Command]) -> list[Any]:
    if not commands:
        return []
    try:
        await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
    except RuntimeError as error:
        # uvloop raises it for a connection that the other side has reset.
        raise ConnectionResetError(str(error)) from error
    reader = connection._reader
    replies = Replies(connection._parser.parse_error)
    answers: list[Any] = []
    while len(answers) < len(commands):
        received = await reader.read(_CHUNK) if reader is not None else b""
        if not received:
            raise ConnectionError("the server has closed the connection")
        replies.feed(received)
        while (answer := replies.next()) is not None:
            # The server serves nobody now: an outage, not an answer to this command.
            if isinstance(answer[0], RedisConnectionError):
                raise answer[0]
            answers.append(answer[0])
    return answers


def _abort(connection: Connection) -> None:
    writer = connection._writer
    if writer is not None:
        writer.transport.abort()
    connection._reader = connection._writer = None
    connection._parser.on_disconnect()
