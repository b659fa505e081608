"""Spans of a test: collected in memory, and read as a tree."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Sampler

from holdfast.observability.otel import OpenTelemetry


class Spans:
    """What is exported through a provider of the test's own; the global one stays as it is."""

    def __init__(self, sampler: Sampler | None = None, **options: Any) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=sampler)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("test")
        self.tracing = OpenTelemetry(tracer_provider=self.provider, **options)

    def __len__(self) -> int:
        return len(self._exporter.get_finished_spans())

    @property
    def all(self) -> list[ReadableSpan]:
        """In the order in which they began."""
        return sorted(self._exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        [span] = self.named(name)
        return span

    def tree(self) -> list[str]:
        return tree(self.all)


def tree(spans: Iterable[ReadableSpan]) -> list[str]:
    """The names, each with an indentation of its depth; a star stands for an error."""
    known = list(spans)
    ids = {span.context.span_id for span in known}
    lines: list[str] = []

    def add(parent: int | None, depth: int) -> None:
        for span in known:
            of = span.parent.span_id if span.parent is not None and span.parent.span_id in ids else None
            if of == parent:
                lines.append("  " * depth + span.name + (" *" if not span.status.is_ok else ""))
                add(span.context.span_id, depth + 1)

    add(None, 0)
    return lines


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})
