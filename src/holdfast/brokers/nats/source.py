"""Takes the events of one handler with a durable pull consumer."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error
from nats.js.api import AckPolicy, ConsumerConfig, ConsumerInfo, DeliverPolicy, Header
from nats.js.errors import NotFoundError

from holdfast.brokers.addresses import Address
from holdfast.brokers.cloudevents import decoded_headers
from holdfast.brokers.engine import BrokerUnavailable, Interest, Received
from holdfast.brokers.interests import wants
from holdfast.brokers.nats.link import ANSWER_SECONDS, Link, within

HANDLER: Final = "holdfast_handler"

_OVERLAP: Final = timedelta(minutes=1)
# The limit of the server; the real one is lower, because workers fetch only for free runners.
_MOST_UNACKNOWLEDGED: Final = 10_000
_MOST_KNOWN: Final = 1_000
_NANOSECONDS: Final = 1_000_000_000
_LATE_SECONDS: Final = 2.0
# After so long without a message the consumer is asked; if it has some, the connection is taken for broken.
_SILENT_SECONDS: Final = 15.0
_NAK: Final = b"-NAK"
_PROGRESS: Final = b"+WPI"

_NOTHING_LEFT: Final = frozenset(("404", "408"))
_NO_RESPONDERS: Final = "503"


class NatsSource:
    """Pulls only as many messages as runners are free: the lease of a buffered message would expire while it waits."""

    def __init__(self, address: Address, interest: Interest, lease: float) -> None:
        self._interest = interest
        self._lease = lease
        self._link = Link(address, f"holdfast {interest.handler_name}")
        self._link.on_lost = self._lost
        self._names = self._link.names
        self._stream, self._consumer = self._names.stream_of(interest.channel), self._names.consumer_of(interest)
        self._subscribed: Client | None = None
        self._inbox = ""
        # Answers to pull requests, and None when the connection has ended.
        self._answers: deque[Msg | None] = deque()
        self._arrived = asyncio.Event()
        self._last_message = 0.0
        self._wanted: dict[str, bool] = {}

    async def open(self) -> None:
        await self._ready()

    async def take(self, most: int, *, wait: float) -> Sequence[Received]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        client = await self._ready()
        # A consumer that gives out one message at a time does not answer a request for more.
        most = 1 if self._interest.ordered else most
        try:
            found = await self._pull(client, most, None, loop.time() + _LATE_SECONDS)
            while not found and deadline - loop.time() > 0.001:
                # Ask for one: a larger request would go on filling the buffer after the first message.
                found = await self._pull(client, 1, deadline - loop.time(), deadline + _LATE_SECONDS)
        except (Error, OSError) as error:
            await self._link.drop()
            raise BrokerUnavailable(f"NATS: {error or type(error).__name__}") from error
        if found:
            self._last_message = loop.time()
        elif loop.time() - self._last_message > _SILENT_SECONDS:
            await self._doubt()
        return found

    async def keep_alive(self, messages: Sequence[Received]) -> None:
        await self._say(messages, _PROGRESS)

    async def acknowledge(self, messages: Sequence[Received]) -> None:
        await self._say(messages, b"")

    async def give_back(self, messages: Sequence[Received]) -> None:
        await self._say(messages, _NAK)

    async def close(self) -> None:
        unseen = [message for message in self._answers if message is not None and message.reply]
        self._answers.clear()
        if self._link.is_open and self._subscribed is not None:
            # Give them back: otherwise they come again only when their lease has expired.
            with contextlib.suppress(Error, OSError):
                for message in unseen:
                    await self._subscribed.publish(message.reply, _NAK)
        await self._link.close()

    async def _ready(self) -> Client:
        client = await self._link.client()
        if client is self._subscribed:
            return client
        await self._link.make_stream(self._interest.channel)
        await self._make_consumer(client)
        self._answers.clear()
        self._inbox = client.new_inbox()
        try:
            await client.subscribe(self._inbox, cb=self._answered)
        except (Error, OSError) as error:
            raise BrokerUnavailable(f"NATS: {error or type(error).__name__}") from error
        self._last_message = asyncio.get_running_loop().time()
        self._subscribed = client
        return client

    async def _make_consumer(self, client: Client) -> ConsumerInfo:
        """Return the handler's consumer; make it, from the first event that the handler is owed, if there is none."""
        jetstream = client.jetstream(timeout=ANSWER_SECONDS)
        with contextlib.suppress(NotFoundError):
            info: ConsumerInfo = await within(ANSWER_SECONDS, jetstream.consumer_info(self._stream, self._consumer))
            if (info.config.ack_wait or 0) >= self._lease:
                return info
            # Made with a shorter lease than ours: messages would go to others before we next keep them alive.
            longer = info.config.evolve(ack_wait=self._lease)
            return await within(ANSWER_SECONDS, jetstream.add_consumer(self._stream, longer))
        filters = self._names.filters_of(self._interest)
        config = ConsumerConfig(
            name=self._consumer,
            durable_name=self._consumer,
            description=f"holdfast: {self._interest.handler_name}",
            deliver_policy=DeliverPolicy.BY_START_TIME,
            opt_start_time=self._interest.since - _OVERLAP,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=self._lease,
            max_deliver=-1,
            # Several clients of one consumer keep the order only if one message at a time is out.
            max_ack_pending=1 if self._interest.ordered else _MOST_UNACKNOWLEDGED,
            filter_subject=filters[0] if len(filters) == 1 else None,
            filter_subjects=list(filters) if len(filters) > 1 else None,
            metadata={HANDLER: self._interest.handler_name},
        )
        try:
            return await within(ANSWER_SECONDS, jetstream.add_consumer(self._stream, config))
        except NotFoundError as error:
            self._link.forget_stream(self._interest.channel)
            raise BrokerUnavailable(f"NATS lost the stream {self._stream}") from error

    async def _pull(self, client: Client, most: int, wait: float | None, deadline: float) -> list[Received]:
        """Return up to `most` messages that the consumer has now; with `wait`, the first that comes in that time."""
        found: list[Received] = []
        unwanted: list[str] = []
        # Messages that came after their own request had timed out.
        while self._answers and len(found) < most:
            self._sort(self._answers.popleft(), found, unwanted)
        asked = most - len(found)
        if asked and not (found and wait):
            request: dict[str, int | bool] = {"batch": asked}
            if wait is None:
                request["no_wait"] = True
            else:
                request["expires"] = max(int(wait * _NANOSECONDS), 1_000_000)
            subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"
            await client.publish(subject, json.dumps(request).encode(), self._inbox)
            try:
                await self._collect(asked, deadline, found, unwanted)
            except Error:
                if not found:
                    raise
                # These messages are ours all the same; the next request raises if the fault lasts.
        for reply in unwanted:
            await client.publish(reply)
        return found

    async def _collect(self, asked: int, deadline: float, found: list[Received], unwanted: list[str]) -> None:
        while asked:
            while not self._answers:
                self._arrived.clear()
                try:
                    async with asyncio.timeout_at(deadline):
                        await self._arrived.wait()
                except TimeoutError:
                    # The server answers even if it has no messages, so it must be gone.
                    raise Error("the consumer does not answer") from None
            message = self._answers.popleft()
            if message is None:
                raise Error("the connection was lost")
            status = _status(message)
            if status is None:
                self._sort(message, found, unwanted)
                asked -= 1
            elif status in _NOTHING_LEFT:
                return
            else:
                await self._refused(status, message)
                return

    async def _refused(self, status: str, message: Msg) -> None:
        """Handle an error status: if the consumer is gone, make it again at its first start."""
        description = (message.headers or {}).get(Header.DESCRIPTION, "")
        if status == _NO_RESPONDERS or "deleted" in description.lower():
            self._link.forget_stream(self._interest.channel)
            client = await self._link.client()
            await self._link.make_stream(self._interest.channel)
            await self._make_consumer(client)
        await asyncio.sleep(0.05)  # while it elects a leader, each request is refused at once

    def _sort(self, message: Msg | None, found: list[Received], unwanted: list[str]) -> None:
        if message is None or _status(message) is not None:
            return
        if self._is_wanted(message.subject):
            headers = decoded_headers(message.headers or {})
            found.append(Received(message.data, headers, _deliveries(message.reply), message.reply))
        else:
            unwanted.append(message.reply)

    def _is_wanted(self, subject: str) -> bool:
        known = self._wanted.get(subject)
        if known is None:
            if len(self._wanted) >= _MOST_KNOWN:
                self._wanted.clear()
            known = self._wanted[subject] = wants(self._interest, *self._names.event_of(subject))
        return known

    async def _say(self, messages: Sequence[Received], word: bytes) -> None:
        client = await self._link.client()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                for message in messages:
                    await client.publish(str(message.token), word)
        except (Error, OSError, TimeoutError) as error:
            raise BrokerUnavailable(f"NATS: {error or type(error).__name__}") from error

    async def _doubt(self) -> None:
        """Ask whether there really are no messages: a request or the consumer may be lost."""
        self._last_message = asyncio.get_running_loop().time()
        info = await self._make_consumer(await self._link.client())
        if info.num_pending:
            await self._link.drop()

    async def _answered(self, message: Msg) -> None:
        self._answers.append(message)
        self._arrived.set()

    def _lost(self) -> None:
        self._subscribed = None
        self._answers.append(None)
        self._arrived.set()


def _deliveries(reply: str) -> int:
    """Return how often a message was delivered, which stands in the subject that acknowledges it.

    >>> _deliveries("$JS.ACK.HF_events.billing.2.17.4.1700000000.0"), _deliveries("$JS.ACK.hub.acc.HF_e.b.3.1.1.17.0.x")
    (2, 3)
    """
    parts = reply.split(".")
    # Newer subjects have the domain and the account in front, and a token at the end.
    return int(parts[4] if len(parts) == 9 else parts[6])


def _status(message: Msg) -> str | None:
    # Only an answer without data and reply subject is a status: messages have headers too.
    if message.data or not message.headers or message.reply:
        return None
    return message.headers.get(Header.STATUS)
