"""Two nested `transaction.atomic` blocks of Django, entered and left step by step.

The outer block is the transaction, the inner one a savepoint in it. Django is imported when it is used.
"""

from __future__ import annotations

from typing import Any


class _RollBack(Exception):
    """Raised inside an atomic block to roll it back."""


class AtomicBlocks:
    """The blocks of one transaction, on this thread's connection of one alias."""

    def __init__(self, using: str) -> None:
        self._using = using
        self._outer: Any = None
        self._inner: Any = None
        self.committed = False

    @property
    def is_open(self) -> bool:
        """Whether the outer block was entered and not left."""
        return self._outer is not None

    @property
    def has_savepoint(self) -> bool:
        """Whether the inner block was entered and not left."""
        return self._inner is not None

    def begin(self) -> None:
        """Enter the outer block."""
        from django.db import transaction

        outer = transaction.atomic(using=self._using)
        outer.__enter__()
        self._outer = outer
        # The first function to run after the commit: others may fail, and the commit has happened all the same.
        transaction.on_commit(self._on_commit, using=self._using)

    def set_savepoint(self) -> None:
        """Enter the inner block."""
        from django.db import transaction

        inner = transaction.atomic(using=self._using)
        inner.__enter__()
        self._inner = inner

    def leave_inner(self, *, undo: bool = False) -> None:
        """Leave the inner block, if it was entered: release the savepoint, or roll back to it."""
        block, self._inner = self._inner, None
        _leave(block, undo=undo)

    def leave_outer(self, *, undo: bool = False) -> None:
        """Leave the outer block, if it was entered: commit, or roll back."""
        block, self._outer = self._outer, None
        _leave(block, undo=undo)

    def _on_commit(self) -> None:
        self.committed = True


def _leave(block: Any, *, undo: bool) -> None:
    if block is None:
        return
    if undo:
        block.__exit__(_RollBack, _RollBack(), None)
    else:
        block.__exit__(None, None, None)
