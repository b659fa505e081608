"""`holdfast metrics` (OBS-2, OBS-3, OBS-4): the text format, the endpoint, and what a scrape costs."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast import HandlerRegistry, Operator, installing
from holdfast.cli import main
from holdfast.embedded import EmbeddedPostgres
from holdfast.errors import ConfigurationError
from holdfast.observability import endpoint, prometheus
from holdfast.observability.endpoint import Scraper, serve
from holdfast.observability.http import address_of, is_loopback
from holdfast.postgres.operations.excerpt import Excerpt
from holdfast.postgres.operations.metrics import Snapshot, snapshot
from holdfast.postgres.operations.rates import RollupLag
from holdfast.postgres.operations.server import ServerStatus
from holdfast.postgres.operations.status import Notifications, RouteStatus, Status
from holdfast.postgres.wakeup import mode as wakeup_mode
from tests.worker.support import backends, insert, publish_many, running, until

Metrics = dict[str, dict[str, float]]

SAMPLE = re.compile(r'(?P<name>holdfast_[a-z_]+)(?P<labels>\{(?:[a-z]+="(?:[^"\\\n]|\\[\\n"])*",?)+\})? (?P<value>\S+)')


def parsed(text: str) -> Metrics:
    """What a scraper would read: values by metric and by the text of the labels. Fails on anything else."""
    metrics: Metrics = {}
    lines = text.removesuffix("\n").split("\n")
    while lines:
        helped, typed = lines.pop(0).split(" ", 3), lines.pop(0).split(" ")
        assert helped[:2] == ["#", "HELP"] and helped[3] and typed == ["#", "TYPE", helped[2], "gauge"]
        values = metrics.setdefault(helped[2], {})
        while lines and not lines[0].startswith("#"):
            sample = SAMPLE.fullmatch(lines.pop(0))
            assert sample and sample["name"] == helped[2]
            values[sample["labels"] or ""] = float(sample["value"])
    return metrics


async def scrape(conn: asyncpg.Connection) -> str:
    found = await snapshot(conn)
    return prometheus.exposition(lambda: prometheus.outbox_metrics(found))[0]


async def request(
    port: int, line: str = "GET /metrics HTTP/1.1", rest: str = "Host: localhost\r\n"
) -> tuple[int, str, str]:
    """The status, the headers and the body of an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{line}\r\n{rest}\r\n".encode())
    answer = (await asyncio.wait_for(reader.read(), 20)).decode()
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split(" ")[1]), head, body


# --- what is said ---


async def test_every_state_is_a_metric(dsn: str, conn: asyncpg.Connection) -> None:
    """Pending, delayed, in flight and failed, the age of the oldest, and the queue of notifications (OBS-3)."""
    await conn.execute("SELECT core.subscribe('shop', 'shop.note', '{order.placed}')")
    await publish_many(conn, "order.placed", 3)
    await publish_many(conn, "order.placed", 2, delay=600)
    await insert(conn, "order.lost")
    await conn.execute("UPDATE core.outbox SET available_at = now() - interval '60 s' WHERE event_type = 'order.lost'")
    await conn.execute(
        """
        INSERT INTO core.outbox (event_type, source, payload, status, settled_at, failed_at, failure_reason)
        SELECT 'order.bad', 'shop', '{}', 'failed', now(), now(), 'rejected' FROM generate_series(1, 4)
        """
    )
    found = parsed(await scrape(conn))
    assert {name: found[f"holdfast_outbox_{name}"][""] for name in ("pending", "delayed", "in_flight", "failed")} == {
        "pending": 4,
        "delayed": 2,
        "in_flight": 0,
        "failed": 4,
    }
    assert 60 <= found["holdfast_outbox_oldest_seconds"][""] < 120
    lane = '{channel="outbox_default",generation="0",route="*/order.%s"}'
    assert found["holdfast_route_open"] == {lane % "placed": 5, lane % "lost": 1}
    assert found["holdfast_route_oldest_seconds"][lane % "lost"] >= 60
    assert found["holdfast_route_unrouted"] == {lane % "placed": 0, lane % "lost": 1}
    assert found["holdfast_route_unserved_handlers"] == {lane % "placed": 1, lane % "lost": 0}
    assert found["holdfast_channel_unserved"] == {'{channel="outbox_default",generation="0"}': 1}
    assert 0 <= found["holdfast_notification_queue_usage_ratio"][""] < 1
    assert found["holdfast_workers_living"] == {"": 0}


