"""Sends events to NATS JetStream: a window of publishes, each with its own answer."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Final

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error
from nats.js.api import Header

from holdfast.brokers.addresses import Address
from holdfast.brokers.cloudevents import STRUCTURED
from holdfast.brokers.engine import Answer, BrokerUnavailable, Confirmed, Outgoing, Refused, Unanswered
from holdfast.brokers.nats.link import Link

_WINDOW: Final = 256
_NO_RESPONDERS: Final = "503"
_TOO_LARGE: Final = 10054
_is_header = re.compile(r"[!-9;-~]+").fullmatch
_NO_STREAM: Final = "no stream of NATS takes its subject"


class NatsSink:
    """Publishes on one connection. Several batches may be on their way at once."""

    def __init__(self, address: Address) -> None:
        self._link = Link(address, "holdfast relay")
        self._link.on_lost = self._lost
        self._names = self._link.names
        self._inbox: tuple[Client, str] | None = None
        self._numbers = count()
        self._waiting: dict[str, asyncio.Future[Answer]] = {}

    async def open(self) -> None:
        await self._link.client()

    async def send(self, batch: Sequence[Outgoing], *, timeout: float) -> Sequence[Answer]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        client, prefix = await self._ready({event.channel for event in batch}, timeout)
        answers: list[Answer] = []
        for window in _windows(batch):
            answers += await self._send_window(client, prefix, window, deadline - loop.time())
            if len(answers) < len(batch) and (loop.time() >= deadline or not client.is_connected):
                answers += [Unanswered("NATS did not answer in time")] * (len(batch) - len(answers))
                break
        for event, answer in zip(batch, answers, strict=True):
            if isinstance(answer, Unanswered) and answer.error == _NO_STREAM:
                self._link.forget_stream(event.channel)
        return answers

    async def close(self) -> None:
        await self._link.close()

    async def _ready(self, channels: set[str], timeout: float) -> tuple[Client, str]:
        deadline = asyncio.get_running_loop().time() + timeout
        client = await self._link.client(timeout)
        for channel in channels:
            await self._link.make_stream(channel, max(deadline - asyncio.get_running_loop().time(), 0.1))
        if self._inbox is None or self._inbox[0] is not client:
            inbox = client.new_inbox()
            try:
                await client.subscribe(f"{inbox}.*", cb=self._answered)
            except (Error, OSError) as error:
                raise BrokerUnavailable(f"NATS: {error or type(error).__name__}") from error
            self._inbox = client, inbox
        return self._inbox

    async def _send_window(
        self, client: Client, prefix: str, window: Sequence[Outgoing], seconds: float
    ) -> Sequence[Answer]:
        answers: list[Answer | None] = [None] * len(window)
        sent: dict[str, int] = {}
        waiting: set[asyncio.Future[Answer]] = set()
        try:
            async with asyncio.timeout(seconds):
                for index, event in enumerate(window):
                    headers = _headers(event, self._names.stream_of(event.channel))
                    answers[index] = never(event, headers, client.max_payload)
                    if answers[index] is not None:
                        continue
                    token = str(next(self._numbers))
                    sent[token] = index
                    future = self._waiting[token] = asyncio.get_running_loop().create_future()
                    waiting.add(future)
                    subject = self._names.subject_of(event.channel, event.event_type, event.target)
                    await client.publish(subject, event.body, f"{prefix}.{token}", headers)
                if waiting:
                    await asyncio.wait(waiting)
            silent = ""
        except TimeoutError:
            silent = f"NATS did not answer within {seconds:g} s"
        except (Error, OSError) as error:
            silent = f"NATS: {error or type(error).__name__}"
        finally:
            for token, index in sent.items():
                answered = self._waiting.pop(token)
                if answered.done():
                    answers[index] = answered.result()
        if silent and not any(isinstance(answer, Confirmed) for answer in answers):
            # The server is gone or frozen: events in the buffers must not arrive after their rows were released.
            await self._link.drop()
        return [answer or Unanswered(silent or "NATS did not answer") for answer in answers]

    async def _answered(self, message: Msg) -> None:
        future = self._waiting.get(message.subject.rpartition(".")[2])
        if future is not None and not future.done():
            future.set_result(answer_of(message))

    def _lost(self) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_result(Unanswered("the connection to NATS was lost"))


def _windows(batch: Sequence[Outgoing]) -> Iterator[Sequence[Outgoing]]:
    for start in range(0, len(batch), _WINDOW):
        yield batch[start : start + _WINDOW]


def _headers(event: Outgoing, stream: str) -> dict[str, str]:
    headers = {"content-type": STRUCTURED, **event.headers}
    headers[Header.MSG_ID] = event.message_id
    headers[Header.EXPECTED_STREAM] = stream
    return headers


def never(event: Outgoing, headers: dict[str, str], largest: int) -> Refused | None:
    """Return why the server would never take an event, or None. It would close the connection for a larger one."""
    if bad := next((name for name in headers if not _is_header(name)), None):
        return Refused(f"its header {bad[:80]!a} has a name that NATS does not take")
    in_headers = sum(len(name.encode()) + len(value.encode()) + 4 for name, value in headers.items()) + 12
    size = len(event.body) + in_headers
    if size > largest:
        return Refused(f"it has {size} bytes with its headers, and NATS takes {largest} (max_payload)")
    return None


def answer_of(message: Msg) -> Answer:
    """Return what JetStream said about one event."""
    if message.headers and message.headers.get(Header.STATUS) == _NO_RESPONDERS:
        return Unanswered(_NO_STREAM, told=True)
    try:
        found = json.loads(message.data)
    except ValueError:
        return Unanswered("NATS answered something that is no JSON")
    error = found.get("error")
    if error is None:
        return Confirmed()
    problem = f"NATS: {error.get('description', error)}"
    # Every other error is the stream's, which is full, without a leader, or another one: the event may be sent again.
    return Refused(problem) if error.get("err_code") == _TOO_LARGE else Unanswered(problem, told=True)
