"""Takes the events of one handler with a consumer group, and claims those that dead consumers have left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Sequence
from typing import Any, Final

from pydantic_core import from_json
from redis.exceptions import ResponseError

from holdfast.brokers.addresses import Address
from holdfast.brokers.engine import BrokerUnavailable, Interest, Received
from holdfast.brokers.interests import TARGET_HEADER, TYPE_HEADER, Wanted
from holdfast.brokers.redis.link import ANSWER_SECONDS, Link
from holdfast.brokers.redis.scripts import CLAIM_OWN, DELETE_EMPTY, DISOWN, OWN, owner_of, start_of
from holdfast.brokers.redis.sink import BODY

# A consumer that has done nothing for a day, and holds nothing, is forgotten.
_FORGOTTEN_MS: Final = 86_400_000
_MOST_UNSEEN: Final = 1000
_BODY: Final = BODY.encode()
_LATE_SECONDS: Final = 2.0
_GOODBYE_SECONDS: Final = 2.0
_LONGEST_BLOCK: Final = 2.0
_OWNER_POLL: Final = 0.2
_BEGINNING: Final = b"0-0"


class RedisSource:
    """Reads on one connection that blocks, and acknowledges on another."""

    def __init__(self, address: Address, interest: Interest, stream: str, lease: float) -> None:
        self._interest = interest
        self._lease = lease
        self._lease_ms = max(int(lease * 1000), 1)
        self._reader = Link(address, f"holdfast {interest.handler_name}")
        self._writer = Link(address, f"holdfast {interest.handler_name}")
        self._stream, self._group = stream, interest.handler_name
        self._owner = owner_of(stream, interest.handler_name)
        self._me = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._made = False
        self._claim_at = 0.0
        self._cursor = _BEGINNING
        # Given out and not settled. Other entries that are ours by the server's books never reached us.
        self._held: set[bytes] = set()
        self._is_owed = Wanted(interest)

    async def open(self) -> None:
        await self._make_group()

    async def take(self, most: int, *, wait: float) -> Sequence[Received]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        if not self._made:
            await self._make_group()
        while True:
            try:
                found = await self._once(most, deadline - loop.time())
            except ResponseError as error:
                await self._recover(error)
                found = []
            if found or loop.time() >= deadline:
                return found

    async def keep_alive(self, messages: Sequence[Received]) -> None:
        if self._interest.ordered:
            await self._write("EVAL", OWN, 1, self._owner, self._me, self._lease_ms)
        await self._claim_own(messages, 0)

    async def acknowledge(self, messages: Sequence[Received]) -> None:
        await self._acknowledge([_id(message) for message in messages])

    async def give_back(self, messages: Sequence[Received]) -> None:
        await self._claim_own(messages, self._lease_ms)
        self._held.difference_update(map(_id, messages))
        self._claim_at = 0.0

    async def close(self) -> None:
        """Give back the entries that never reached this consumer, and delete the consumer if it holds no others."""
        self._reader.drop()
        with contextlib.suppress(BrokerUnavailable, ResponseError, TimeoutError):
            async with asyncio.timeout(_GOODBYE_SECONDS):
                await self._leave()
        await self._writer.close()
        await self._reader.close()

    async def _leave(self) -> None:
        unseen = await self._pending("-", "+", _MOST_UNSEEN)
        ids = [entry for entry in unseen if entry not in self._held]
        if ids:
            await self._writer.ask("EVAL", CLAIM_OWN, 1, self._stream, self._group, self._me, self._lease_ms, *ids)
        await self._writer.ask("EVAL", DELETE_EMPTY, 1, self._stream, self._group, self._me, 0)
        if self._interest.ordered:
            await self._writer.ask("EVAL", DISOWN, 1, self._owner, self._me)

    async def _make_group(self) -> None:
        """Make the handler's group, at the first event that the handler is owed, unless it exists."""
        start = start_of(self._interest.since)
        try:
            await self._writer.ask("XGROUP", "CREATE", self._stream, self._group, start, "MKSTREAM")
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                self._writer.note(error)
                raise BrokerUnavailable(f"Redis: {error}") from error
        with contextlib.suppress(ResponseError):
            await self._writer.ask("EVAL", DELETE_EMPTY, 1, self._stream, self._group, "", _FORGOTTEN_MS)
        self._made = True

    async def _recover(self, error: ResponseError) -> None:
        """Make the group again if it is gone: evicted, deleted, or lost in a restart without persistence."""
        text = str(error)
        if not text.startswith(("NOGROUP", "UNBLOCKED")):
            self._reader.note(error)
            raise BrokerUnavailable(f"Redis: {error}") from error
        self._cursor = _BEGINNING
        await self._make_group()

    async def _once(self, most: int, wait: float) -> list[Received]:
        loop = asyncio.get_running_loop()
        if self._interest.ordered and not await self._is_owner():
            await asyncio.sleep(max(min(wait, _OWNER_POLL), 0))
            return []
        if self._interest.ordered or loop.time() >= self._claim_at:
            found = await self._claimed(most)
            if found:
                return found
        until_claim = max(self._claim_at - loop.time(), 0.001)
        block = max(min(wait, until_claim, _LONGEST_BLOCK, self._lease / 3), 0.001)
        answer = await self._reader.ask(
            "XREADGROUP",
            *("GROUP", self._group, self._me, "COUNT", most, "BLOCK", max(int(block * 1000), 1)),
            *("STREAMS", self._stream, ">"),
            seconds=block + _LATE_SECONDS,
        )
        return await self._wanted(answer[0][1], {}) if answer else []

    async def _is_owner(self) -> bool:
        state = await self._reader.ask("EVAL", OWN, 1, self._owner, self._me, self._lease_ms)
        if state == 2:
            # The last owner is gone: take its entries first, even if its lease of them has not expired.
            await self._take_over()
        return bool(state)

    async def _take_over(self) -> None:
        cursor = _BEGINNING
        while True:
            command = ("XAUTOCLAIM", self._stream, self._group, self._me, 0, cursor, "COUNT", 100, "JUSTID")
            cursor, ids = (await self._reader.ask(*command))[:2]
            if ids:
                arguments = (self._group, self._me, self._lease_ms, *ids)
                await self._reader.ask("EVAL", CLAIM_OWN, 1, self._stream, *arguments)
            if cursor == _BEGINNING:
                return

    async def _claimed(self, most: int) -> list[Received]:
        """Claim entries that have been idle for longer than the lease, whichever consumer has them."""
        command = ("XAUTOCLAIM", self._stream, self._group, self._me, self._lease_ms, self._cursor, "COUNT", most)
        self._cursor, entries = (await self._reader.ask(*command))[:2]
        if self._cursor == _BEGINNING:
            self._claim_at = asyncio.get_running_loop().time() + self._lease / 3
        entries = [entry for entry in entries if entry is not None and entry[1] is not None]
        if not entries:
            return []
        counts = await self._pending(entries[0][0], entries[-1][0], _MOST_UNSEEN)
        return await self._wanted(entries, counts)

    async def _pending(self, first: str | bytes, last: str | bytes, most: int) -> dict[bytes, int]:
        """Return, for this consumer's pending entries, how often each was delivered."""
        rows = await self._writer.ask("XPENDING", self._stream, self._group, first, last, most, self._me)
        return {entry: count for entry, _, _, count in rows}

    async def _wanted(self, entries: Sequence[Any], counts: dict[bytes, int]) -> list[Received]:
        found: list[Received] = []
        unwanted: list[bytes] = []
        for entry, values in entries:
            headers, body = _fields(values or ())
            event_type, target = _kind(headers, body)
            if event_type is None or self._is_owed(event_type, target):
                found.append(Received(body, headers, counts.get(entry, 1), entry, event_type is not None))
            else:
                unwanted.append(entry)
        self._held.update(_id(message) for message in found)
        if unwanted:
            await self._acknowledge(unwanted)
        return found

    async def _acknowledge(self, ids: Sequence[bytes]) -> None:
        if ids:
            await self._write("XACK", self._stream, self._group, *ids)
            self._held.difference_update(ids)

    async def _claim_own(self, messages: Sequence[Received], idle: int) -> None:
        if messages:
            ids = map(_id, messages)
            await self._write("EVAL", CLAIM_OWN, 1, self._stream, self._group, self._me, idle, *ids)

    async def _write(self, *command: str | bytes | int) -> None:
        try:
            await self._writer.ask(*command, seconds=ANSWER_SECONDS)
        except ResponseError as error:
            if str(error).startswith("NOGROUP"):
                return  # the next `take` makes the group again, and all of its entries come again
            self._writer.note(error)
            raise BrokerUnavailable(f"Redis: {error}") from error


def _id(message: Received) -> bytes:
    assert isinstance(message.token, bytes)  # noqa: S101 -- tokens come back as they were given
    return message.token


def _fields(values: Sequence[bytes]) -> tuple[dict[str, str], bytes]:
    headers: dict[str, str] = {}
    body = b""
    for name, value in zip(values[::2], values[1::2], strict=False):
        if name == _BODY:
            body = value
        else:
            headers[name.decode(errors="replace")] = value.decode(errors="replace")
    return headers, body


def _kind(headers: dict[str, str], body: bytes) -> tuple[str | None, str | None]:
    """Return the type and target of an event; those of a foreign event are read from its body, if that is possible."""
    event_type = headers.get(TYPE_HEADER)
    if event_type is not None:
        return event_type, headers.get(TARGET_HEADER)
    try:
        found = from_json(body)
        event_type, target = found["type"], found.get("target")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, None
    return (event_type, target if isinstance(target, str) else None) if isinstance(event_type, str) else (None, None)
