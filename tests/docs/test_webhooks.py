"""The model handler of docs/webhooks.md, as it stands there, against a real HTTP server."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import asyncpg
import pytest

from holdfast import Publisher
from tests.docs.support import ROOT, blocks
from tests.worker.support import drained, running

pytestmark = pytest.mark.newcomer

SECRET = b"between us"

# What the server answers to an order, attempt by attempt; the last answer is repeated. "lost" hangs up.
ANSWERS: dict[str, list[tuple[int, dict[str, str]] | str]] = {
    "fine": [(204, {})],
    "busy": [(429, {"Retry-After": "1"}), (503, {"Retry-After": "1"}), (200, {})],
    "down": [(500, {}), (200, {})],
    "lost": ["lost", (202, {})],
    "odd wait": [(503, {"Retry-After": "²"}), (200, {})],
    "bad": [(400, {})],
    "unknown": [(404, {"Retry-After": "1"})],
    "gone": [(410, {})],
    "moved": [(307, {"Location": "http://127.0.0.1:9/elsewhere"})],
}


class Receiver(ThreadingHTTPServer):
    """Notes every request, and answers as its order wants."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.requests: dict[str, list[tuple[dict[str, str], bytes]]] = defaultdict(list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hooks"


class Answering(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Receiver)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        order = json.loads(body)["payload"]["order"]
        seen = self.server.requests[order]
        answer = ANSWERS[order][min(len(seen), len(ANSWERS[order]) - 1)]
        seen.append(({name.lower(): value for name, value in self.headers.items()}, body))
        if isinstance(answer, str):
            self.close_connection = True
            return
        status, headers = answer
        self.send_response_only(status)
        for name, value in {**headers, "Content-Length": "0"}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def saved(name: str, folder: Path) -> ModuleType:
    """A program of the page, imported from where the page says to save it."""
    (block,) = [each for each in blocks("python", pages=[ROOT / "docs" / "webhooks.md"]) if each.file == name]
    path = folder / Path(name).name
    path.write_text(block.text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(120)
async def test_every_answer_leads_to_what_the_page_says(
    dsn: str, conn: asyncpg.Connection, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handled, snoozed, retried or a dead letter; the key and the signature are right at every attempt (LSN-6)."""
    monkeypatch.setenv("WEBHOOK_URL", receiver.url)
    monkeypatch.setenv("WEBHOOK_SECRET", SECRET.decode())
    hooks, receiving = saved("app/webhooks.py", tmp_path), saved("receiver.py", tmp_path)
    async with conn.transaction():
        events = {name: await Publisher("shop").publish(conn, "order.placed", {"order": name}) for name in ANSWERS}
    async with running(dsn, hooks.registry, poll_interval=0.2):
        await drained(conn, within=60)
    await hooks.client.aclose()
    rows = await conn.fetch("SELECT payload->>'order', status, attempts, failure_reason FROM core.outbox")
    assert {row[0]: tuple(row)[1:] for row in rows} == {
        "fine": ("delivered", 1, None),
        "busy": ("delivered", 1, None),  # two snoozes count nothing
        "down": ("delivered", 2, None),
        "lost": ("delivered", 2, None),
        "odd wait": ("delivered", 2, None),
        "bad": ("failed", 1, "retry_terminal"),
        "unknown": ("failed", 1, "retry_terminal"),
        "gone": ("failed", 1, "retry_terminal"),
        "moved": ("failed", 1, "retry_terminal"),
    }
    assert {name: len(seen) for name, seen in receiver.requests.items()} == {
        name: len(answers) for name, answers in ANSWERS.items()
    }
    for name, seen in receiver.requests.items():
        for headers, body in seen:
            assert headers["idempotency-key"] == events[name].idempotency_key
            assert headers["webhook-id"] == json.loads(body)["event_id"] == str(events[name].event_id)
            assert receiving.is_genuine(headers, body, SECRET)
            assert not receiving.is_genuine(headers, body + b" ", SECRET)
            assert not receiving.is_genuine(headers, body, b"another")
            assert not receiving.is_genuine(headers, body, SECRET, now=int(headers["webhook-timestamp"]) + 301)
        assert len({body for _, body in seen}) == 1, "the body is the same at every attempt"
