"""One connection to NATS, opened when it is needed and dropped as a whole.

The client's own reconnecting is not used: it buffers events that are published meanwhile, and sends them after the
relay was told that they timed out.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

from nats.aio.client import Client
from nats.errors import Error
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from holdfast.brokers.addresses import Address
from holdfast.brokers.engine import BrokerUnavailable, refuses_login
from holdfast.brokers.nats.subjects import subjects_by

# The deadline of requests for which the caller gives none.
ANSWER_SECONDS: Final = 5.0
_CONNECT_SECONDS: Final = 2
_PING_SECONDS: Final = 10
_GOODBYE_SECONDS: Final = 2.0
_DAY: Final = 86_400
# Seconds for which a server recognises a duplicate: longer than a batch takes to be released and sent again.
DUPLICATE_WINDOW: Final = 120.0
_NAME_IN_USE: Final = 10058
_OVERLAPS: Final = 10065
# Codes that mean: nobody answers for JetStream, or it is off for the server or for the account.
_OFF: Final = (None, 10039, 10076)
_LOST: Final = (Error, OSError, TimeoutError)

Answered = TypeVar("Answered")


async def within(seconds: float, asked: Awaitable[Answered]) -> Answered:
    """Return what the server answered. `NotFoundError` passes through; every other fault is `BrokerUnavailable`."""
    try:
        async with asyncio.timeout(seconds):
            return await asked
    except NotFoundError:
        raise
    except ServiceUnavailableError as error:
        raise (
            _off() if error.err_code in _OFF else BrokerUnavailable(f"NATS: {error.description or error}")
        ) from error
    except APIError as error:
        # No leader, no room or no peers: these pass by themselves.
        raise BrokerUnavailable(f"NATS: {error.description or error}") from error
    except TimeoutError as error:
        raise BrokerUnavailable(f"NATS did not answer within {seconds:g} s") from error
    except _LOST as error:
        raise BrokerUnavailable(f"NATS: {error or type(error).__name__}") from error


def _off() -> BrokerUnavailable:
    return BrokerUnavailable("JetStream is off at NATS", "start nats-server with -js, or give the account JetStream")


def _narrower(subjects: Sequence[str]) -> str:
    return f"take {', '.join(subjects)} out of the stream that has it, or name others by subject= in the address"


class _Client(Client):
    """A client that unreadable headers do not disconnect, and that sends nothing unencrypted to a `tls://` address."""

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        server = self._current_server
        if initial_connection and server is not None and server.uri.scheme == "tls" and not info.get("tls_required"):
            # Refused before anything is sent: the client itself would go on and send the password unencrypted.
            raise Error("the server does not encrypt, and the address says tls://")
        await super()._process_info(info, initial_connection)

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        try:
            found: dict[str, str] | None = await super()._process_headers(headers)
        except Exception:  # it would end the connection, and the message, delivered again, the next one
            return {}
        return found


class Link:
    """A connection with JetStream, and the streams that are known to exist."""

    def __init__(self, address: Address, name: str) -> None:
        self._address = address
        self._name = name
        self.names = subjects_by(address)
        self._client: Client | None = None
        self._opening = asyncio.Lock()
        self._streams: set[str] = set()
        self._cause = ""
        self._encryption = address.encryption() if "cafile" in address.options else None
        # Called when the connection has ended, so that nobody waits for its answers.
        self.on_lost: Callable[[], None] | None = None

    @property
    def is_open(self) -> bool:
        return self._client is not None and self._client.is_connected

    async def client(self, seconds: float = ANSWER_SECONDS) -> Client:
        """Return the connection, or open a new one if it has ended, with one try for each server."""
        async with self._opening:
            if self._client is not None and self._client.is_connected:
                return self._client
            await self._forget()
            servers = list(self._address.servers)
            random.shuffle(servers)
            errors: list[str] = []
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    for server in servers:
                        client = _Client()
                        try:
                            await self._connect(client, server)
                        except _LOST as error:
                            silent = f"no answer within {_CONNECT_SECONDS} s"
                            errors.append(self._cause or str(error) or silent)
                            await _end(client)
                            continue
                        except BaseException:
                            await _end(client)
                            raise
                        self._client = client
                        return client
            told = "; ".join(errors) or "no answer"
            raise BrokerUnavailable(
                f"no NATS server {'lets this login in' if refuses_login(told) else 'can be reached'}: {told}"
            )

    async def _connect(self, client: Client, server: str) -> None:
        self._cause = ""

        async def noted(error: Exception) -> None:
            """Keep the cause: the error that the client raises says only that no server is left."""
            self._cause = str(error)

        async def lost() -> None:
            if client is self._client and self.on_lost is not None:
                self.on_lost()

        async with asyncio.timeout(_CONNECT_SECONDS):
            await client.connect(
                [server],
                name=self._name,
                allow_reconnect=False,
                connect_timeout=_CONNECT_SECONDS,
                ping_interval=_PING_SECONDS,
                max_outstanding_pings=2,
                # The client uses it even without reconnecting, and takes 0 for "without end".
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                error_cb=noted,
                closed_cb=lost,
                user_credentials=self._address.options.get("creds"),
                tls=self._encryption,
            )

    async def jetstream(self, seconds: float = ANSWER_SECONDS) -> JetStreamContext:
        return (await self.client(seconds)).jetstream(timeout=seconds)

    async def make_stream(self, channel: str, seconds: float = ANSWER_SECONDS) -> None:
        """Make the stream of a channel, unless it exists: an operator may have made or changed it, so it is kept."""
        if channel in self._streams and self.is_open:
            return
        client = await self.client(seconds)
        jetstream = client.jetstream(timeout=seconds)
        try:
            await within(seconds, jetstream.stream_info(self.names.stream_of(channel)))
        except NotFoundError:
            clustered = bool(client._server_info.get("cluster"))
            config = StreamConfig(
                name=self.names.stream_of(channel),
                subjects=[self.names.subjects_of(channel)],
                retention=RetentionPolicy.LIMITS,
                discard=DiscardPolicy.NEW,
                storage=StorageType.FILE,
                num_replicas=self._address.number("replicas", 3 if clustered else 1, 1, 5),
                max_age=float(self._address.number("max_age", 7, 1, 3650) * _DAY),
                duplicate_window=DUPLICATE_WINDOW,
            )
            try:
                async with asyncio.timeout(seconds):
                    await jetstream.add_stream(config)
            except APIError as error:
                if error.err_code != _NAME_IN_USE:
                    remedy = _narrower(config.subjects or []) if error.err_code == _OVERLAPS else ""
                    raise BrokerUnavailable(f"NATS makes no stream: {error.description}", remedy) from error
            except _LOST as error:
                raise BrokerUnavailable(f"NATS makes no stream: {error or type(error).__name__}") from error
        self._streams.add(channel)

    def forget_stream(self, channel: str) -> None:
        """Look for the stream again before its next use."""
        self._streams.discard(channel)

    async def drop(self) -> None:
        """End the connection at once, and discard what it has not sent yet."""
        async with self._opening:
            await self._forget()

    async def close(self) -> None:
        """Send what is buffered, and end the connection."""
        client = self._client
        if client is not None and client.is_connected:
            with contextlib.suppress(*_LOST):
                async with asyncio.timeout(_GOODBYE_SECONDS):
                    await client.flush(timeout=1)
        await self.drop()

    async def _forget(self) -> None:
        client, self._client = self._client, None
        self._streams.clear()
        if client is not None:
            if self.on_lost is not None:
                self.on_lost()
            await _end(client)


async def _end(client: Client) -> None:
    # Discard the buffers and abort: flushing them to a frozen server would never end.
    client._pending.clear()
    client._pending_data_size = 0
    transport = client._transport
    if transport is not None:
        writer = getattr(transport, "_bare_io_writer", None)
        if writer is not None:
            writer.transport.abort()
    tasks = [each._wait_for_msgs_task for each in client._subs.values()]
    with contextlib.suppress(*_LOST, RuntimeError):
        async with asyncio.timeout(_GOODBYE_SECONDS):
            await client.close()
    # `close` stops halfway if the connection fails meanwhile, and leaves these tasks waiting.
    for task in (*tasks, client._reading_task, client._ping_interval_task, client._flusher_task):
        if task is not None and not task.done():
            task.cancel()
