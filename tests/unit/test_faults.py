"""Database errors by what they mean (RTY-2): one table of SQLSTATEs, and the driver's classes agree with it."""

from __future__ import annotations

import asyncpg
import pytest

from holdfast.postgres.faults import (
    CONNECTION_FAULTS,
    DATABASE_ERRORS,
    PASSING_FAULTS,
    is_conflict,
    is_lock_timeout,
    is_unavailable,
    passes_in_new_transaction,
)
from holdfast.retry import CONFLICT_SQLSTATES, LOCK_NOT_AVAILABLE, QUERY_CANCELED


def error(state: str) -> asyncpg.PostgresError:
    found = asyncpg.PostgresError.new({"C": state, "M": "x"})
    assert isinstance(found, asyncpg.PostgresError)
    return found


def test_the_classes_that_pass_are_those_of_the_table() -> None:
    assert {kind.sqlstate for kind in PASSING_FAULTS} == {*CONFLICT_SQLSTATES, LOCK_NOT_AVAILABLE, QUERY_CANCELED}


@pytest.mark.parametrize("state", ["08006", "53300", "57P01", "57P03", "25006"])
def test_what_is_unavailable_ends_the_connection(state: str) -> None:
    assert is_unavailable(error(state))
    assert isinstance(error(state), CONNECTION_FAULTS)
    assert not isinstance(error(state), PASSING_FAULTS)


def test_a_command_reports_every_fault_of_a_connection_in_one_line() -> None:
    """What a driver makes of a server that is killed while it prepares a statement, too."""
    assert all(issubclass(kind, DATABASE_ERRORS) for kind in CONNECTION_FAULTS)


@pytest.mark.parametrize("state", ["25P03", "25P04"])
def test_a_session_that_was_ended_for_being_idle_is_unavailable(state: str) -> None:
    assert is_unavailable(error(state))


@pytest.mark.parametrize("state", ["40001", "40P01", "55P03", "57014", "23505", "23503", "42P01", "25P02"])
def test_what_a_code_means(state: str) -> None:
    found = error(state)
    assert is_conflict(found) is (state in ("40001", "40P01"))
    assert is_lock_timeout(found) is (state in ("55P03", "57014"))
    assert passes_in_new_transaction(found) is (state in ("40001", "40P01", "55P03", "23505"))
    assert not is_unavailable(found)
