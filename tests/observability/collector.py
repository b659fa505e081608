"""A collector: an OTLP/HTTP endpoint that decodes what is exported to it with opentelemetry-proto."""

from __future__ import annotations

import gzip
import threading
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue


@dataclass(frozen=True, slots=True)
class ExportedSpan:
    """A span as it arrived."""

    service: str
    scope: str
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    start: int  # nanoseconds
    end: int
    failed: bool
    attributes: dict[str, Any] = field(default_factory=dict)


class Collector:
    """Listens on a port of its own inside its block."""

    def __init__(self) -> None:
        self.spans: list[ExportedSpan] = []
        self.metrics: list[Any] = []
        self.bodies: list[bytes] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                match self.headers.get("Content-Encoding"):
                    case "gzip":
                        body = gzip.decompress(body)
                    case "deflate":
                        body = zlib.decompress(body)
                answer = collector.take(self.path, body).SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def take(self, path: str, body: bytes) -> Any:
        self.bodies.append(body)
        if path == "/v1/metrics":
            metrics = ExportMetricsServiceRequest.FromString(body)
            self.metrics += [
                metric for each in metrics.resource_metrics for scope in each.scope_metrics for metric in scope.metrics
            ]
            return ExportMetricsServiceResponse()
        assert path == "/v1/traces", path
        for each in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _values(each.resource.attributes).get("service.name", "")
            self.spans += [
                ExportedSpan(
                    service,
                    scope.scope.name,
                    span.name,
                    span.kind,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    span.status.code == span.status.STATUS_CODE_ERROR,
                    _values(span.attributes),
                )
                for scope in each.scope_spans
                for span in scope.spans
            ]
        return ExportTraceServiceResponse()


def _values(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value") or "string_value") for each in attributes}


def depths(
    spans: Iterable[ExportedSpan], key: Callable[[ExportedSpan], Any] = lambda span: span.start
) -> list[tuple[int, ExportedSpan]]:
    """The spans as a tree: each with its depth, children after their parent, as the key sorts them."""
    known = sorted(spans, key=key)
    ids = {span.span_id for span in known}
    found: list[tuple[int, ExportedSpan]] = []

    def add(parent: str, depth: int) -> None:
        for span in known:
            if (span.parent_id if span.parent_id in ids else "") == parent:
                found.append((depth, span))
                add(span.span_id, depth + 1)

    add("", 0)
    return found
