"""Logs of a process that the command line started: key=value for people, JSON lines for machines.

An application that has set up structlog or logging itself keeps what it set up.

Lines are written by a thread of their own: a pipe that no one reads, or a full disk, costs lines and stops nothing. How
many were dropped is the next line that can be written.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import threading
from collections.abc import Mapping
from typing import Any, Final, TextIO

import structlog
from structlog.typing import EventDict, Processor

from holdfast.characters import CONTROL
from holdfast.observability.background import Background
from holdfast.observability.logging import add_delivery

_FLUSH_PATIENCE = 1.0
_URGENT: Final = frozenset(("error", "exception", "critical", "fatal"))


class LineWriter:
    """Writes lines to a stream. One with a descriptor may block, and is written to in the background."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._may_block = _has_descriptor(stream)
        self._background = Background("holdfast-log", self._write, _tell_dropped)

    @property
    def dropped(self) -> int:
        """How many lines were dropped."""
        return self._background.dropped

    def put(self, line: str, *, urgent: bool) -> None:
        """Write a line some time soon; drop it when there is no room. Urgent ones are dropped last."""
        if self._may_block:
            self._background.put(f"{line}\n".encode(errors="backslashreplace"), urgent=urgent)
        else:
            self._stream.write(f"{line}\n")

    def flush(self) -> None:
        """Wait a short time until everything is written."""
        reached = threading.Event()
        self._background.flush(reached.set)
        reached.wait(_FLUSH_PATIENCE)

    def _write(self, line: bytes) -> None:
        # Not through the stream: at exit the interpreter waits for its lock, which a blocked thread would still hold.
        descriptor, rest = self._stream.fileno(), memoryview(line)
        while rest:
            try:
                rest = rest[os.write(descriptor, rest) :]
            except BlockingIOError:
                select.select((), (descriptor,), ())


class _Logger:
    """The end of structlog's chain."""

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer

    def __getattr__(self, method: str) -> Any:
        def write(line: str) -> None:
            self._writer.put(line, urgent=method in _URGENT)

        return write


class _Handler(logging.Handler):
    """The end of the standard library's chain."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._writer.put(self.format(record), urgent=record.levelno >= logging.ERROR)
        except Exception:
            self.handleError(record)


_writers: list[LineWriter] = []


def flush() -> None:
    """Write what is left of the log, for a short time at most."""
    for writer in _writers:
        writer.flush()


def dropped() -> int:
    """How many lines were dropped."""
    return sum(writer.dropped for writer in _writers)


def configure(stream: TextIO | None = None, level: str = "info", bound: Mapping[str, object] | None = None) -> None:
    """Send structlog's entries, and those of the standard library, from a level on to `stream` (stderr).

    What is `bound` is part of every entry, and the fields of its delivery are of what a handler writes.
    """
    least = logging.getLevelNamesMapping()[level.upper()]
    stream = stream or sys.stderr
    terminal = stream.isatty()
    writer = LineWriter(stream)
    _writers[:] = [writer]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        add_delivery,
        lambda _logger, _method, entry: {**(bound or {}), **entry},
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
            wrapper_class=structlog.make_filtering_bound_logger(least),
            logger_factory=lambda *_: _Logger(writer),
            cache_logger_on_first_use=True,
        )
    root = logging.getLogger()
    if not root.handlers:
        handler = _Handler(writer)
        handler.setFormatter(
            structlog.stdlib.ProcessorFormatter(
                foreign_pre_chain=[*shared[:4], structlog.stdlib.add_logger_name, shared[4]],
                processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
            )
        )
        root.addHandler(handler)
        root.setLevel(least)
        # A forgotten await is told by a warning alone, which would stand between the lines as text.
        logging.captureWarnings(True)


def _one_line(_logger: object, _method: str, entry: EventDict) -> EventDict:
    """What a producer or an error text says must not move the cursor or start a line of its own."""
    return {name: _escaped(value, name) if isinstance(value, str) else value for name, value in entry.items()}


def _escaped(text: str, name: str) -> str:
    # A traceback has lines, which are shown below the entry. What an error says is not part of ours.
    kept = "\n\t" if name == "exception" else ""
    return CONTROL.sub(lambda match: match[0] if match[0] in kept else ascii(match[0])[1:-1], text)


def _has_descriptor(stream: TextIO) -> bool:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return stream.fileno() >= 0
    return False


def _tell_dropped(count: int) -> None:
    structlog.get_logger("holdfast").warning("log_lines_dropped", count=count)
