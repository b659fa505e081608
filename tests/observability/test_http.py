"""The small HTTP server of the metrics and of the health (OBS-2, OBS-3, SEC-1): pages, hosts, limits, a thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from http import HTTPStatus
from pathlib import Path

import pytest

from holdfast.observability import http
from holdfast.observability.http import Request, Response, Site, UnixSite, combined, serve, serve_in_thread
from tests.worker.support import until


async def hello(request: Request) -> Response:
    return Response(f"hello {request.query} {request.fields.get('accept', '')}")


async def broken(_request: Request) -> Response:
    raise ValueError("postgresql://shop:secret@db/shop")


def ask(port: int, path: str = "/hello", method: str = "GET", fields: str = "") -> tuple[int, str, str]:
    """A status, the head and the body, asked for without an event loop."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as line:
        line.sendall(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{fields}\r\n".encode())
        answer = b""
        while part := line.recv(65_536):
            answer += part
    head, _, body = answer.decode().partition("\r\n\r\n")
    return int(head.split()[1]), head, body


def site(**pages: http.Page) -> Site:
    return Site("127.0.0.1", 0, {f"/{name}": page for name, page in pages.items()})


async def test_it_answers_while_the_event_loop_is_blocked() -> None:
    """The server has a thread of its own (OBS-3)."""
    with serve_in_thread([site(hello=hello)]) as (port,):
        assert ask(port, "/hello?a=1", fields="Accept: text/plain\r\n")[::2] == (200, "hello a=1 text/plain")
    with pytest.raises(OSError, match="refused"):
        ask(port)
    assert "holdfast-http" not in [thread.name for thread in threading.enumerate()]


def test_what_is_asked_for_otherwise() -> None:
    """HEAD is GET without a body; a page that fails costs one response; what there is, is named (OBS-2)."""
    with serve_in_thread([site(hello=hello, broken=broken)]) as (port,):
        status, head, body = ask(port, method="HEAD")
        assert (status, body) == (200, "") and "Content-Length: 7" in head
        assert ask(port, method="POST")[0] == 405
        assert ask(port, "/")[::2] == (404, "there is /hello and /broken\n")
        status, _, body = ask(port, "/broken")
        assert status == 500 and "secret" not in body and "ValueError" not in body
        assert ask(port)[0] == 200


def test_a_page_of_any_text_is_sent() -> None:
    """A lone surrogate in a name must not cost the whole page (OBS-2)."""

    async def odd(_request: Request) -> Response:
        return Response("billing.\udcff é\n", HTTPStatus.SERVICE_UNAVAILABLE, http.JSON)

    with serve_in_thread([site(odd=odd)]) as (port,):
        assert ask(port, "/odd")[::2] == (503, "billing.\\udcff é\n")


def test_sites_of_one_address_are_one() -> None:
    """Health and metrics may share an address (OBS-3)."""
    one, two = Site("::1", 9464, {"/a": hello}, ("x",)), Site("::1", 9464, {"/b": broken}, ("y",))
    other = Site("127.0.0.1", 9464, {"/a": hello})
    joined, alone = combined([one, other, two])
    assert alone is other and joined.url == "http://[::1]:9464"
    assert (joined.pages, joined.allowed) == ({"/a": hello, "/b": broken}, ("x", "y"))


def test_an_address_that_is_taken_is_an_error() -> None:
    """Of the caller, before anything is served (OBS-3)."""
    with serve_in_thread([site(hello=hello)]) as (port,):
        taken = serve_in_thread([Site("127.0.0.1", 0, {}), Site("127.0.0.1", port, {})])
        with pytest.raises(OSError, match="in use"), taken:
            pass


async def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many at most are kept, the newest, and none for long (SEC-1)."""
    monkeypatch.setattr(http, "_MOST_CONNECTIONS", 3)
    monkeypatch.setattr(http, "_PATIENCE", 2.0)
    async with serve([site(hello=hello)]) as (port,):
        lines = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        began = time.monotonic()
        with contextlib.suppress(ConnectionResetError):
            assert await lines[0][0].read() == b"", "the oldest has made room"
        assert time.monotonic() - began < 1.5
        assert (await asyncio.to_thread(ask, port))[0] == 200, "and so does the next"
        for reader, _ in lines[1:]:
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        for _, writer in lines:
            writer.close()


async def test_an_address_with_many_connections_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection of another address stays, though it is the oldest; a request that is answered stays too (SEC-1)."""
    monkeypatch.setattr(http, "_MOST_CONNECTIONS", 5)
    asked, released = asyncio.Event(), asyncio.Event()

    async def slow(_request: Request) -> Response:
        asked.set()
        await released.wait()
        return Response("slow")

    async with serve([site(hello=hello, slow=slow)]) as (port,):
        answered, answered_writer = await asyncio.open_connection("127.0.0.1", port)
        answered_writer.write(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await asked.wait()
        first, first_writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.3", 0))
        lines = [
            await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0)) for _ in range(20)
        ]  # fmt: skip
        with contextlib.suppress(ConnectionResetError):
            assert await lines[0][0].read() == b""
        first_writer.write(b"GET /hello HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await first.read()).startswith(b"HTTP/1.1 200")
        released.set()
        assert (await answered.read()).endswith(b"slow")
        for _, writer in (*lines, (None, first_writer), (None, answered_writer)):
            writer.close()


async def test_probes_are_answered_beside_clients_that_drip() -> None:
    """Hundreds of connections that never end their request, and come again when they are closed (SEC-1, OBS-3)."""

    async def drip(port: int) -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    writer.write(b"GET /")
                    opened.append(writer)
                    await reader.read()
                finally:
                    writer.close()
            await asyncio.sleep(0.05)

    opened: list[asyncio.StreamWriter] = []
    with serve_in_thread([site(hello=hello)]) as (port,):
        clients = [asyncio.create_task(drip(port)) for _ in range(300)]
        try:
            await until(lambda: len(opened) > 600, what="clients have come again")
            for _ in range(10):
                assert (await asyncio.to_thread(ask, port))[0] == 200
                await asyncio.sleep(0.05)
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


async def test_a_unix_socket(tmp_path: Path) -> None:
    """Whoever may open it needs no host (OBS-3)."""
    path = str(tmp_path / "s")
    async with serve([UnixSite(path, {"/hello": hello})]) as ports:
        assert ports == [0]
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"GET /hello HTTP/1.1\r\n\r\n")
        assert (await reader.read()).endswith(b"hello  ")
        writer.close()


async def test_a_client_that_reads_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its connection nor what it was sent is kept for longer than a response may take (SEC-1)."""
    monkeypatch.setattr(http, "_PATIENCE", 0.2)

    async def large(_request: Request) -> Response:
        return Response("x" * 16_000_000)

    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    async with serve([site(large=large)]) as (port,):
        before = open_files()
        with contextlib.ExitStack() as clients:
            for _ in range(5):
                line = clients.enter_context(socket.socket())
                line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
                line.connect(("127.0.0.1", port))
                line.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await until(lambda: open_files() == before + 10, what="both ends are open")
            await until(lambda: open_files() == before + 5, what="only those of the clients are left")
