"""The faults of the harness are the ones they say they are: a check that nothing can break would prove nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from chaos.clock import ServerClock
from chaos.network import Line
from chaos.poison import AT_A_STEADY_RATE, AT_FULL_SPEED
from chaos.producers import Producer
from chaos.scenarios import SCENARIOS
from chaos.workers import LogPipe
from chaos.world import numbers
from tests.worker.support import until

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[Stream]]
SOON = 5.0
NEVER = 0.1  # how long is waited for what must not come


@pytest.fixture
async def heard() -> list[bytes]:
    """What has arrived behind the line."""
    return []


@pytest.fixture
async def line(heard: list[bytes]) -> AsyncIterator[Line]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(100):
                heard.append(data)
                writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    line = await Line("127.0.0.1", server.sockets[0].getsockname()[1]).open()
    yield line
    await line.close()
    server.close()


@pytest.fixture
async def connect(line: Line) -> AsyncIterator[Connect]:
    async with contextlib.AsyncExitStack() as opened:

        async def connect() -> Stream:
            reader, writer = await asyncio.open_connection("127.0.0.1", line.port)
            opened.callback(lambda: writer.transport.abort())  # holds the writer, which must not be dropped open
            return reader, writer

        yield connect


async def say(stream: Stream, text: bytes) -> bytes:
    reader, writer = stream
    writer.write(text)
    async with asyncio.timeout(SOON):
        return await reader.read(100)


async def is_silent(stream: Stream) -> bool:
    try:
        async with asyncio.timeout(NEVER):
            await stream[0].read(100)
    except TimeoutError:
        return True
    return False


async def is_reset(stream: Stream) -> bool:
    try:
        async with asyncio.timeout(SOON):
            return await stream[0].read(100) == b"never"
    except ConnectionResetError:
        return True


async def test_a_line_passes_and_counts(line: Line, connect: Connect) -> None:
    stream = await connect()
    assert await say(stream, b"hello") == b"hello"
    assert len(line.attempts) == 1


async def test_cut(line: Line, connect: Connect) -> None:
    """The connections of this moment are reset, later ones pass (B2)."""
    stream = await connect()
    await say(stream, b"hello")
    assert line.cut() == 1
    assert await is_reset(stream)
    assert await say(await connect(), b"again") == b"again"


async def test_refuse(line: Line, connect: Connect) -> None:
    """Nobody gets through until it is healed, and every attempt is counted (P7)."""
    assert line.refuse() == 0
    for _ in range(3):
        assert await is_reset(await connect())
    assert len(line.attempts) == 3
    line.heal()
    assert await say(await connect(), b"hello") == b"hello"


async def test_freeze(line: Line, connect: Connect, heard: list[bytes]) -> None:
    """Half-open: nothing passes in either direction, and nobody is told before it is healed (B3)."""
    stream = await connect()
    await say(stream, b"hello")
    assert line.freeze() == 1
    stream[1].write(b"is anybody there")
    assert await is_silent(stream)
    assert heard == [b"hello"]
    assert await say(await connect(), b"later") == b"later"
    line.heal()
    assert await is_reset(stream)


async def test_swallow(line: Line, connect: Connect, heard: list[bytes]) -> None:
    """New connections are half-open, too (B3)."""
    line.freeze(swallow=True)
    stream = await connect()
    stream[1].write(b"hello")
    assert await is_silent(stream)
    assert heard == []
    line.heal()
    assert await is_reset(stream)


async def test_mute(line: Line, connect: Connect, heard: list[bytes]) -> None:
    """What was asked for is done, and the answer never comes (P1)."""
    stream = await connect()
    await say(stream, b"hello")
    assert line.mute() == 1
    stream[1].write(b"commit")
    assert await is_silent(stream)
    assert heard == [b"hello", b"commit"]
    line.heal()
    assert await is_reset(stream)


def test_a_seed_draws_the_same_again() -> None:
    """Numbers of one purpose do not move when another purpose draws more or less (P1)."""

    def draws() -> list[list[float]]:
        purposes = [numbers(seed, purpose) for seed in (1, 2) for purpose in ("lane/0", "lane/1")]
        return [[rng.random() for _ in range(3)] for rng in purposes]

    assert draws() == draws()
    assert len({tuple(each) for each in draws()}) == 4


def test_producers_draw_everything_there_is() -> None:
    """Rollbacks, savepoints, open transactions, twins, delays and expiries are all part of the load (P1)."""

    class Keys:
        n = 0

        def keys(self, count: int) -> list[str]:
            self.n += count
            return [str(n) for n in range(self.n - count, self.n)]

    producer = Producer("", Keys(), random.Random(1), 100)  # type: ignore[arg-type]
    batches = [producer.draw() for _ in range(500)]
    events = [event for batch in batches for event in batch.events]
    assert {batch.at_once for batch in batches} == {True, False}
    assert any(batch.rollback for batch in batches) and any(batch.undone for batch in batches)
    assert any(batch.hold for batch in batches)
    assert any(batch.events[0] is batch.events[-1] and len(batch.events) > 1 for batch in batches)
    assert any(event.delay for event in events) and any(event.expires_in for event in events)
    assert {event.priority for event in events} == {0, 1, 2}


def test_the_limits_are_those_that_were_promised() -> None:
    """P3 to P7, one line each, so that loosening one is seen in review."""
    declared = {
        f"{name} {figure} <= {most:g}" for name, each in SCENARIOS.items() for figure, most in each.limits.items()
    }
    assert declared == {
        "ordered violations <= 0",
        "fleet_limits at_once <= 7",
        "fleet_limits rate_per_s <= 105",
        "fairness single_max_s <= 1",
        "breaker calls <= 200",
        "breaker handled_after_s <= 20",
        "breaker dead_letters <= 0",
        "poisoned_batch others_failed <= 0",
        "poisoned_batch attempts <= 1",
        "kill_workers reclaim_p99_s <= 5",  # lease 3 s, poll interval 1 s, and 1 s
        "restart_postgres first_claim_s <= 5",
        "restart_postgres connects_per_s <= 1",
        "kill_postgres first_claim_s <= 5",
        "terminate_backends connections_max <= 48",
        "terminate_listener wake_p99_ms <= 50",
        "terminate_listener wake_after_fault_s <= 5",
        "half_open wake_after_fault_s <= 15",
        "half_open noticed_s <= 15",
        "blackhole noticed_s <= 15",
        "deploy stop_idle_s <= 2",
        "deploy stop_busy_s <= 3",  # grace 2 s
        "deploy stop_hurried_s <= 2",
        "deploy stop_half_open_s <= 7",
        "failover first_claim_s <= 10",
        "clock_steps overlaps <= 0",
        "clock_steps reclaim_p99_s <= 9",  # a second lease time after a step back, and a heartbeat that sees it
        "failed_logins repeats <= 0",
        "failed_logins first_claim_s <= 5",
        "failed_logins connects_per_s <= 1",
        "blocked_log stop_unread_s <= 7",  # grace 2 s
        "many_handlers wake_p50_ms <= 50",
        "many_handlers wake_p99_ms <= 100",
        "many_handlers wake_after_fault_s <= 5",
        "slow_commits repeats_of_one <= 220",  # two batches of 100, and the 20 that a handler runs at once
        "slow_neighbours lone_p50_ms <= 100",
        "slow_neighbours fast_p99_s <= 2",
    }
    floors = {
        f"{name} {figure} >= {least:g}" for name, each in SCENARIOS.items() for figure, least in each.floors.items()
    }
    assert floors == {f"poison throughput_{kind} >= 0.95" for kind in AT_FULL_SPEED + AT_A_STEADY_RATE} | {
        "mix_nats relayed >= 50",
        "mix_redis relayed >= 50",
        "mix_rabbitmq relayed >= 50",
        "ordered keys >= 10000",
        "ordered kills >= 3",
        "ordered retries >= 1",
        "ordered replays >= 1",
        "fleet_limits slots_used >= 0.9",
        "fleet_limits rate_per_s >= 95",
        "fleet_limits kills >= 3",
        "fairness singles >= 10",
        "fairness left_behind >= 1",
        "breaker outage_s >= 120",
        "breaker kills >= 5",
        "poisoned_batch poisoned_failed >= 10",
        "poisoned_batch handled >= 9990",
        "blocked_log unread_per_s >= 60",  # of 300 that are published
        "rolling_upgrade old_at_work >= 3",
        "rolling_upgrade new_at_work >= 1",
        *(f"mix_{broker} relayed >= 50" for broker in ("nats", "redis", "rabbitmq")),
    }


def test_the_mix_has_every_fault_that_can_be_beside_others() -> None:
    """P1."""
    drawn = {make().name for lane in SCENARIOS["mix"].lanes for make in lane}
    assert {"step_clock", "close_logins", "hold_logs", "roll_out", "crowd", "slow_commits", "slow_neighbours"} <= drawn
    otherwise = SCENARIOS["mix"].otherwise
    assert otherwise is not None
    assert drawn - {make().name for lane in otherwise.lanes for make in lane} == {"step_clock"}


async def test_a_log_that_nobody_reads(tmp_path: Path) -> None:
    """The pipe takes no more than it holds until it is read again, and nothing of it is missing then (T16)."""
    pipe = LogPipe(tmp_path / "worker.log")
    pipe.hold()
    os.set_blocking(pipe.writing, False)
    written = 0
    with pytest.raises(BlockingIOError):
        while True:
            written += os.write(pipe.writing, b"line\n" * 100)
    assert written > 0 and (tmp_path / "worker.log").stat().st_size == 0
    pipe.release()
    await until(lambda: (tmp_path / "worker.log").stat().st_size == written, within=SOON)
    os.close(pipe.writing)
    pipe.copy()
    assert (tmp_path / "worker.log").stat().st_size == written


def test_steps_of_a_clock_add_up(tmp_path: Path) -> None:
    """What is stepped back and forward again is where it was (T14)."""
    clock = ServerClock(tmp_path / "clock")
    for step, told in ((7200, "+7200"), (-3600, "+3600"), (-7200, "-3600"), (3600, "+0")):
        clock.step(step)
        assert (tmp_path / "clock").read_text() == told + "\n"
