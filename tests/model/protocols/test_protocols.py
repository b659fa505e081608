"""The protocols between workers, producers, operators and clients, each searched completely for small numbers.

Each test of a protocol has its mutations beside it: the same protocol with one of its precautions left out, for which
the search has to find the harm that the precaution prevents. docs/architecture/protocols.md says how to read a trace.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.model.protocols.exchange import Exchange
from tests.model.protocols.firing import Firing
from tests.model.protocols.lease import Lease
from tests.model.protocols.order import Order
from tests.model.protocols.search import Model, Violation, search
from tests.model.protocols.slots import Slots
from tests.model.protocols.split import Split
from tests.model.protocols.wakeup import TOLD, UNTOLD, Wakeup

pytestmark = pytest.mark.trust

SOURCE = Path(holdfast.__file__).parent
REFERENCE = re.compile(r"(?P<file>[\w/]+\.(?:py|sql)) (?P<name>[\w.]+)")

A, B, AB = frozenset((0,)), frozenset((1,)), frozenset((0, 1))
DIES = frozenset(("dies",))


def handlers(*names: str) -> frozenset[str]:
    return frozenset(names)


def harm(model: Model[Any]) -> str:
    """What the search finds in a protocol that is broken on purpose."""
    with pytest.raises(Violation) as caught:
        search(model)
    assert "  0. at first: " in str(caught.value) and caught.value.steps, "a trace belongs to it"
    return caught.value.problem


@pytest.mark.parametrize("model", [Wakeup, Lease, Split, Firing, Exchange, Slots, Order])
def test_every_step_names_code_that_is_there(model: type[Model[Any]]) -> None:
    """A function that is renamed or gone is a protocol that has changed: its model has to follow."""
    missing = []
    for verb, reference in model.stands_for.items():
        found = REFERENCE.fullmatch(reference)
        if found is None:
            assert ".py" not in reference and ".sql" not in reference, reference
            continue
        file = SOURCE / found["file"]
        words = set(re.findall(r"\w+", file.read_text())) if file.exists() else set()
        if not words.issuperset(found["name"].removeprefix("core.").split(".")):
            missing.append(f"{verb}: {reference}")
    assert not missing, missing


# --- order within a key: LSN-9 --------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [True, False])
def test_the_rows_of_a_key_come_one_after_the_other(blocks: bool) -> None:
    """Over late commits, two claims at once, retries, lost leases, dead letters, replays and sweeps (LSN-9)."""
    assert search(Order(blocks=blocks)).states > 1000


def test_without_comparing_the_line_two_rows_of_a_key_are_in_flight() -> None:
    """A claim that looked before another one took a row (LSN-9)."""
    assert harm(Order(compares=False)) == "two rows of a key are in flight"


def test_a_line_that_names_a_replayed_row_again_is_another_line() -> None:
    """By its id alone a claim would take it for the one that it has seen to be over (LSN-9)."""
    assert harm(Order(blocks=False, knows_times=False)) == "two rows of a key are in flight"


def test_without_going_on_with_what_was_begun_a_late_number_overtakes_it() -> None:
    """A smaller number that is committed while the head waits for its retry (LSN-9)."""
    found = harm(Order(goes_on=False))
    assert found in ("a row is begun before another one is over", "two rows of a key are in flight")


# --- wake-up: LSN-1, LSN-2 ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(Wakeup((A, A), (0, 0), delays=True), id="two workers"),
        pytest.param(Wakeup((A, B), (0, 1), delays=True), id="two lanes"),
        pytest.param(Wakeup((A, A, A), (0, 0)), id="three workers"),
        pytest.param(Wakeup((A, B, AB), (0, 1)), id="three workers, two lanes"),
        pytest.param(Wakeup((A, A), (0, 0), delays=True, names=("guard", "sleeper")), id="two deployments"),
        pytest.param(Wakeup((A, B, B), (0, 1), names=("guard", "sleeper", "sleeper")), id="two deployments, two lanes"),
    ],
)
def test_no_wake_up_is_lost(model: Wakeup) -> None:
    """Whenever everybody sleeps, everything that is committed has been claimed, without any poll (LSN-1)."""
    search(model)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(Wakeup((A, A), (0, 0), faults=TOLD), id="two workers"),
        pytest.param(
            Wakeup((A, A), (0,), faults=frozenset(("loses power", "is frozen")), most_faults=2), id="two faults"
        ),
        pytest.param(Wakeup((A, B), (0, 1), faults=DIES), id="two lanes"),
        pytest.param(Wakeup((A, A, A), (0,), faults=TOLD | UNTOLD), id="three workers"),
    ],
)
def test_a_fault_delays_a_wake_up_by_a_second_or_until_the_ping(model: Wakeup) -> None:
    """A worker that dies or is frozen, or a lost connection, costs a second; an unnoticed loss a ping (LSN-1,
    LSN-2).
    """
    search(model)


@pytest.mark.parametrize(
    "model",
    [
        Wakeup((A, A), (0, 0), broken_by="the bell rings before the row is visible"),
        Wakeup((A, A), (0, 0), broken_by="the shared lock ends with the trigger"),
        Wakeup((A, A), (0, 0), broken_by="the flag is cleared after the look"),
        Wakeup((A, B), (0, 1), broken_by="the sleeper does not look once more"),
        Wakeup((A, B), (0, 1), broken_by="the sleeper does not announce"),
        Wakeup((A, B), (0, 1), broken_by="one that gets up does not say so"),
        Wakeup((A, A), (0,), faults=DIES, broken_by="others do not ask again"),
    ],
    ids=lambda model: model._broken_by,
)
def test_without_each_precaution_a_wake_up_is_lost(model: Wakeup) -> None:
    """LSN-1."""
    assert "nobody will look before the next poll" in harm(model)


# --- lease and settle: LSN-3, LSN-5, LSN-6 --------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(Lease(1, 3, transactional=False, most=3), id="three attempts"),
        pytest.param(Lease(2, 2, transactional=False, most=1), id="two copies"),
    ],
)
def test_no_two_attempts_settle_one_delivery(model: Lease) -> None:
    """Only the last claim's token settles; every row is delivered or failed in the end, whatever dies (LSN-3)."""
    search(model)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(Lease(1, 3, transactional=True, most=3), id="three attempts"),
        pytest.param(Lease(2, 2, transactional=True, most=1), id="two copies"),
    ],
)
def test_an_effect_in_the_transaction_happens_once(model: Lease) -> None:
    """At most once, and not less once it is delivered, also when the commit is not answered (LSN-5, LSN-6)."""
    search(model)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (Lease(1, 2, transactional=False, broken_by="settles are fenced by the status alone"), "both can settle it"),
        (Lease(1, 2, transactional=False, broken_by="an ended lease is not due"), "nothing good can be reached"),
        (Lease(1, 2, transactional=True, broken_by="reopening leaves the inbox row"), "its effect is lost"),
        (Lease(2, 1, transactional=True, broken_by="nobody asks the inbox"), "committed twice"),
        (Lease(1, 2, transactional=True, broken_by="who enters too late goes on"), "another one holds"),
    ],
    ids=lambda value: getattr(value, "_broken_by", None),
)
def test_without_each_precaution_a_delivery_is_lost_or_doubled(model: Lease, problem: str) -> None:
    """LSN-3, LSN-5."""
    assert problem in harm(model)


