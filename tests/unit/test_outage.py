"""Outages: told once, whoever meets them and whenever."""

from __future__ import annotations

import asyncpg

from holdfast.observing import DirectObservers
from holdfast.postgres.faults import LoginRefused, TransactionsAway
from holdfast.telemetry import Fact, Notice
from holdfast.worker.outage import START, Outages


def told(facts: list[Fact]) -> list[str]:
    return [fact.name for fact in facts if isinstance(fact, Notice)]


def test_an_outage_is_told_once_by_all_who_meet_it() -> None:
    """The first loop tells that it begins, the last one that it is over (LSN-2)."""
    facts: list[Fact] = []
    outages = Outages(DirectObservers((facts.append,)))
    claim, settle = outages.of("claim"), outages.of("settle")
    for _ in range(3):
        claim.begin(OSError("gone"))
        settle.begin(OSError("gone"))
    assert told(facts) == ["database_unavailable"]
    claim.over()
    assert told(facts) == ["database_unavailable"]
    settle.over()
    settle.over()
    assert told(facts) == ["database_unavailable", "database_back"]


def test_what_the_driver_says_of_itself_is_not_the_reason() -> None:
    """People are told what has happened (LSN-2, OBS-3)."""
    outages = Outages(DirectObservers(()))
    outages.of("claim").begin(
        asyncpg.InternalClientError("cannot switch to state 12; another operation (2) is in progress")
    )
    assert outages.met["claim"].error == "the connection was lost"


def test_a_time_limit_that_has_passed_is_put_in_words() -> None:
    """The error itself has none (LSN-2, OBS-3)."""
    outages = Outages(DirectObservers(()))
    outages.of("listen").begin(TimeoutError())
    assert outages.met["listen"].error == "TimeoutError: the server did not answer in time"


def test_transactions_that_lead_nowhere_are_not_blamed_on_the_address_of_the_worker() -> None:
    """The engine of the application has an address of its own (LSN-2, OBS-3)."""
    facts: list[Fact] = []
    Outages(DirectObservers((facts.append,))).of(START).begin(TransactionsAway("the connections do not come"))
    (notice,) = (fact for fact in facts if isinstance(fact, Notice))
    assert "address" not in notice.details and "passed as transactions" in str(notice.details["remedy"])


def test_who_finds_a_dead_connection_afterwards_meets_no_new_outage() -> None:
    """Unless it does not get through either (LSN-2)."""
    facts: list[Fact] = []
    outages = Outages(DirectObservers((facts.append,)))
    claim, leases = outages.of("claim"), outages.of("leases")
    claim.begin(OSError("gone"))
    claim.over()
    leases.begin(OSError("gone"))
    leases.over()
    assert told(facts) == ["database_unavailable", "database_back"]
    leases.begin(OSError("gone"))
    leases.begin(OSError("gone again"))
    assert told(facts)[2:] == ["database_unavailable"]
    leases.over()
    assert told(facts)[2:] == ["database_unavailable", "database_back"]


def test_a_refused_login_is_told_although_the_outage_was() -> None:
    """What cut the connection before it says nothing about the login; each reason is told once (LSN-2, OPS-5)."""
    facts: list[Fact] = []
    outages = Outages(DirectObservers((facts.append,)))
    claim, settle = outages.of("claim"), outages.of("settle")

    def refused(error: asyncpg.PostgresError) -> LoginRefused:
        refusal = LoginRefused(str(error))
        refusal.__cause__ = error
        return refusal

    claim.begin(OSError("gone"))
    for _ in range(3):
        claim.begin(refused(asyncpg.InvalidPasswordError("password authentication failed for user w")))
        settle.begin(refused(asyncpg.InvalidPasswordError("password authentication failed for user w")))
    claim.begin(refused(asyncpg.InvalidCatalogNameError("database shop does not exist")))
    claim.begin(OSError("gone"))
    notices = [fact for fact in facts if isinstance(fact, Notice)]
    assert [(each.name, each.details.get("sqlstate")) for each in notices] == [
        ("database_unavailable", None), ("database_unavailable", "28P01"), ("database_unavailable", "3D000"),
    ]  # fmt: skip
    assert "password authentication failed" in str(notices[1].details["error"])
    assert "password" in str(notices[1].details["remedy"])
    claim.over()
    settle.over()
    claim.begin(refused(asyncpg.InvalidPasswordError("password authentication failed for user w")))
    assert told(facts)[3:] == ["database_back", "database_unavailable"], "also when it is the first thing of an outage"


def test_waits_grow_to_a_limit_with_jitter() -> None:
    """From one second on, never longer than the limit and a quarter of it (LSN-2, P7)."""
    outage = Outages(DirectObservers(())).of("claim", longest_wait=4)
    waits = [outage.begin(OSError("gone")) for _ in range(200)]
    assert all(1 <= wait <= 1.25 for wait in waits[:1]) and all(2 <= wait <= 2.5 for wait in waits[1:2])
    assert all(4 <= wait <= 5 for wait in waits[2:])
    assert len(set(waits)) > 190
