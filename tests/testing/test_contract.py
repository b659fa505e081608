"""The outbox in memory and the one in Postgres keep one contract, and the contract finds what breaks it (TST-1)."""

from __future__ import annotations

import pytest

from holdfast.testing import MemoryOutbox, Outbox, OutboxContract


class TestPostgres(OutboxContract):
    @pytest.fixture
    def substrate(self, outbox: Outbox) -> Outbox:
        return outbox


class TestMemory(OutboxContract):
    @pytest.fixture
    def substrate(self) -> MemoryOutbox:
        return MemoryOutbox()
