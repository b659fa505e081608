"""A transaction of an outbox in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

from holdfast.errors import ConfigurationError


class MemoryTransaction:
    """Collects rows, and hands them over when it commits. In `async with`, publishers are awaited."""

    def __init__(self, commit: Callable[[Iterable[Any]], None]) -> None:
        self._commit = commit
        self._rows: list[Any] = []
        self._open = True
        self.asynchronous = False
        self.rollback_at_end = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"tx of a MemoryOutbox has no {name}: it takes events of its publishers and nothing else; give handlers "
            "another one with MemoryOutbox(registry, tx=...), or test them with the fixture outbox"
        )

    def write_row(self, row: Any) -> None:
        """Write a row of the outbox."""
        self._rows.append(row)

    def held(self, source: str, key: str) -> Any:
        """Return the row of this transaction that holds a producer's key."""
        return next((row for row in self._rows if (row.source, row.dedupe_key) == (source, key)), None)

    def require_open(self) -> None:
        """Refuse to write after the end."""
        if not self._open:
            raise ConfigurationError("tx", "has ended", "publish before the block of its transaction ends")

    def commit(self) -> None:
        """Hand over what was written, and end."""
        if self._open:
            self._open = False
            self._commit(self._rows)

    def rollback(self) -> None:
        """Forget what was written, and end."""
        self._open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and not self.rollback_at_end:
            self.commit()
        else:
            self.rollback()

    async def __aenter__(self) -> Self:
        self.asynchronous = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)
