"""The demo's screen shows an address of its database that psql accepts."""

from __future__ import annotations

import io
import re
import subprocess

import pytest
from rich.console import Console

from examples.orders.view import Scene, draw
from holdfast.embedded import EmbeddedPostgres, find_binaries

pytestmark = pytest.mark.newcomer


@pytest.mark.parametrize("width", [80, 120])
def test_the_address_on_the_screen_is_whole(width: int) -> None:
    """It can be copied from one line, and psql connects with it (RUN-1)."""
    with EmbeddedPostgres(settings={"fsync": "off"}) as server:
        dsn = server.create_database("shop")
        console = Console(width=width, height=24, record=True, force_terminal=True, file=io.StringIO())
        console.print(draw(Scene(url="http://127.0.0.1:40000/orders", server="Postgres 18", dsn=dsn)), height=24)
        (shown,) = re.findall(r"^psql (postgresql://\S+)\s*$", console.export_text(), re.MULTILINE)
        assert shown == dsn
        run = subprocess.run(
            [find_binaries().program("psql"), shown, "-tAc", "SELECT 17"], capture_output=True, text=True
        )
        assert (run.stdout, run.stderr) == ("17\n", "")
