"""Logs of a process that the command line started: key=value for people, JSON lines for machines.

An application that has set up structlog or logging itself keeps what it set up.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog
from structlog.typing import EventDict, Processor

from holdfast.cli.output import CONTROL


def configure(stream: TextIO | None = None) -> None:
    """Send structlog's entries, and those of the standard library, to `stream` (stderr)."""
    stream = stream or sys.stderr
    terminal = stream.isatty()
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if terminal else "iso", utc=not terminal),
        structlog.processors.format_exc_info,
    ]
    last: list[Processor]
    if terminal:
        last = [_one_line, structlog.dev.ConsoleRenderer(pad_event_to=24)]
    else:
        last = [structlog.processors.JSONRenderer()]
    if not structlog.is_configured():
        structlog.configure(
            processors=[*shared, *last],
            logger_factory=structlog.PrintLoggerFactory(stream),
            cache_logger_on_first_use=True,
        )
    root = logging.getLogger()
    if not root.handlers:
        handler = logging.StreamHandler(stream)
        handler.setFormatter(
            structlog.stdlib.ProcessorFormatter(
                foreign_pre_chain=[*shared[:2], structlog.stdlib.add_logger_name, shared[2]],
                processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
            )
        )
        root.addHandler(handler)
        root.setLevel(logging.INFO)


def _one_line(_logger: object, _method: str, entry: EventDict) -> EventDict:
    """What a producer or an error text says must not move the cursor or start a line of its own."""
    return {
        name: _escaped(value) if isinstance(value, str) and name != "exception" else value
        for name, value in entry.items()
    }


def _escaped(text: str) -> str:
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)
