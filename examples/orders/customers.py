"""Customers: they place orders over HTTP and remember which were acknowledged."""

import asyncio
import http.client
import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit
from uuid import UUID, uuid4

_NAMES = ("Ada", "Grace", "Edsger", "Barbara", "Donald", "Frances", "Alan", "Radia", "Tim", "Margaret")
_AT_ONCE = 8
_TRIES = 2


class Customers:
    """`acknowledged` are the orders answered with 201; `unanswered` counts the others."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url)
        self._names = itertools.cycle(_NAMES)
        # In threads, each with a connection of its own, so that the screen never waits for a customer.
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="customer")
        self._own = threading.local()
        self._closed = False
        self.acknowledged: list[UUID] = []
        self.unanswered = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def place(self, count: int) -> None:
        """As fast as a few customers can."""
        left = iter(range(count))

        def customer() -> None:
            for _ in left:
                if self._closed:
                    return
                self._place_one()

        await asyncio.gather(*(self._in_thread(customer) for _ in range(min(count, _AT_ONCE))))

    async def place_steadily(self, per_second: float, until: float) -> None:
        """Until the monotonic clock says so."""
        due = time.monotonic()
        async with asyncio.TaskGroup() as group:
            while (now := time.monotonic()) < until:
                if now >= due:
                    group.create_task(self.place(1))
                    due += 1 / per_second
                await asyncio.sleep(max(0.0, min(due, until) - time.monotonic()))

    async def wait_for_api(self, running: Callable[[], bool], patience: float = 60) -> bool:
        """Until the API answers; false when it does not, or is gone."""
        answer = asyncio.ensure_future(self._in_thread(self._knock))
        deadline = time.monotonic() + patience
        while running() and not answer.done() and time.monotonic() < deadline:
            await asyncio.wait((answer,), timeout=0.05)
        return answer.done() and bool(answer.result())

    def _knock(self) -> bool:
        try:
            return self._request("GET", f"/{UUID(int=0)}")[0] == 404
        except (OSError, http.client.HTTPException):
            return False

    async def _in_thread(self, call: Callable[[], object]) -> object:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _place_one(self) -> None:
        order = {"customer": next(self._names), "total_cents": random.randint(100, 50_000)}
        key = {"Idempotency-Key": str(uuid4())}
        for _ in range(_TRIES):  # whoever asks again with the same key has ordered once
            try:
                status, body = self._request("POST", "", json.dumps(order), key)
            except (OSError, http.client.HTTPException):
                continue
            if status == 201:
                self.acknowledged.append(UUID(json.loads(body)["order_id"]))
                return
        self.unanswered += 1

    def _request(
        self, method: str, path: str, body: str | None = None, more: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        connection: http.client.HTTPConnection | None = getattr(self._own, "connection", None)
        if connection is None:
            connection = http.client.HTTPConnection(self._address.hostname or "", self._address.port, timeout=30)
            self._own.connection = connection
        try:
            headers = {**({"Content-Type": "application/json"} if body else {}), **(more or {})}
            connection.request(method, self._address.path + path, body, headers)
            reply = connection.getresponse()
            return reply.status, reply.read()
        except BaseException:
            self._own.connection = None
            connection.close()
            raise
