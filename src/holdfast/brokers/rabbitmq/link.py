"""One connection to RabbitMQ, opened when it is needed and dropped as a whole.

The client's own reconnecting is not used: it restores what it remembers, and does not say when something is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar
from urllib.parse import parse_qs, urlencode, urlsplit

import aiormq
from aiormq import Channel
from aiormq.connection import TCPTransportFactory, TLSTransportFactory

from holdfast.brokers.engine import BrokerUnavailable

# The deadline of requests for which the caller gives none.
ANSWER_SECONDS: Final = 5.0
# The deadline for closing a connection politely.
GOODBYE_SECONDS: Final = 2.0
_HEARTBEAT_SECONDS: Final = 10
_LOST: Final = (aiormq.AMQPError, aiormq.ChannelInvalidStateError, OSError, RuntimeError, TimeoutError)

Answered = TypeVar("Answered")


async def within(seconds: float, asked: Coroutine[Any, Any, Answered]) -> Answered:
    """Return what the broker answered. A refusal raises `AMQPChannelError`, a lost connection `BrokerUnavailable`.

    The client cancels requests on a lost connection: that is an outage, not a cancellation of the caller.
    """
    task = asyncio.ensure_future(asked)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            task.cancel()
    if not task.done():
        raise BrokerUnavailable(f"RabbitMQ did not answer within {seconds:g} s")
    if task.cancelled():
        raise BrokerUnavailable("the connection to RabbitMQ was lost")
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, aiormq.AMQPChannelError) or not isinstance(error, _LOST):
        raise error
    raise BrokerUnavailable(f"RabbitMQ: {error or type(error).__name__}") from error


class Link:
    """A connection and the channel that is used on it."""

    def __init__(self, address: str, name: str, *, confirms: bool = False) -> None:
        self._address = _with_defaults(address, name)
        self._confirms = confirms
        self._opening = asyncio.Lock()
        self._connection: aiormq.Connection | None = None
        self._channel: Channel | None = None
        self._writers: list[asyncio.StreamWriter] = []

    @property
    def is_open(self) -> bool:
        return self._channel is not None and not self._channel.is_closed and not self._channel.connection.is_closed

    def uses(self, channel: Channel) -> bool:
        """Whether this is the channel in use, and not closed."""
        return channel is self._channel and self.is_open

    async def channel(self, seconds: float = ANSWER_SECONDS) -> Channel:
        """Return the channel; open a new connection if the last one has ended."""
        async with self._opening:
            if self._channel is not None and self.is_open:
                return self._channel
            await self.drop()
            try:
                await within(seconds, self._connect())
                self._channel = await within(seconds, self._open_channel(confirms=self._confirms))
            except BaseException:
                await self.drop()
                raise
            return self._channel

    async def side_channel(self, seconds: float = ANSWER_SECONDS) -> Channel:
        """Return one more channel, for requests that the broker refuses by closing the channel."""
        await self.channel(seconds)
        return await within(seconds, self._open_channel(confirms=False))

    async def version(self) -> tuple[int, ...]:
        """Return the version of the server."""
        await self.channel()
        assert self._connection is not None  # noqa: S101  (it has a channel)
        said = self._connection.server_properties.get("version", "")
        text = said.decode() if isinstance(said, bytes) else str(said)
        return tuple(int(part) for part in text.split(".") if part.isdigit())

    async def is_blocked(self) -> bool:
        """Return whether the broker takes no events now, because its memory or its disk is full."""
        if self._connection is None:
            return False
        try:
            async with asyncio.timeout(0):
                await self._connection.ready()
        except TimeoutError:
            return True
        return False

    def when_closed(self, call: Callable[[], object]) -> None:
        """Call a function when the channel ends, for whatever reason."""
        assert self._channel is not None  # noqa: S101  (callers have it)
        self._channel.closing.add_done_callback(lambda _: call())

    async def drop(self) -> None:
        """End the connection at once, and discard what it has not sent yet."""
        await self._end(polite=False)

    async def close(self) -> None:
        """End the connection politely; messages that were not acknowledged go back to their queue at once."""
        await self._end(polite=True)

    async def _connect(self) -> None:
        secure = urlsplit(self._address).scheme == "amqps"
        factory = TLSTransportFactory() if secure else TCPTransportFactory()
        self._connection = aiormq.Connection(self._address, transport_factory=_Recording(factory, self._writers))
        await self._connection.connect()

    async def _open_channel(self, *, confirms: bool) -> Channel:
        if self._connection is None:
            raise BrokerUnavailable("the connection to RabbitMQ was lost")
        channel = await self._connection.channel(publisher_confirms=confirms, on_return_raises=confirms)
        assert isinstance(channel, Channel)  # noqa: S101  (its type says less)
        return channel

    async def _end(self, *, polite: bool) -> None:
        connection, self._connection, self._channel = self._connection, None, None
        writers, self._writers = self._writers, []
        goodbye = None if connection is None else asyncio.ensure_future(connection.close(_CLOSED))
        if goodbye is not None and polite:
            await asyncio.wait({goodbye}, timeout=GOODBYE_SECONDS)
        for writer in writers:
            writer.transport.abort()
        if goodbye is not None:
            await asyncio.wait({goodbye}, timeout=GOODBYE_SECONDS)
            goodbye.cancel()
            with contextlib.suppress(asyncio.CancelledError, *_LOST):
                await goodbye


_CLOSED: Final = aiormq.ConnectionClosed(0, "closed by this side")


class _Recording(aiormq.TransportFactory):
    """Keeps the writers that it makes: the client cannot end a connection whose peer no longer reads."""

    def __init__(self, factory: aiormq.TransportFactory, writers: list[asyncio.StreamWriter]) -> None:
        self._factory = factory
        self._writers = writers

    async def create(self, *args: Any, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self._factory.create(*args, **options)
        self._writers.append(writer)
        return reader, writer


def _with_defaults(address: str, name: str) -> str:
    parts = urlsplit(address)
    # The template of names and the mode are not the client's.
    given = {key: values[-1] for key, values in parse_qs(parts.query).items() if key not in ("exchange", "mode")}
    return parts._replace(query=urlencode({"heartbeat": _HEARTBEAT_SECONDS, "name": name} | given)).geturl()