async def test_workers_and_listeners_are_counted(dsn: str, conn: asyncpg.Connection) -> None:
    """A worker that listens is told from one that only polls, and from one that died (OBS-3)."""
    registry = HandlerRegistry()

    @registry.handler("order.placed", name="shop.note")
    async def note(event: Any) -> None: ...

    async def counts() -> tuple[float, float, float]:
        found = parsed(await scrape(conn))
        return tuple(found[f"holdfast_{name}"][""] for name in ("workers_living", "workers_silent", "listeners"))  # type: ignore[return-value]

    async def seen(expected: tuple[int, int, int]) -> bool:
        return await counts() == expected

    async with running(dsn, registry), running(dsn, registry, listen=False):
        await until(lambda: seen((2, 0, 1)), what="two workers, one of which listens")
    assert await counts() == (0, 0, 0)
    dead = "SELECT core.worker_beat(gen_random_uuid(), 'dead', 'host', 1, '1.0', 0, '{outbox_default}', '{a.b}')"
    await conn.execute(dead)
    await conn.execute("UPDATE core.workers SET heartbeat_at = now() - interval '61 s'")
    assert await counts() == (0, 1, 0)


async def test_the_mode_of_the_bell(dsn: str, conn: asyncpg.Connection) -> None:
    """One of the modes is set, and a trigger that was dropped is seen (OBS-3)."""

    async def mode() -> list[str]:
        return [mode for mode, on in parsed(await scrape(conn))["holdfast_notify_mode"].items() if on]

    assert await mode() == ['{mode="when_idle"}']
    await wakeup_mode.set_mode(dsn, "never")
    assert await mode() == ['{mode="never"}']
    await conn.execute("DROP TRIGGER outbox_bell ON core.outbox")
    assert await mode() == ['{mode="missing"}']


def test_labels_are_escaped() -> None:
    """Whoever may publish chooses names, and must not be able to write metrics of their own (OBS-2)."""
    route = 'a\\b"c\nholdfast_outbox_failed 0'
    lane = RouteStatus("c", 0, route, None, None, [route], 7, None, [])
    status = Status(0, 0, 0, 0, 9, 0, False, Excerpt([lane], 1), [], 0, Excerpt([], 0), "always")
    server = ServerStatus(3, 97, None, None, [])
    found = Snapshot(status, Notifications(0.5, 1), [], [], 0, RollupLag(3, 4.0, 8192), server)
    text = prometheus.exposition(lambda: prometheus.outbox_metrics(found))[0]
    found = parsed(text)
    assert found["holdfast_route_open"] == {
        '{channel="c",generation="0",route="a\\\\b\\"c\\nholdfast_outbox_failed 0"}': 7
    }
    assert found["holdfast_outbox_failed"] == {"": 9}
    assert (found["holdfast_rollup_journal_lines"], found["holdfast_rollup_journal_oldest_seconds"]) == (
        {"": 3},
        {"": 4},
    )
    assert found["holdfast_notification_queue_usage_ratio"] == {"": 0.5}
    assert text.endswith("\n") and "\n\n" not in text


NAMES = """
    broker_redelivered broker_report_age_seconds broker_unacknowledged broker_waiting broker_weaknesses
    channel_unserved failures_last_week handler_blocked_keys handler_breaker_failed_probes handler_breaker_open
    handler_failed handler_fleet_concurrency handler_fleet_in_flight handler_in_flight handler_oldest_seconds
    handler_paused handler_pending handler_rate_limit
    horizon_age_seconds horizon_age_transactions listeners notification_queue_usage_ratio notify_mode outbox_archived
    outbox_count_limit
    outbox_delayed outbox_expired_leases outbox_failed outbox_in_flight outbox_oldest_seconds outbox_pending
    outbox_unrouted rollup_journal_lines rollup_journal_oldest_seconds
    route_oldest_seconds route_open route_unrouted route_unserved_handlers routes_left_out
    schedule_overdue_seconds schedule_paused schedule_served server_connections server_connections_limit
    table_dead_rows table_rows table_size_bytes workers_living workers_silent
"""


