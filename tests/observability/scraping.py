"""Scrapes as Prometheus makes them, read with the official parsers."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from holdfast.observability import prometheus
from tests.worker.support import PATIENCE, until

OPENMETRICS = "application/openmetrics-text; version=1.0.0"

Labels = frozenset[tuple[str, str]]


class Scrape(dict[tuple[str, Labels], float]):
    """Values by the name and the labels of a sample. Each has one value only."""

    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__()
        self.families = {family.name: family for family in families}
        for family in self.families.values():
            for sample in family.samples:
                key = sample.name, frozenset(sample.labels.items())
                assert key not in self, f"twice: {key}"
                self[key] = sample.value

    def of(self, name: str, **labels: str) -> float:
        """The sum of the samples of a metric that have these labels; those that are missing count as 0."""
        return sum(
            value for (each, found), value in self.items() if each == name and labels.items() <= dict(found).items()
        )

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """The same by the values of a label, without those that are 0."""
        values = {dict(found)[label] for each, found in self if each == name and label in dict(found)}
        sums = {value: self.of(name, **{**labels, label: value}) for value in values}
        return {value: found for value, found in sums.items() if found}


def read(text: str) -> Scrape:
    return Scrape(text_string_to_metric_families(text))


def read_openmetrics(text: str) -> Scrape:
    return Scrape(openmetrics_families(text))


def scrape(collector: prometheus.Collector) -> Scrape:
    """What a scrape of the collector gives, in both formats."""
    text, _ = prometheus.exposition(collector.collect)
    other, _ = prometheus.exposition(collector.collect, OPENMETRICS)
    found = read(text)
    assert found == read_openmetrics(other)
    return found


async def get(port: int, *, accept: str = "") -> tuple[int, str, str]:
    """The status, the head and the body of a response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\n\r\n".encode())
    answer = (await asyncio.wait_for(reader.read(), 20)).decode()
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split(" ")[1]), head, body


async def scraped(port: int) -> Scrape:
    status, _, body = await get(port)
    assert status == 200, body
    return read(body)


class Command:
    """A running `holdfast`, and the port that it serves at."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def said(self) -> str:
        return self._log.read_text()

    async def port(self) -> int:
        def found() -> int:
            served = re.search(r"http://127\.0\.0\.1:(\d+)", self.said)
            assert served or self.process.returncode is None, self.said
            return int(served[1]) if served else 0

        return await until(found, what="the address of the metrics")

    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@asynccontextmanager
async def command(dsn: str, directory: Path, *arguments: str, **variables: str) -> AsyncIterator[Command]:
    """`holdfast ...` in a directory, ended with SIGTERM, at last with SIGKILL."""
    log = directory / f"log-{arguments[0]}"
    with open(log, "wb") as file:
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name("holdfast")),
            *arguments,
            cwd=directory,
            stderr=file,
            env={**os.environ, "HOLDFAST_DSN": dsn, **variables},
        )
    running = Command(process, log)
    try:
        yield running
    finally:
        if process.returncode is None:
            children = running.children()
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), PATIENCE)
            except TimeoutError:
                for pid in (*children, process.pid):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                await process.wait()
