"""Traces of the demo, if OTEL_EXPORTER_OTLP_ENDPOINT says where they go. The API and the worker are one service each.

A service of your own can leave this to `opentelemetry-instrument`, and only says `tracing=OpenTelemetry()`.
"""

import os

from holdfast.tracing import Tracing


def configured() -> Tracing | None:
    if not os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        return None
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from holdfast.observability.otel import OpenTelemetry

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return OpenTelemetry()


tracing = configured()
