"""Several sources as one, for a handler whose event types are in several streams or topics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from holdfast.brokers.engine import Received, Source


class _Token(NamedTuple):
    source: int
    token: object


class JoinedSource:
    """Takes from all of its sources at once. Messages that come between two calls wait here, and are kept alive."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = tuple(sources)
        self._taking: dict[int, asyncio.Task[Sequence[Received]]] = {}
        self._waiting: list[Received] = []
        self._turn = 0

    async def open(self) -> None:
        for source in self._sources:
            await source.open()

    async def take(self, most: int, *, wait: float) -> Sequence[Received]:
        if not self._waiting:
            await self._fill(most, wait)
        found, self._waiting = self._waiting[:most], self._waiting[most:]
        return found

    async def keep_alive(self, messages: Sequence[Received]) -> None:
        await self._tell([*messages, *self._waiting], lambda source: source.keep_alive)

    async def acknowledge(self, messages: Sequence[Received]) -> None:
        await self._tell(messages, lambda source: source.acknowledge)

    async def give_back(self, messages: Sequence[Received]) -> None:
        await self._tell(messages, lambda source: source.give_back)

    async def close(self) -> None:
        taking, self._taking = self._taking, {}
        for task in taking.values():
            task.cancel()
        await asyncio.gather(*taking.values(), return_exceptions=True)
        waiting, self._waiting = self._waiting, []
        await asyncio.gather(self.give_back(waiting), return_exceptions=True)
        await asyncio.gather(*(source.close() for source in self._sources), return_exceptions=True)

    async def _fill(self, most: int, wait: float) -> None:
        """Wait for the first source that has something; the others go on asking for the next call."""
        share = max(most // len(self._sources), 1)
        for index, source in enumerate(self._sources):
            if index not in self._taking:
                self._taking[index] = asyncio.ensure_future(source.take(share, wait=wait))
        await asyncio.wait(self._taking.values(), timeout=wait, return_when=asyncio.FIRST_COMPLETED)
        # Each call begins with another source, so that none starves when there is room for fewer than all.
        self._turn += 1
        failed: BaseException | None = None
        for offset in range(len(self._sources)):
            index = (self._turn + offset) % len(self._sources)
            if not self._taking[index].done():
                continue
            task = self._taking.pop(index)
            if (error := task.exception()) is not None:
                failed = failed or error
                continue
            self._waiting += [each._replace(token=_Token(index, each.token)) for each in task.result()]
        if failed is not None and not self._waiting:
            raise failed

    async def _tell(
        self, messages: Sequence[Received], verb: Callable[[Source], Callable[[Sequence[Received]], Awaitable[None]]]
    ) -> None:
        told: dict[int, list[Received]] = {}
        for each in messages:
            assert isinstance(each.token, _Token)  # noqa: S101 -- tokens come back as they were given
            told.setdefault(each.token.source, []).append(each._replace(token=each.token.token))
        calls = [verb(self._sources[index])(some) for index, some in told.items()]
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer


def joined(sources: Sequence[Source]) -> Source:
    """Return a source that takes from all of these; a single one is returned as it is."""
    return sources[0] if len(sources) == 1 else JoinedSource(sources)
