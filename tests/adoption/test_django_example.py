"""The example in Django: orders through its view, its worker, and one sale for each order."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import asyncpg
import pytest

from tests.worker.support import drained

ROOT = Path(__file__).parents[2]

ORDERS = """
    import django
    django.setup()
    from django.test import Client
    for number in range(20):
        order = {"customer": f"customer {number % 3}", "total_cents": 100}
        answer = Client().post("/orders", order, content_type="application/json")
        assert answer.status_code == 201, answer.content
"""


@pytest.mark.slow
async def test_orders_have_one_sale_each(dsn: str, conn: asyncpg.Connection) -> None:
    """Handlers with Django's ORM have each effect once (LSN-13, RUN-1)."""
    variables = {
        **os.environ,
        "HOLDFAST_DSN": dsn,
        "DJANGO_SETTINGS_MODULE": "examples.django_orders.settings",
        "PYTHONPATH": str(ROOT),
    }
    django = [sys.executable, "-m", "django", "migrate", "--run-syncdb", "--verbosity", "0"]
    subprocess.run(django, cwd=ROOT, env=variables, check=True, timeout=60)
    subprocess.run([sys.executable, "-c", textwrap.dedent(ORDERS)], cwd=ROOT, env=variables, check=True, timeout=60)
    command = [sys.executable, "-m", "holdfast", "worker", "examples.django_orders.handlers:registry", "--lease", "2"]
    worker = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        await drained(conn)
    finally:
        worker.terminate()
        assert worker.wait(30) == 0
    assert await conn.fetchval("SELECT count(*) FROM django_orders_sale") == 20
    assert await conn.fetchval("SELECT count(DISTINCT order_id) FROM django_orders_sale") == 20
    rows = await conn.fetch("SELECT orders, spent_cents FROM django_orders_customer ORDER BY name")
    assert [tuple(row) for row in rows] == [(7, 700), (7, 700), (6, 600)]
    assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE status <> 'delivered'") == 0
