"""What all tests share. The database is the plugin's; the tables in it, and the handlers, are the service's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest

from examples.bookings import handlers
from examples.bookings.partners import Bank, Mail, Partners
from examples.bookings.service import Bookings
from holdfast import HandlerRegistry

Book = Callable[..., UUID]


@pytest.fixture(scope="session")
def holdfast_setup() -> list[Any]:
    return [Path(__file__).parents[1].joinpath("schema.sql").read_text()]


@pytest.fixture(scope="session")
def holdfast_registry() -> HandlerRegistry:
    return handlers.registry


@pytest.fixture(scope="session")
def connection(holdfast_dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """The application's connection: one for all tests, because the database has one address for the session."""
    with psycopg.connect(holdfast_dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def partners(monkeypatch: pytest.MonkeyPatch) -> Partners:
    """A bank and a mail server that nothing has happened to."""
    fresh = Partners(Bank(), Mail())
    monkeypatch.setattr(handlers, "partners", fresh)
    return fresh


@pytest.fixture
def book(connection: psycopg.Connection[Any]) -> Book:
    """Books as the web application does: in a transaction of its own."""

    def book(*seats: str, customer: str = "Ada") -> UUID:
        with connection.transaction():
            return Bookings().book(connection, customer, list(seats))

    return book


@pytest.fixture
def pay(connection: psycopg.Connection[Any]) -> Callable[..., None]:
    """Pays as the bank's message does."""

    def pay(booking: UUID, reference: str = "r-1") -> None:
        with connection.transaction():
            Bookings().pay(connection, booking, reference)

    return pay
