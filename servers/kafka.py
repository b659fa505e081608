"""Kafka's protocol from librdkafka's mock cluster, or the cluster at HOLDFAST_TEST_KAFKA.

The mock forgets everything when it ends, so it can be frozen but not started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Self

REAL = os.environ.get("HOLDFAST_TEST_KAFKA")
BROKERS = 3


class KafkaMock:
    """Three brokers in a process of their own."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self.address = ""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        self.address = f"kafka://{self._process.stdout.readline().strip()}"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        # This also closes its pipes.
        self._process.communicate()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def kafka_server() -> Iterator[KafkaMock]:
    """Yield the mock cluster, or the real one, which cannot be frozen."""
    if REAL:
        server = KafkaMock()
        server.address = REAL
        yield server
        return
    with KafkaMock() as server, _patient_leaders():
        yield server


@contextlib.contextmanager
def _patient_leaders() -> Iterator[None]:
    """Let the leader of a group wait for its followers: the mock refuses those that synchronise after it."""
    from aiokafka.consumer.group_coordinator import CoordinatorGroupRebalance

    at_once = CoordinatorGroupRebalance._on_join_leader

    async def later(self: Any, response: Any) -> Any:
        await asyncio.sleep(0.15)
        return await at_once(self, response)

    CoordinatorGroupRebalance._on_join_leader = later
    try:
        yield
    finally:
        CoordinatorGroupRebalance._on_join_leader = at_once


def _serve() -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": BROKERS})
    brokers = producer.list_topics(timeout=10).brokers.values()
    print(",".join(f"{broker.host}:{broker.port}" for broker in brokers), flush=True)
    # Run until the tests close the pipe, or end.
    sys.stdin.read()


if __name__ == "__main__":
    _serve()
