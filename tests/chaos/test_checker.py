"""The check that judges a run: whatever goes wrong in a history is found, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos.checker import Row, Verdict, check
from chaos.events import CAUSE, DERIVED, OWED, TROUBLES, derived
from chaos.history import History, Outcome, Published, read
from chaos.observer import Sample, in_flight, recoveries
from chaos.workers import Death

OUTCOMES: tuple[Outcome, ...] = ("acknowledged", "aborted", "recovered", "vanished")
COMMITTED = ("acknowledged", "recovered")
PUBLISHED = sorted(set(OWED) - set(DERIVED))


@dataclass
class Story:
    """A run in which everything went well, to be spoiled."""

    history: list[Published]
    effects: list[tuple[str, str]]
    deliveries: list[tuple[str, str, str]]
    rows: list[Row]

    def check(self) -> Verdict:
        return check(self.history, self.effects, self.deliveries, self.rows)


def told(history: list[Published]) -> Story:
    """What comes out of a history when all goes well."""
    story = Story(history, [], [], [])
    due = {each.key: each.event_type for each in history if each.outcome in COMMITTED}
    due |= {derived(key): next(iter(DERIVED)) for key, kind in due.items() if CAUSE in OWED[kind]}
    for key, event_type in due.items():
        for handler, fate in OWED[event_type].items():
            if fate == "effect":
                story.effects.append((handler, key))
            if fate in ("effect", "delivery"):
                story.deliveries.append((handler, key, f"row of {handler} {key}"))
                story.rows.append(Row(key, handler, "delivered"))
            elif fate == "failed":
                story.rows.append(Row(key, handler, "failed", 3, "max_deliveries"))
            elif fate == "either":
                story.rows.append(Row(key, handler, "failed", 1, "expired"))
            else:
                story.rows.append(Row(key, None, "pending", 0))
    return story


published = st.builds(
    Published, st.integers(1, 40).map(str), st.sampled_from(PUBLISHED), st.sampled_from(OUTCOMES), st.just(0.0)
)


@st.composite
def stories(draw: st.DrawFn) -> Story:
    found = draw(st.lists(published, max_size=40))
    types: dict[str, str] = {}  # a key always names the same event, however often it is published
    return told([replace(each, event_type=types.setdefault(each.key, each.event_type)) for each in found])


@given(stories())
def test_a_story_without_faults(story: Story) -> None:
    """Nothing is found where nothing is wrong, and every event is accounted for (P1, P2)."""
    verdict = story.check()
    assert (verdict.lost, verdict.unexpected) == ([], [])
    assert (verdict.effect_duplicates, verdict.delivery_duplicates) == (0, 0)
    assert verdict.delivered + verdict.put_aside == verdict.acknowledged + verdict.recovered
    outcomes = [each.outcome for each in story.history]
    assert verdict.recovered == outcomes.count("recovered")
    assert verdict.unknown == outcomes.count("recovered") + outcomes.count("vanished")
    further = sum(handler == CAUSE for handler, _ in story.effects)
    assert verdict.attempted == len(story.history) + further
    assert verdict.acknowledged == outcomes.count("acknowledged") + further


@given(stories(), st.data())
def test_a_lost_effect_is_found(story: Story, data: st.DataObject) -> None:
    """Whichever effect is taken away, and however its delivery went (P1)."""
    if not story.effects:
        return
    gone = data.draw(st.sampled_from(story.effects))
    story.effects.remove(gone)
    lost = story.check().lost
    assert len(lost) == 1
    assert f" {gone[1]}: {gone[0]} " in lost[0]


@given(stories(), st.data())
def test_a_lost_delivery_is_found(story: Story, data: st.DataObject) -> None:
    """A row that is marked as delivered counts for nothing; the handler has to have seen it (P1)."""
    plain = [each for each in story.deliveries if each[:2] not in story.effects]
    if not plain:
        return
    gone = data.draw(st.sampled_from(plain))
    story.deliveries.remove(gone)
    assert [each.split(": ")[1].split()[0] for each in story.check().lost] == [gone[0]]


@given(stories(), st.data())
def test_a_lost_poison_is_found(story: Story, data: st.DataObject) -> None:
    """What has to fail must be among the failed ones: not pending, not delivered, not gone (P1, A3)."""
    failed = [each for each in story.rows if each.status == "failed" and each.reason != "expired"]
    if not failed:
        return
    spoiled = data.draw(st.sampled_from(failed))
    story.rows.remove(spoiled)
    instead = data.draw(st.sampled_from(["gone", "pending", "delivered", "in_flight"]))
    if instead != "gone":
        story.rows.append(replace(spoiled, status=instead, reason=None))
    assert len(story.check().lost) == 1


@given(stories(), st.data())
def test_an_unexpected_delivery_is_found(story: Story, data: st.DataObject) -> None:
    """What was rolled back, or never attempted, must not come out (P1)."""
    committed = {each.key for each in story.history if each.outcome in COMMITTED}
    never = [each for each in story.history if each.key not in committed]
    never.append(Published("999", data.draw(st.sampled_from(PUBLISHED)), "aborted", 0.0))
    ghost = data.draw(st.sampled_from(never))
    handler = data.draw(st.sampled_from(sorted(OWED[ghost.event_type])))
    if data.draw(st.booleans()):
        story.effects.append((handler, ghost.key))
    else:
        story.deliveries.append((handler, ghost.key, "a row"))
    assert len(story.check().unexpected) == 1


@given(stories(), st.data())
def test_what_another_handler_got_is_unexpected(story: Story, data: st.DataObject) -> None:
    """An event that came to a handler it is not owed to (P1)."""
    if not story.deliveries:
        return
    handler, key, row = data.draw(st.sampled_from(story.deliveries))
    story.deliveries.append((f"{handler}_too", key, row))
    assert story.check().unexpected == [f"delivery of {key} by {handler}_too"]


@given(stories(), st.data())
def test_duplicates_are_counted(story: Story, data: st.DataObject) -> None:
    """Effects by handler and key, deliveries by row: a key that was published twice has two rows (P2)."""
    effects = data.draw(st.lists(st.sampled_from(story.effects), max_size=5)) if story.effects else []
    deliveries = data.draw(st.lists(st.sampled_from(story.deliveries), max_size=5)) if story.deliveries else []
    story.effects += effects
    story.deliveries += deliveries
    twins = [(handler, key, f"other {row}") for handler, key, row in set(story.deliveries)]
    story.deliveries += twins
    verdict = story.check()
    assert verdict.effect_duplicates == len(effects)
    assert verdict.delivery_duplicates == len(deliveries)
    assert (verdict.lost, verdict.unexpected) == ([], [])


def test_every_kind_of_trouble_has_a_fate() -> None:
    """No event is published of which nobody knows what must become of it (A3)."""
    assert all(OWED[event_type] for event_type in TROUBLES)


# --- histories --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "committed", "outcome"),
    [
        ("acknowledged", True, "acknowledged"),
        ("acknowledged", False, "acknowledged"),  # and lost, if it did not come out
        ("aborted", False, "aborted"),
        ("unknown", True, "recovered"),
        ("unknown", False, "vanished"),
        (None, False, "vanished"),  # nobody wrote down how it ended
        (None, True, "recovered"),
    ],
)
def test_what_was_seen_and_what_happened(tmp_path: Path, seen: str | None, committed: bool, outcome: str) -> None:
    """The business row decides about what no producer knows, and about nothing else (P1)."""
    history = History(tmp_path / "history.jsonl")
    keys = history.keys(2)
    number = history.attempt([(key, "parcel.sent") for key in keys])
    if seen is not None:
        history.saw(number, seen, 2)  # type: ignore[arg-type]
    history.close()
    found = list(read(history.path, {number} if committed else set()))
    assert [(each.key, each.event_type, each.outcome) for each in found] == [
        (key, "parcel.sent", outcome) for key in keys
    ]


# --- what the observer's samples say ----------------------------------------------------------------------------


def test_recovery_is_timed_from_the_death() -> None:
    """Each row until it is somebody else's, or settled; what was not held at the death does not count (P3)."""
    samples = [
        Sample(0.9, {"a": {"1", "2"}, "b": {"3"}}),
        Sample(1.1, {"a": {"1", "2"}, "b": {"3"}}),
        Sample(1.5, {"a": {"1"}, "b": {"2", "3"}}),
        Sample(2.0, {"b": {"1"}}),
    ]
    assert recoveries(samples, [Death(1.0, 0, "a", -9, True)]) == pytest.approx([0.5, 1.0])
    assert recoveries(samples, [Death(1.0, 0, "c", -9, True)]) == []
    assert recoveries(samples, [Death(3.0, 0, "b", -9, True)]) == []


def test_recovery_does_not_count_time_without_a_database() -> None:
    """Nobody can claim from a server that is down (P3, P7)."""
    samples = [Sample(1.0, {"a": {"1"}}), Sample(9.0, {"a": {"1"}}), Sample(9.5, {})]
    assert recoveries(samples, [Death(0.9, 0, "a", -9, True)]) == pytest.approx([0.5])


def test_in_flight_is_what_was_held_around_the_fault() -> None:
    """The most that the worker, or all of them, held in the second before and right after (P2)."""
    samples = [Sample(0.0, {"a": set("12345")}), Sample(1.5, {"a": {"1", "2"}, "b": {"3"}}), Sample(2.1, {"a": {"1"}})]
    assert in_flight(samples, 2.0) == 3
    assert in_flight(samples, 2.0, "a") == 2
    assert in_flight(samples, 2.0, "c") == 0
    assert in_flight(samples, 9.0) == 1, "no sample is near: the last one before counts"
    assert in_flight(samples[1:], 0.4) == 0, "nor any before"
