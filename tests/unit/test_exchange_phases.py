"""The state machine of the idempotent exchange (IDM-1): every pair of phase and event, and what must always hold."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import get_args

import pytest

from holdfast.idempotency.answers import Answer, Settlement
from holdfast.idempotency.phases import (
    Answered,
    BeginCalled,
    Closed,
    Decided,
    EndpointRaised,
    ErrorHeld,
    Escaped,
    Event,
    Failed,
    GivenUp,
    Interrupted,
    KeyTaken,
    MessageSent,
    Opened,
    Outside,
    Phase,
    Refused,
    Repeating,
    RepeatNeeded,
    ReplyBegins,
    ResponseComplete,
    Restarted,
    Returned,
    Settled,
    Settling,
    SettlingDone,
    SettlingFailed,
    TransactionOpened,
    Undecided,
    Unsettled,
    Working,
)
from holdfast.idempotency.transitions import Action, ImpossibleTransition, transition

CREATED, REFUSED, BROKEN = (Answer(status, [], b"the application's") for status in (201, 409, 500))
OURS = Answer(503, [], b"Holdfast's")
ERROR = RuntimeError("passing")

UNDECIDED: list[Undecided] = [Opened(), Working(), Failed(), Unsettled()]
DECIDED: list[Phase] = [Settled(CREATED), Decided(OURS), Repeating(ERROR)]
PHASES: list[Phase] = [
    Outside(),
    *UNDECIDED,
    *(ErrorHeld(BROKEN, Settlement.ROLL_BACK, before) for before in UNDECIDED),
    *(Settling(CREATED, Settlement.STORE, before) for before in UNDECIDED),
    *DECIDED,
    Answered(),
    Answered(CREATED),
    Closed(),
]
RESPONSES = [
    ResponseComplete(CREATED, Settlement.STORE),
    ResponseComplete(CREATED, Settlement.COMMIT),
    ResponseComplete(REFUSED, Settlement.STORE_REFUSAL),
    ResponseComplete(REFUSED, Settlement.ROLL_BACK),
    ResponseComplete(BROKEN, Settlement.ROLL_BACK),
    ResponseComplete(BROKEN, Settlement.STORE_REFUSAL),
]
EVENTS: list[Event] = [
    BeginCalled(),
    TransactionOpened(),
    KeyTaken(),
    MessageSent(),
    *RESPONSES,
    Refused(OURS),
    RepeatNeeded(ERROR),
    EndpointRaised(),
    SettlingDone(),
    SettlingFailed(transaction_ended=False),
    SettlingFailed(transaction_ended=True),
    ReplyBegins(),
    Returned(),
    Escaped(),
    Interrupted(),
    Restarted(),
    GivenUp(OURS),
]

# The phases in which an event may occur, where these are not all of them. Every other pair is impossible.
POSSIBLE: dict[type, tuple[type, ...]] = {
    TransactionOpened: (Outside,),
    KeyTaken: (Opened,),
    ResponseComplete: (Opened, Working, Failed, Unsettled, ErrorHeld),  # in the others its messages are not held
    RepeatNeeded: tuple({*get_args(Phase)} - {Outside}),
    SettlingDone: (Settling, Closed),
    SettlingFailed: (Settling, Closed),
    ReplyBegins: (Settled, Answered, Closed),
    Restarted: (Repeating,),
    GivenUp: (Repeating,),
}


def possible() -> Iterator[tuple[Phase, Event]]:
    for phase, event in product(PHASES, EVENTS):
        if type(phase) in POSSIBLE.get(type(event), (type(phase),)):
            yield phase, event


def test_every_phase_and_every_event_is_tried() -> None:
    """None can be added without a decision about each of its pairs."""
    assert {type(phase) for phase in PHASES} == {*get_args(Phase)}
    assert {type(event) for event in EVENTS} == {*get_args(Event)}


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_each_pair_is_a_transition_or_declared_impossible(event: Event) -> None:
    for phase in PHASES:
        if type(phase) in POSSIBLE.get(type(event), (type(phase),)):
            assert type(transition(phase, event)[0]) in get_args(Phase)
        else:
            with pytest.raises(ImpossibleTransition, match=type(phase).__name__):
                transition(phase, event)


def walk(*events: Event) -> list[Action]:
    """What is done from the beginning on."""
    phase: Phase = Outside()
    actions = []
    for event in events:
        phase, action = transition(phase, event)
        actions.append(action)
    return actions


BEGUN = (BeginCalled(), TransactionOpened(), BeginCalled(), KeyTaken())
SUCCESS = ResponseComplete(CREATED, Settlement.STORE)
FAILURE = ResponseComplete(BROKEN, Settlement.ROLL_BACK)


def test_a_request_that_succeeds() -> None:
    """Row 7."""
    assert walk(*BEGUN, MessageSent(), SUCCESS, SettlingDone(), ReplyBegins(), Returned()) == [
        Action.OPEN, Action.TAKE_KEY, Action.TAKE_KEY, Action.CONTINUE,
        Action.HOLD, Action.SETTLE, Action.CONTINUE, Action.REPLY, Action.FINISH,
    ]  # fmt: skip


def test_a_request_without_holdfast() -> None:
    """Row 1: its response passes, and then it is too late to begin."""
    assert walk(MessageSent(), MessageSent(), BeginCalled(), Returned()) == [
        Action.FORWARD, Action.FORWARD, Action.REJECT_BEGIN, Action.FINISH,
    ]  # fmt: skip


def test_a_duplicate() -> None:
    """Rows 11 to 13: the endpoint is ended, what it sends all the same is dropped, and it cannot begin again."""
    assert walk(*BEGUN[:3], Refused(OURS), MessageSent(), BeginCalled(), Returned())[3:] == [
        Action.STOP_ENDPOINT, Action.DROP, Action.STOP_ENDPOINT, Action.REPLY,
    ]  # fmt: skip


def test_an_error_that_passes() -> None:
    """Row 16: run again, or given up with an answer of Holdfast's."""
    assert walk(*BEGUN, RepeatNeeded(ERROR), Escaped(), Restarted(), BeginCalled())[4:] == [
        Action.STOP_ENDPOINT, Action.RUN_AGAIN, Action.CONTINUE, Action.OPEN,
    ]  # fmt: skip
    assert walk(*BEGUN, RepeatNeeded(ERROR), Returned(), GivenUp(OURS))[-2:] == [Action.RUN_AGAIN, Action.REPLY]


