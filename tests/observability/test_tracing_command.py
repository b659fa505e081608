"""`holdfast worker` traces where its process has an OpenTelemetry SDK, in every one of its processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import asyncpg
import pytest
from opentelemetry import trace

from holdfast import Publisher
from holdfast.cli import tracing
from tests.observability.collector import Collector
from tests.observability.spans import Spans
from tests.worker.support import drained, until

APP = """
import asyncio
from holdfast import EventEnvelope, HandlerRegistry

registry = HandlerRegistry()

@registry.handler("order.placed", name="billing.charge")
async def charge(event: EventEnvelope) -> None:
    await asyncio.sleep(0.02)
"""
SDK = """
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
import os

provider = TracerProvider(resource=Resource.create({"service.name": f"worker-{os.getpid()}"}))
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)
"""


def start(directory: Path, dsn: str, *options: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from holdfast.cli import main; main()", "worker", "app:registry", *options]
    return subprocess.Popen(
        command,
        cwd=directory,
        env={**os.environ, "HOLDFAST_DSN": dsn, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


async def stopped(worker: subprocess.Popen[str]) -> tuple[str, str]:
    worker.send_signal(signal.SIGTERM)
    return await asyncio.to_thread(worker.communicate, timeout=30)


@pytest.mark.slow
async def test_each_process_of_a_worker_exports_its_own_spans(
    dsn: str, conn: asyncpg.Connection, tmp_path: Path
) -> None:
    """The provider that the module of the handlers sets is found; all is exported before the end (OBS-2)."""
    (tmp_path / "app.py").write_text(SDK + APP)
    producer = Spans()
    publisher = Publisher("shop", tracing=producer.tracing)
    with Collector() as collector:
        few = ("--processes", "2", "--batch", "1", "--concurrency", "1")
        worker = start(tmp_path, dsn, *few, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url)
        try:
            both = "SELECT count(*) = 2 FROM core.workers WHERE stopped_at IS NULL"
            await until(lambda: conn.fetchval(both), what="both processes work")
            async with conn.transaction():
                for _ in range(40):
                    await publisher.publish(conn, "order.placed", {})
            await drained(conn)
        finally:
            output, errors = await stopped(worker)
        assert "note:" not in errors and "tracing_inactive" not in output + errors
        handled = [span for span in collector.spans if span.name == "process billing.charge"]
    assert len(handled) == 40
    assert {span.trace_id for span in handled} == {f"{span.context.trace_id:032x}" for span in producer.all}
    assert len({span.service for span in handled}) == 2


async def test_an_export_that_is_asked_for_in_vain_is_noted(dsn: str, conn: asyncpg.Connection, tmp_path: Path) -> None:
    """With the remedy, and once (OBS-2)."""
    (tmp_path / "app.py").write_text(APP)
    worker = start(tmp_path, dsn, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1")
    await until(lambda: conn.fetchval("SELECT count(*) FROM core.workers"), what="the worker has started")
    _, errors = await stopped(worker)
    notes = [line for line in errors.splitlines() if line.startswith("note:")]
    assert notes == [
        "note: OTEL_EXPORTER_OTLP_ENDPOINT is set and not used; start holdfast with opentelemetry-instrument, or set a "
        "tracer provider where the handlers are"
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [("OTEL_SDK_DISABLED", "TRUE"), ("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "redis, holdfast")],
)
def test_the_environment_can_turn_it_off(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """As for any instrumentation (OBS-2)."""
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: Spans().provider)
    assert tracing.configured() is not None
    monkeypatch.setenv(name, value)
    assert tracing.configured() is None


def test_children_are_instrumented_like_their_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """`opentelemetry-instrument` would leave them out (OBS-2)."""
    assert tracing.child_environment() == {}
    auto = ModuleType("auto")
    auto.__file__ = "/venv/opentelemetry/instrumentation/auto_instrumentation/__init__.py"
    monkeypatch.setitem(sys.modules, "opentelemetry.instrumentation.auto_instrumentation", auto)
    monkeypatch.setenv("PYTHONPATH", "/app")
    assert tracing.child_environment() == {
        "PYTHONPATH": "/venv/opentelemetry/instrumentation/auto_instrumentation:/app"
    }


WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "opentelemetry":
            raise ModuleNotFoundError(name)
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.startswith("opentelemetry") else find(name, *rest)
sys.meta_path.insert(0, Missing())
import holdfast.worker.worker, holdfast.cli.worker
try:
    import holdfast.observability.otel
except ModuleNotFoundError as error:
    print(error)
"""


def test_without_the_extra_only_its_own_module_is_missing() -> None:
    """With the command that installs it (OBS-2)."""
    ran = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=60)
    assert ran.stdout == (
        "opentelemetry is not installed; pip install '.[otel]' in a checkout of Holdfast, or "
        "'PATH/TO/HOLDFAST.whl[otel]'\n"
    ), ran.stderr
