"""The metrics endpoint answers for the hosts it knows; a page in a browser cannot read it by another name (SEC-1)."""

from __future__ import annotations

import asyncio
import socket

import pytest

from holdfast.observability import endpoint, http

pytestmark = pytest.mark.trust


async def status(port: int, fields: str) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /metrics HTTP/1.1\r\n{fields}\r\n".encode("latin-1"))
    answer = await reader.read()
    writer.close()
    return int(answer.split()[1])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("Host: 127.0.0.1:9464\r\n", 200),
        ("Host: [::1]:9464\r\n", 200),
        ("Host: 10.1.2.3\r\n", 200),
        ("host:  LOCALHOST:1\r\n", 200),
        (f"Host: {socket.gethostname()}\r\n", 200),
        ("Host: metrics.internal.:9464\r\n", 200),
        ("Host: evil.example\r\n", 421),
        ("Host: localhost.evil.example\r\n", 421),
        ("Host: 127.0.0.1.evil.example\r\n", 421),
        ("Host: evil.example\r\nHost: localhost\r\n", 421),
        ("X-Forwarded-Host: localhost\r\n", 421),
        ("Host: \r\n", 421),
        ("", 421),
    ],
)
async def test_which_hosts_are_answered(fields: str, expected: int) -> None:
    """Addresses, localhost, this machine's name and what is allowed; anything else is misdirected (SEC-1)."""
    page = endpoint.process_page(lambda: ())
    async with http.serve([http.Site("127.0.0.1", 0, {endpoint.PATH: page}, ("Metrics.internal",))]) as (port,):
        assert await status(port, fields) == expected
