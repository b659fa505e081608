"""The parameters of first handlers: what is refused when a handler is registered, and not when it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import asyncpg
import psycopg
import pytest
from asyncpg.pool import PoolConnectionProxy
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast import HandlerRegistry
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from asyncpg import Connection

pytestmark = pytest.mark.newcomer


class Executes(Protocol):
    """What a handler needs, for its own tests."""


class Mine(asyncpg.Connection):  # type: ignore[misc]
    """A connection class of the application's."""


def registered(function: Any) -> None:
    HandlerRegistry().add("shop.ship", ("order.placed",), function)


@pytest.mark.parametrize("wrong", [AsyncSession, psycopg.AsyncConnection, int, dict], ids=lambda kind: kind.__name__)
def test_a_transaction_of_another_library_is_refused(wrong: type) -> None:
    async def handler(event: Any, tx: Any) -> None: ...

    handler.__annotations__["tx"] = wrong
    with pytest.raises(ConfigurationError, match=r"asyncpg\.Connection") as refused:
        registered(handler)
    assert refused.value.field == "shop.ship.tx" and wrong.__name__ in refused.value.problem


@pytest.mark.parametrize("right", [asyncpg.Connection, PoolConnectionProxy, Mine, Executes, Any, object])
def test_every_right_annotation_is_taken(right: Any) -> None:
    async def handler(event: Any, tx: Any) -> None: ...

    handler.__annotations__["tx"] = right
    registered(handler)


def test_an_import_for_type_checkers_alone_is_taken() -> None:
    async def handler(event: Any, tx: Connection) -> None: ...

    async def bare(event: Any, tx) -> None: ...  # type: ignore[no-untyped-def]

    registered(handler)
    registered(bare)
