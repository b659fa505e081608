"""Customers: they place orders over HTTP and remember which were acknowledged."""

import asyncio
import itertools
import random
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self
from uuid import UUID

import httpx

_NAMES = ("Ada", "Grace", "Edsger", "Barbara", "Donald", "Frances", "Alan", "Radia", "Tim", "Margaret")


class Customers:
    """`acknowledged` are the orders answered with 201; `unknown` counts those without an answer."""

    def __init__(self, url: str) -> None:
        self._url = url
        limits = httpx.Limits(max_connections=16, max_keepalive_connections=16)
        self._client = httpx.AsyncClient(limits=limits, timeout=30, trust_env=False)
        self._numbers = itertools.count(1)
        self.acknowledged: list[UUID] = []
        self.unknown = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def place_one(self) -> UUID | None:
        order = {"customer": _NAMES[next(self._numbers) % len(_NAMES)], "total_cents": random.randint(100, 50_000)}
        try:
            reply = await self._client.post(self._url, json=order)
        except httpx.TransportError:
            self.unknown += 1
            return None
        if reply.status_code != 201:
            self.unknown += 1
            return None
        order_id = UUID(reply.json()["order_id"])
        self.acknowledged.append(order_id)
        return order_id

    async def place(self, count: int) -> None:
        """As many as the API takes at once."""
        await asyncio.gather(*(self.place_one() for _ in range(count)))

    async def place_steadily(self, per_second: float, until: float) -> None:
        """Until the monotonic clock says so."""
        due = time.monotonic()
        async with asyncio.TaskGroup() as group:
            while (now := time.monotonic()) < until:
                if now >= due:
                    group.create_task(self.place_one())
                    due += 1 / per_second
                await asyncio.sleep(max(0.0, min(due, until) - time.monotonic()))

    async def wait_for_api(self, running: Callable[[], bool], patience: float = 60) -> bool:
        """Until the API answers; false when it does not, or is gone."""
        deadline = time.monotonic() + patience
        while running() and time.monotonic() < deadline:
            try:
                await self._client.get(f"{self._url}/00000000-0000-0000-0000-000000000000", timeout=5)
                return True
            except httpx.TransportError:
                await asyncio.sleep(0.05)
        return False
