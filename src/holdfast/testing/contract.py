"""What an outbox promises, as tests that any implementation can be held to.

    class TestOurOutbox(OutboxContract):
        @pytest.fixture
        def substrate(self):
            return OurOutbox()

The tests use what `holdfast.testing.substrate.Substrate` lists. Holdfast runs them against Postgres and against
`MemoryOutbox`.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from holdfast.errors import TerminalHandlerError, TransientHandlerError
from holdfast.outcome import Reject, Retry, Snooze
from holdfast.retry import RetryPolicy
from holdfast.testing.calls import Calls, failing
from holdfast.testing.substrate import Substrate

# Retries without a delay, so that a test waits only as long as its own handler asks.
_AT_ONCE = RetryPolicy(max_attempts=3, base_delay=0.001, max_delay=0.001, strategy="constant")


class OutboxContract:
    """The promises. Inherit from it, name the class Test…, and give it a fixture `substrate`."""

    @pytest.fixture
    def substrate(self) -> Substrate:
        """The outbox that is tested, empty."""
        raise NotImplementedError("give the class a fixture `substrate` that returns your outbox, empty")

    @pytest.fixture
    def calls(self) -> Calls:
        """Handlers that note their calls."""
        return Calls()

    # --- publishing -----------------------------------------------------------------------------------

    def test_an_event_arrives_as_it_was_published(self, substrate: Substrate, calls: Calls) -> None:
        calls.handler("a.one", "thing.happened")
        payload = {"n": 1, "text": "ä", "list": [1, 2.5, None], "nested": {"deep": True}}
        sent = substrate.publish("thing.happened", payload, source="shop", headers={"tenant": "t-1"}, event_version=2)
        substrate.drain(calls.registry)
        (event,) = calls.of("a.one")
        assert event == sent and event.payload == payload and (event.source, event.event_version) == ("shop", 2)
        assert calls.contexts[0].headers["tenant"] == "t-1"
        assert calls.contexts[0].correlation_id == str(sent.event_id)

    def test_an_event_that_is_rolled_back_does_not_exist(self, substrate: Substrate, calls: Calls) -> None:
        calls.handler("a.one", "thing.happened")
        substrate.publish("thing.happened", {"n": 1}, committed=False)
        substrate.drain(calls.registry)
        assert calls.seen == [] and substrate.published() == []

    def test_a_delivered_event_is_not_delivered_again(self, substrate: Substrate, calls: Calls) -> None:
        calls.handler("a.one", "thing.happened")
        substrate.publish("thing.happened", {"n": 1})
        assert substrate.drain(calls.registry).delivered == 1
        assert substrate.drain(calls.registry).delivered == 0
        assert calls.values("a.one") == [1]
        (delivery,) = substrate.deliveries()
        assert (delivery.handler_name, delivery.status, delivery.attempts) == ("a.one", "delivered", 1)
        assert [(name, event.payload["n"]) for name, event in substrate.handled()] == [("a.one", 1)]

    # --- who gets it ----------------------------------------------------------------------------------

    def test_every_handler_that_wants_an_event_gets_it_once(self, substrate: Substrate, calls: Calls) -> None:
        calls.handler("a.one", "thing.happened")
        calls.handler("a.two", "thing.*")
        calls.handler("b.three", "thing.happened", "other.happened")
        calls.handler("b.four", "other.happened")
        sent = substrate.publish("thing.happened", {"n": 1})
        substrate.drain(calls.registry)
        assert sorted(name for name, _ in calls.seen) == ["a.one", "a.two", "b.three"]
        assert {event.event_id for _, event in calls.seen} == {sent.event_id}
        assert len(substrate.published()) == 1

    def test_a_target_is_one_context(self, substrate: Substrate, calls: Calls) -> None:
        calls.handler("a.one", "thing.happened")
        calls.handler("b.two", "thing.happened")
        substrate.publish("thing.happened", {"n": 1}, target="b")
        substrate.drain(calls.registry)
        assert [name for name, _ in calls.seen] == ["b.two"]

    def test_an_event_that_no_handler_wants_waits(self, substrate: Substrate, calls: Calls) -> None:
        calls.handler("a.one", "other.happened")
        substrate.publish("thing.happened", {"n": 1})
        substrate.drain(calls.registry)
        assert [(each.handler_name, each.status, each.attempts) for each in substrate.deliveries()] == [
            (None, "pending", 0)
        ]
        calls.handler("a.two", "thing.happened")
        substrate.drain(calls.registry)
        assert calls.values("a.two") == [1]

    def test_handlers_that_do_not_run_now_are_owed_their_events(self, substrate: Substrate, calls: Calls) -> None:
        later = Calls()
        calls.handler("a.one", "thing.happened")
        later.handler("b.two", "thing.happened")
        substrate.drain(later.registry)
        substrate.publish("thing.happened", {"n": 1})
        substrate.drain(calls.registry)
        assert calls.values("a.one") == [1] and later.seen == []
        substrate.drain(later.registry)
        assert later.values("b.two") == [1] and calls.values("a.one") == [1]

    def test_one_handlers_failure_is_no_other_ones(self, substrate: Substrate, calls: Calls) -> None:
        calls.handler("a.one", "thing.happened", does=failing(TerminalHandlerError("no")))
        calls.handler("a.two", "thing.happened")
        substrate.publish("thing.happened", {"n": 1})
        substrate.drain(calls.registry)
        assert {each.handler_name: each.status for each in substrate.deliveries()} == {
            "a.one": "failed",
            "a.two": "delivered",
        }

    # --- duplicates -----------------------------------------------------------------------------------

    def test_one_key_has_one_effect_for_each_handler(self, substrate: Substrate, calls: Calls) -> None:
        calls.handler("a.one", "thing.happened")
        calls.handler("a.two", "thing.happened")
        for n in (1, 2):
            substrate.publish("thing.happened", {"n": n}, idempotency_key="k-1")
        substrate.drain(calls.registry)
        substrate.publish("thing.happened", {"n": 3}, idempotency_key="k-1")
        substrate.drain(calls.registry)
        assert len(calls.of("a.one")) == 1 and len(calls.of("a.two")) == 1
        assert all(each.status == "delivered" for each in substrate.deliveries())

    def test_a_key_that_has_failed_is_not_handled(self, substrate: Substrate, calls: Calls) -> None:
        calls.handler("a.one", "thing.happened", does=failing(TerminalHandlerError("no"), times=1))
        substrate.publish("thing.happened", {"n": 1}, idempotency_key="k-1")
        substrate.drain(calls.registry)
        substrate.publish("thing.happened", {"n": 2}, idempotency_key="k-1")
        substrate.drain(calls.registry)
        assert calls.values("a.one") == [1, 2]
        assert [event.payload["n"] for _, event in substrate.handled()] in ([1], [2])  # the key is one

    # --- failing --------------------------------------------------------------------------------------

    def test_a_passing_error_is_retried_until_it_has_passed(self, substrate: Substrate, calls: Calls) -> None:
        calls.handler("a.one", "thing.happened", does=failing(ConnectionError("down"), times=2))
        substrate.publish("thing.happened", {"n": 1})
        done = substrate.drain(calls.registry)
        assert (done.delivered, done.retried, done.failed) == (1, 2, 0)
        assert [context.attempt for context in calls.contexts] == [1, 2, 3]
        assert substrate.deliveries()[0].attempts == 3

    def test_a_retry_waits_for_its_time(self, substrate: Substrate, calls: Calls) -> None:
        calls.handler("a.one", "thing.happened", does=lambda event, call: Retry(60) if call == 1 else None)
        substrate.publish("thing.happened", {"n": 1})
        substrate.drain(calls.registry, due_only=True)
        substrate.advance(registry=calls.registry, seconds=59)
        assert len(calls.seen) == 1
        substrate.advance(registry=calls.registry, seconds=10)
        assert len(calls.seen) == 2

    def test_the_budget_of_a_policy_ends(self, substrate: Substrate, calls: Calls) -> None:
        calls.handler("a.one", "thing.happened", does=failing(TransientHandlerError("down")), retry=_AT_ONCE)
        substrate.publish("thing.happened", {"n": 1})
        substrate.drain(calls.registry)
        (delivery,) = substrate.deliveries()
        assert (delivery.status, delivery.failure_reason, delivery.attempts) == ("failed", "retry_terminal", 3)
        assert len(calls.seen) == 3 and "down" in (delivery.last_error or "")
        assert substrate.handled() == []

    @pytest.mark.parametrize("error", [TerminalHandlerError("never"), ValueError("never")])
    def test_a_lasting_error_is_not_retried(self, substrate: Substrate, calls: Calls, error: Exception) -> None:
        policy = RetryPolicy(terminal_errors=(ValueError,))
        calls.handler("a.one", "thing.happened", does=failing(error), retry=policy)
        substrate.publish("thing.happened", {"n": 1})
        substrate.drain(calls.registry)
        (delivery,) = substrate.deliveries()
        assert (delivery.status, delivery.failure_reason, delivery.attempts) == ("failed", "retry_terminal", 1)

    def test_a_rejected_event_fails_at_once(self, substrate: Substrate, calls: Calls) -> None:
        calls.handler("a.one", "thing.happened", does=lambda event, call: Reject("unknown customer"))
        substrate.publish("thing.happened", {"n": 1})
        substrate.drain(calls.registry)
        (delivery,) = substrate.deliveries()
        assert (delivery.failure_reason, len(calls.seen)) == ("rejected", 1)
        assert "unknown customer" in (delivery.last_error or "")

    def test_errors_can_be_rejections(self, substrate: Substrate, calls: Calls) -> None:
        calls.handler("a.one", "thing.happened", does=failing(ConnectionError("down")), on_error="reject")
        substrate.publish("thing.happened", {"n": 1})
        substrate.drain(calls.registry)
        assert [(each.failure_reason, each.attempts) for each in substrate.deliveries()] == [("rejected", 1)]

    def test_a_snooze_counts_no_attempt(self, substrate: Substrate, calls: Calls) -> None:
        calls.handler(
            "a.one", "thing.happened", does=lambda event, call: Snooze(3600) if call <= 10 else None, retry=_AT_ONCE
        )
        substrate.publish("thing.happened", {"n": 1})
        done = substrate.drain(calls.registry)
        assert (done.snoozed, done.delivered) == (10, 1) and done.moved > timedelta(hours=9.9)
        assert substrate.deliveries()[0].attempts == 1

    def test_a_batch_has_several_events_and_an_outcome_for_each(self, substrate: Substrate, calls: Calls) -> None:
        batches = calls.batch_handler(
            "ledger.book_many", "order.placed", does=lambda n: Reject("no") if n == 2 else None
        )
        for number in range(5):
            substrate.publish("order.placed", {"n": number})
        done = substrate.drain(calls.registry)
        assert sorted(number for batch in batches for number in batch) == list(range(5))
        assert max(map(len, batches)) > 1
        assert (done.delivered, done.failed) == (4, 1)

    def test_an_event_that_makes_a_batch_fail_fails_alone(self, substrate: Substrate, calls: Calls) -> None:
        def does(number: int) -> None:
            if number == 3:
                raise TerminalHandlerError("never")

        calls.batch_handler("ledger.book_many", "order.placed", does=does)
        for number in range(6):
            substrate.publish("order.placed", {"n": number})
        done = substrate.drain(calls.registry)
        assert (done.delivered, done.failed) == (5, 1)
        failed = [each for each in substrate.deliveries() if each.status == "failed"]
        assert [(each.event.payload["n"], each.attempts) for each in failed] == [(3, 1)]
        assert {each.attempts for each in substrate.deliveries()} == {1}

    def test_a_dead_letter_stays_one(self, substrate: Substrate, calls: Calls) -> None:
        calls.handler("a.one", "thing.happened", does=failing(TerminalHandlerError("no")))
        substrate.publish("thing.happened", {"n": 1})
        substrate.drain(calls.registry)
        substrate.advance(registry=calls.registry, days=30)
        assert len(calls.seen) == 1 and substrate.deliveries()[0].status == "failed"

    # --- time -----------------------------------------------------------------------------------------

    def test_a_delayed_event_is_not_early(self, substrate: Substrate, calls: Calls) -> None:
        calls.handler("a.one", "thing.happened")
        substrate.publish("thing.happened", {"n": 1}, delay=3600)
        substrate.drain(calls.registry, due_only=True)
        assert calls.seen == []
        substrate.advance(registry=calls.registry, minutes=59)
        assert calls.seen == []
        substrate.advance(registry=calls.registry, minutes=1, seconds=5)
        assert calls.values("a.one") == [1]

    def test_what_is_due_earlier_is_delivered_earlier(self, substrate: Substrate, calls: Calls) -> None:
        calls.handler("a.one", "thing.happened")
        for n, delay in enumerate((300, 100, 200), 1):
            substrate.publish("thing.happened", {"n": n}, delay=delay)
        substrate.drain(calls.registry)
        assert calls.values("a.one") == [2, 3, 1]

    def test_what_becomes_due_meanwhile_is_delivered_too(self, substrate: Substrate, calls: Calls) -> None:
        calls.handler("a.one", "thing.happened", does=lambda event, call: Snooze(0.001 * call) if call <= 60 else None)
        for n in range(20):
            substrate.publish("thing.happened", {"n": n}, delay=0.002 * n)
        substrate.drain(calls.registry)
        assert sorted(set(calls.values("a.one"))) == list(range(20))
        assert all(each.status == "delivered" for each in substrate.deliveries())

    def test_an_expired_event_is_not_delivered(self, substrate: Substrate, calls: Calls) -> None:
        calls.handler("a.one", "thing.happened")
        substrate.publish("thing.happened", {"n": 1}, expires_in=60)
        substrate.publish("thing.happened", {"n": 2}, delay=30, expires_in=60)
        substrate.publish("thing.happened", {"n": 3}, available_at=substrate.now + timedelta(minutes=5))
        substrate.drain(calls.registry)
        assert calls.values("a.one") == [1, 2, 3]  # each in its time
        late = Calls()
        late.handler("b.two", "other.happened")
        substrate.publish("other.happened", {"n": 4}, expires_in=60)
        substrate.advance(registry=calls.registry, minutes=2)
        substrate.drain(late.registry)
        assert late.seen == []
        assert [each.failure_reason for each in substrate.deliveries() if each.failed] == ["expired"]

    def test_urgent_events_go_first(self, substrate: Substrate, calls: Calls) -> None:
        calls.handler("a.one", "thing.happened")
        for n, priority in enumerate((2, 1, 0), 1):
            substrate.publish("thing.happened", {"n": n}, priority=priority)
        substrate.drain(calls.registry)
        assert calls.values("a.one") == [3, 2, 1]

    def test_a_schedule_fires_each_slot_once(self, substrate: Substrate, calls: Calls) -> None:
        calls.handler("a.one", "hour.ended")
        calls.registry.schedule("hour.ended", name="a.hourly", every=timedelta(hours=1), payload={"n": 1})
        substrate.freeze(datetime(2026, 3, 1, 9, 30, tzinfo=UTC))
        substrate.drain(calls.registry)
        assert calls.seen == []
        substrate.advance(registry=calls.registry, hours=3)
        assert [event.occurred_at.hour for event in calls.of("a.one")] == [10, 11, 12]
        substrate.drain(calls.registry)
        assert len(calls.seen) == len(substrate.published()) == 3

    # --- keys of producers ----------------------------------------------------------------------------

    def test_a_producers_key_has_one_pending_event(self, substrate: Substrate, calls: Calls) -> None:
        calls.handler("a.one", "thing.happened")
        first = substrate.publish("thing.happened", {"n": 1}, key="k", delay=60)
        second = substrate.publish("thing.happened", {"n": 2}, key="k", delay=60)
        assert second.event_id == first.event_id
        substrate.publish("thing.happened", {"n": 3}, key="k", delay=60, source="another")
        substrate.drain(calls.registry)
        assert sorted(calls.values("a.one")) == [1, 3]
        substrate.publish("thing.happened", {"n": 4}, key="k")
        substrate.drain(calls.registry)
        assert calls.values("a.one")[-1] == 4

    def test_a_cancelled_event_is_not_delivered(self, substrate: Substrate, calls: Calls) -> None:
        calls.handler("a.one", "thing.happened")
        substrate.publish("thing.happened", {"n": 1}, key="k", delay=60)
        assert not substrate.cancel("k", source="another")
        assert substrate.cancel("k") and not substrate.cancel("k")
        substrate.drain(calls.registry)
        assert calls.seen == []

    def test_a_rescheduled_event_comes_at_its_new_time(self, substrate: Substrate, calls: Calls) -> None:
        calls.handler("a.one", "thing.happened")
        substrate.publish("thing.happened", {"n": 1}, key="k", delay=60)
        assert substrate.reschedule("k", delay=3600) and not substrate.reschedule("other", delay=1)
        substrate.advance(registry=calls.registry, minutes=30)
        assert calls.seen == []
        substrate.publish("thing.happened", {"n": 2}, key="k", delay=0, on_duplicate="reschedule")
        substrate.drain(calls.registry, due_only=True)
        assert calls.values("a.one") == [1]
