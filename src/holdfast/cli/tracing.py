"""OpenTelemetry on the command line: on where the process has been given an SDK, as its users expect."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cli import environment
from holdfast.installing import extra_remedy

if TYPE_CHECKING:
    from holdfast.tracing import Tracing

_AUTO = "opentelemetry.instrumentation.auto_instrumentation"


def configured(*, note: bool = False) -> Tracing | None:
    """Return OpenTelemetry, if the application or opentelemetry-instrument has configured it in this process.

    Nothing of it is imported otherwise. With `note`, an export that the environment asks for in vain is noted.
    """
    if environment.otel_disabled():
        return None
    if "opentelemetry.trace" in sys.modules or environment.otel_provider():
        from holdfast.observability.otel import OpenTelemetry, is_configured

        if is_configured():
            return OpenTelemetry()
    if note and (variable := environment.otel_export()) is not None:
        remedy = "start holdfast with opentelemetry-instrument, or set a tracer provider where the handlers are"
        if importlib.util.find_spec("opentelemetry") is None:
            remedy = extra_remedy("otel")
        print(f"note: {variable} is set and not used; {remedy}", file=sys.stderr)
    return None


def child_environment() -> dict[str, str]:
    """Return the variables by which a child process is instrumented like this one.

    `opentelemetry-instrument` puts a directory on the path, and takes it from there for the children of its process.
    """
    auto = sys.modules.get(_AUTO)
    if auto is None or auto.__file__ is None:
        return {}
    path = [str(Path(auto.__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, path))}
