"""What handlers leave behind: lines in files of their process, written at once, so that a SIGKILL leaves them there."""

import os
import time
from pathlib import Path

from holdfast import EventEnvelope, HandlerContext

DIRECTORY = Path(os.environ.get("CHAOS_DELIVERIES", "."))


class Journal:
    """Lines of one process; `kind` is the suffix of its file."""

    def __init__(self, kind: str) -> None:
        self._path = DIRECTORY / f"{os.getpid()}.{kind}"
        self._file: int | None = None

    def write(self, line: str) -> None:
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.write(self._file, line.encode())


class Deliveries(Journal):
    """`handler key event attempt start end`, one line per delivery; times are the machine's monotonic clock.

    The event says which delivery of the handler it was, whether a row or a broker's message brought it.
    """

    def __init__(self) -> None:
        super().__init__("log")

    def note(self, event: EventEnvelope, context: HandlerContext, started: float) -> None:
        which = f"{context.handler_name} {event.idempotency_key} {context.event_id} {context.attempt}"
        self.write(f"{which} {started:.4f} {time.monotonic():.4f}\n")