# --- routing and the split: LSN-7 -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(Split((handlers("a"), handlers("a", "b")), 2, visitors=handlers("b")), id="two events"),
        pytest.param(Split((handlers("a", "b"),) * 2, 1, visitors=handlers("a", "b")), id="all come and go"),
        pytest.param(
            Split((handlers("a"), handlers("b"), handlers("c")), 1, visitors=handlers("c")), id="three workers"
        ),
    ],
)
def test_every_subscriber_gets_each_event_once(model: Split) -> None:
    """Whoever is subscribed when an event is first taken up has it exactly once, and none is left over (LSN-7)."""
    search(model)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (
            Split((handlers("a"),), 1, visitors=handlers("b"), broken_by="a claim does not check the number"),
            "was owed to b",
        ),
        (
            Split(
                (handlers("a"),), 1, visitors=handlers("b"), broken_by="a claim checks the number in a statement before"
            ),
            "was owed to b",
        ),
        (
            Split(
                (handlers("a", "b", "c"),),
                1,
                visitors=handlers("c"),
                broken_by="the splitter says who the subscribers are",
            ),
            "was owed to c",
        ),
        (
            Split(
                (handlers("a", "b"),) * 2, 1, visitors=handlers(), broken_by="the origin is settled later, random ids"
            ),
            "twice",
        ),
        (
            Split((handlers("a", "b"),), 1, visitors=handlers("a", "b"), broken_by="an event is split among nobody"),
            "nobody has it",
        ),
    ],
    ids=lambda value: getattr(value, "_broken_by", None),
)
def test_without_each_precaution_a_subscriber_is_skipped_or_served_twice(model: Split, problem: str) -> None:
    """LSN-7."""
    assert problem in harm(model)