def test_a_5xx_waits_until_the_application_returns() -> None:
    """Row 10: it may yet raise what was wrong, and a later response takes the place of the first."""
    assert walk(*BEGUN, FAILURE, Returned())[4:] == [Action.HOLD, Action.SETTLE]
    assert walk(*BEGUN, FAILURE, Escaped())[4:] == [Action.HOLD, Action.REPLY_AND_FAIL]
    assert walk(*BEGUN, FAILURE, RepeatNeeded(ERROR), Escaped())[5:] == [Action.STOP_ENDPOINT, Action.RUN_AGAIN]
    assert walk(*BEGUN, FAILURE, SUCCESS)[4:] == [Action.HOLD, Action.SETTLE]


def test_an_error_page_is_never_stored() -> None:
    """Row 10: not even with `store_5xx`, because the endpoint gave no answer."""
    stored = ResponseComplete(BROKEN, Settlement.STORE_REFUSAL)
    held = transition(Failed(), stored)[0]
    assert held == ErrorHeld(BROKEN, Settlement.ROLL_BACK, Failed())
    assert transition(held, Returned()) == (Settling(BROKEN, Settlement.ROLL_BACK, Failed()), Action.SETTLE)
    assert transition(Working(), stored)[0] == ErrorHeld(BROKEN, Settlement.STORE_REFUSAL, Working())


def test_success_is_refused_where_nothing_can_be_committed() -> None:
    """Row 7: before the key is taken, and after a commit that failed."""
    for phase in (Opened(), Unsettled()):
        for success in RESPONSES[:2]:
            assert transition(phase, success) == (phase, Action.REJECT_ANSWER)
    for refusal in RESPONSES[2:4]:
        assert transition(Opened(), refusal)[0] == Settling(REFUSED, Settlement.ROLL_BACK, Opened())
        assert transition(Unsettled(), refusal)[0] == Settling(REFUSED, Settlement.NOTHING, Unsettled())


def test_a_settlement_that_fails() -> None:
    """Row 17: the application may answer for its error; whether anything is left to undo is remembered."""
    settling = transition(Working(), SUCCESS)[0]
    assert transition(settling, SettlingFailed(transaction_ended=False))[0] == Working()
    assert transition(settling, SettlingFailed(transaction_ended=True))[0] == Unsettled()
    assert transition(settling, RepeatNeeded(ERROR))[0] == Repeating(ERROR)
    assert transition(settling, Refused(OURS))[0] == Decided(OURS)


# --- what holds for every pair ---


def test_no_answer_without_its_commit() -> None:
    """Row 7: a response of the application's goes out settled, or is a 5xx that was rolled back, or had no key."""
    for phase, event in possible():
        after, action = transition(phase, event)
        if isinstance(after, Answered) and after.answer not in (None, OURS) and after != phase:
            rolled_back = isinstance(phase, ErrorHeld) and action is Action.REPLY_AND_FAIL
            assert isinstance(phase, Settled) or rolled_back, (phase, event)
        if isinstance(after, Settled) and after != phase:
            assert isinstance(phase, Settling) and event == SettlingDone(), (phase, event)


def test_only_a_response_is_settled() -> None:
    """Rows 7 to 10: by what its status requires, or by less."""
    for phase, event in possible():
        after, action = transition(phase, event)
        assert (action is Action.SETTLE) <= isinstance(after, Settling)
        if isinstance(after, Settling) and after != phase:
            assert isinstance(event, ResponseComplete) or (isinstance(phase, ErrorHeld) and event == Returned())
            if isinstance(event, ResponseComplete):
                assert after.settlement in (event.settlement, Settlement.ROLL_BACK, Settlement.NOTHING)


def test_nothing_is_settled_after_the_outcome_is_decided() -> None:
    """Row 20: from a decision the exchange goes on only to its answer, its repetition, or its end."""
    for phase, event in possible():
        if phase in DECIDED:
            after, action = transition(phase, event)
            assert after == phase or isinstance(after, Answered | Closed) or isinstance(event, Restarted), (
                phase,
                event,
            )
            assert action not in (Action.SETTLE, Action.HOLD, Action.FORWARD, Action.OPEN, Action.TAKE_KEY)


def test_what_has_ended_stays_ended() -> None:
    for phase, event in possible():
        if isinstance(phase, Answered | Closed):
            after, action = transition(phase, event)
            assert after == phase
            assert action in (Action.FORWARD, Action.DROP, Action.REJECT_BEGIN, *NOTHING_LEFT), (phase, event)


NOTHING_LEFT = (Action.CONTINUE, Action.FINISH, Action.STOP_ENDPOINT)


def test_an_open_transaction_is_never_forgotten() -> None:
    """Row 20: whatever ends the application, what is open is settled or rolled back."""
    for phase in PHASES:
        if not isinstance(phase, Outside | Answered | Closed):
            for event in (Returned(), Escaped(), Interrupted()):
                assert transition(phase, event)[1] is not Action.FINISH
            assert transition(phase, Interrupted()) == (Closed(), Action.FAIL)