async def test_the_client_library_reads_them(dsn: str, conn: asyncpg.Connection) -> None:
    """Every metric is there from the start, a gauge, and reads as the operator's verb wrote it (OBS-2)."""
    await publish_many(conn, "order.placed", 3)
    async with Operator(dsn, actor="ann") as operator:
        families = {family.name: family for family in text_string_to_metric_families(await operator.metrics())}
    assert sorted(families) == [f"holdfast_{name}" for name in NAMES.split()]
    assert {family.type for family in families.values()} == {"gauge"}
    assert all(family.documentation.endswith(".") for family in families.values())
    (lane,) = families["holdfast_route_open"].samples
    assert lane.labels == {"channel": "outbox_default", "generation": "0", "route": "*/order.placed"}
    assert lane.value == families["holdfast_outbox_pending"].samples[0].value == 3


async def test_without_the_extra(dsn: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says what to install, whether they are printed or served (OPS-1)."""
    monkeypatch.setattr(installing, "find_spec", lambda name: None if name == "prometheus_client" else find_spec(name))
    for extra in ([], ["--listen", "0"]):
        with pytest.raises(SystemExit) as end:
            await asyncio.to_thread(main, ["metrics", "--dsn", dsn, *extra])
        assert end.value.code == 2
        assert "try: pip install '.[prometheus]' in a checkout" in capsys.readouterr().err


# --- what it costs ---

READ = """
SELECT coalesce(sum(seq_tup_read + coalesce(idx_tup_fetch, 0)), 0)::bigint AS rows, sum(seq_scan)::bigint AS scans
FROM pg_stat_user_tables WHERE relname IN ('outbox', 'event_handled')
"""


async def test_a_scrape_reads_no_retained_rows(conn: asyncpg.Connection) -> None:
    """Beside thousands of delivered events a scrape reads as many rows as are open (OBS-4)."""
    await conn.execute(
        """
        INSERT INTO core.outbox (event_type, source, payload, status, settled_at, delivered_at, handler_name)
        SELECT 'order.placed', 'shop', '{}', 'delivered', now(), now(), 'a.b' FROM generate_series(1, 20000)
        """
    )
    await publish_many(conn, "order.placed", 10)
    await conn.execute("ANALYZE core.outbox")
    await conn.execute("SET stats_fetch_consistency = none")

    async def read() -> tuple[int, int]:
        await conn.execute("SELECT pg_stat_force_next_flush()")
        return tuple(await conn.fetchrow(READ))

    before = await read()
    assert parsed(await scrape(conn))["holdfast_outbox_pending"] == {"": 10}
    after = await read()
    assert 10 <= after[0] - before[0] <= 100
    assert after[1] == before[1], "the whole table was read"


# --- the endpoint ---


@asynccontextmanager
async def serving(dsn: str) -> AsyncIterator[int]:
    async with serve({"": Scraper(dsn)}, "127.0.0.1", 0) as port:
        yield port


async def test_the_endpoint_answers_prometheus(dsn: str, conn: asyncpg.Connection) -> None:
    """GET /metrics and nothing else (OBS-2)."""
    async with serving(dsn) as port:
        status, head, body = await request(port)
        assert status == 200
        assert "Content-Type: text/plain; version=0.0.4; charset=utf-8" in head
        assert f"Content-Length: {len(body.encode())}" in head
        assert parsed(body)["holdfast_outbox_pending"] == {"": 0}
        assert (await request(port, "GET /metrics?name[]=x HTTP/1.0"))[0] == 200
        status, head, _ = await request(port, "POST /metrics HTTP/1.1")
        assert status == 405 and "Allow: GET" in head
        assert (await request(port, "GET / HTTP/1.1"))[0] == 404
        assert (await request(port, "GET /metrics"))[0] == 400
        assert (await request(port, rest=f"X: {'y' * 20_000}\r\n"))[0] == 431
        assert (await request(port))[0] == 200, "it outlives all of that"


async def test_the_database_is_asked_once_a_second(
    dsn: str, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one connection, however many scrape (OBS-4)."""
    async with serving(dsn) as port:
        answers = await asyncio.gather(*(request(port) for _ in range(20)))
        assert len({body for _, _, body in answers}) == 1
        assert len(await backends(conn, "metrics")) == 1
        monkeypatch.setattr(endpoint, "FRESH_FOR", 3600)
        await insert(conn, "order.placed")
        assert parsed((await request(port))[2])["holdfast_outbox_pending"] == {"": 0}
        monkeypatch.setattr(endpoint, "FRESH_FOR", 0)
        assert parsed((await request(port))[2])["holdfast_outbox_pending"] == {"": 1}


async def test_without_a_database_there_are_no_metrics(
    own_server: EmbeddedPostgres, own_dsn: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """503 while it is gone, metrics again when it is back, and never a word of the address (OBS-2)."""
    monkeypatch.setattr(endpoint, "FRESH_FOR", 0)
    async with serving(own_dsn) as port:
        assert (await request(port))[0] == 200
        await asyncio.to_thread(own_server.kill)
        for _ in range(2):
            status, _, body = await request(port)
            assert (status, body) == (503, "the database does not answer\n")
        await asyncio.to_thread(own_server.start)

        async def back() -> bool:
            return (await request(port))[0] == 200

        await until(back, what="metrics again")
    said = capsys.readouterr()
    password = own_dsn.partition("postgres:")[2].partition("@")[0]
    assert len(password) > 20 and password not in said.out + said.err
    assert said.out.count("metrics_unavailable") == 1, "told once, not with every scrape"


async def test_a_schema_that_is_not_there(empty_dsn: str) -> None:
    """The endpoint says that it cannot, and goes on (OBS-2)."""
    async with serving(empty_dsn) as port:
        assert (await request(port))[0] == 503


# --- the command ---

Start = Callable[..., Any]


@pytest.fixture
def command(dsn: str) -> Start:
    @asynccontextmanager
    async def start(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name("holdfast")),
            "metrics",
            *arguments,
            env={"HOLDFAST_DSN": dsn, "PATH": "/usr/bin"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    return start


async def test_the_command_prints_once(command: Start) -> None:
    """For a cron job that writes a file, and for people (OBS-2)."""
    async with command() as process:
        out, err = await asyncio.wait_for(process.communicate(), 20)
    assert (process.returncode, err) == (0, b"")
    assert parsed(out.decode())["holdfast_outbox_pending"] == {"": 0}


async def test_the_command_serves_until_sigterm(command: Start) -> None:
    """Closed beyond loopback, and stopped in order (OBS-2)."""
    async with command("--listen", "0") as process:
        line = (await asyncio.wait_for(process.stderr.readline(), 20)).decode()
        port = re.fullmatch(r"serving http://127\.0\.0\.1:(\d+)/metrics\n", line)
        assert port, line
        assert (await request(int(port[1])))[0] == 200
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20) == 0


async def test_an_address_in_use_is_said(command: Start) -> None:
    """Two lines and exit code 2 (OPS-1)."""
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    async with command("--listen", f"127.0.0.1:{port}") as process:
        _, err = await asyncio.wait_for(process.communicate(), 20)
    taken.close()
    assert process.returncode == 2
    assert err.decode().startswith(f"error: --listen 127.0.0.1:{port} cannot be used:") and "\ntry: " in err.decode()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9464", ("127.0.0.1", 9464)),
        (":9464", ("127.0.0.1", 9464)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),  # noqa: S104
        ("[::1]:9464", ("::1", 9464)),
        ("metrics.internal:9464", ("metrics.internal", 9464)),
    ],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert address_of(text) == expected


@pytest.mark.parametrize("text", ["", "here", "1.2.3.4", "127.0.0.1:70000", "::1:9464", "a b:1", "[x]:1"])
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--listen"):
        address_of(text)


def test_who_is_only_this_machine() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "::1", "localhost", "127.8.8.8")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org")))  # noqa: S104