def test_the_ids_of_siblings_alone_keep_a_second_split_from_doubling() -> None:
    """While the subscribers stay the same, splitting twice is splitting once, even in two transactions (LSN-7)."""
    search(Split((handlers("a", "b"),) * 2, 1, visitors=handlers(), broken_by="the origin is settled later"))


# --- schedules: IDM-4 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(Firing(3, 3, missed="all"), id="three workers"),
        pytest.param(Firing(3, 3, missed="latest"), id="three workers, latest"),
        pytest.param(Firing(2, 2, missed="skip", turns=True), id="skip"),
        pytest.param(Firing(2, 3, missed="all", turns=True), id="pause, resume, trigger"),
        pytest.param(Firing(2, 3, missed="all", turns=True, pooled=True), id="behind a pooler"),
        pytest.param(Firing(2, 3, missed="all", sets_back=True), id="the clock is set back"),
    ],
)
def test_each_slot_is_fired_once_and_none_is_lost(model: Firing) -> None:
    """At most once whoever dies when; with "all" every slot, but for those that a pause leaves out (IDM-4)."""
    search(model)


@pytest.mark.parametrize(
    ("broken_by", "problem"),
    [
        ("a fire does not check the version", "fired twice"),
        ("the slot is recorded after the event", "fired twice"),
        ("the slot is recorded before the event", "never fired"),
    ],
)
def test_without_each_precaution_a_slot_is_lost_or_doubled(broken_by: str, problem: str) -> None:
    """IDM-4."""
    assert problem in harm(Firing(2, 2, missed="all", broken_by=broken_by))


def test_only_a_resume_after_the_clock_was_set_back_fires_a_slot_again() -> None:
    """The limit that docs/schedules.md states. The event has the same key, and the inbox lets it run once (IDM-4)."""
    assert "fired twice" in harm(Firing(2, 2, missed="all", turns=True, sets_back=True))


# --- idempotent requests: IDM-1 -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(Exchange(("x", "x", "x")), id="three requests"),
        pytest.param(Exchange(("x", "x", "y")), id="another request with the key"),
        pytest.param(Exchange(("x", "x", "y"), snapshots=True), id="repeatable read"),
    ],
)
def test_a_key_is_carried_out_once_and_answered_alike(model: Exchange) -> None:
    """One execution's effects, no answer before its commit, every replay the same, no key stuck (IDM-1)."""
    search(model)


@pytest.mark.parametrize(
    ("broken_by", "problem"),
    [
        ("the answer goes before the commit", "not committed"),
        ("a commit that was not answered is taken for one", "not committed"),
        ("the key is looked for and not taken", "carried out twice"),
        ("the record is committed before the work", "nothing good can be reached"),
        ("a replay is made anew", "another answer"),
        ("the hash is not compared", "the answer to another one"),
    ],
)
def test_without_each_precaution_a_key_does_not_hold(broken_by: str, problem: str) -> None:
    """IDM-1."""
    bodies = ("x", "y") if "hash" in broken_by else ("x", "x")
    assert problem in harm(Exchange(bodies, broken_by=broken_by))


# --- places of a limited handler: LSN-10 ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(Slots(3, 3, 1), id="one place"),
        pytest.param(Slots(3, 3, 2), id="two places"),
        pytest.param(Slots(2, 4, 1), id="four claimers"),
    ],
)
def test_a_limit_is_kept_and_no_place_is_lost(model: Slots) -> None:
    """Whoever dies, never more under a lease than allowed, and everything can still be delivered (LSN-10)."""
    search(model)


@pytest.mark.parametrize("precaution", ["the count is made before the lock", "claims are not written down"])
def test_without_each_precaution_a_limit_is_exceeded(precaution: str) -> None:
    """LSN-10."""
    assert "more deliveries are in flight" in harm(Slots(3, 3, 1, broken_by=precaution))


def test_without_the_lease_places_are_lost() -> None:
    """Those of workers that died (LSN-10)."""
    harm(Slots(2, 2, 1, broken_by="an expired lease keeps its place"))
