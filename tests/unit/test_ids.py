"""Ids of events: UUIDv7 that increase strictly in a process."""

import copy
import os
import threading
import time
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest

from holdfast import ids as module
from holdfast.errors import FieldError
from holdfast.ids import uuid7, uuid7_time, uuid7s


def test_uuid7_has_version_variant_and_time() -> None:
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    made = uuid7()
    assert (made.version, made.variant) == (7, "specified in RFC 4122")
    assert before <= uuid7_time(made) <= datetime.now(UTC) + timedelta(seconds=1)


def test_the_time_of_the_rfc_example() -> None:
    """RFC 9562, appendix A.6."""
    example = UUID("017F22E2-79B0-7CC3-98C4-DC0C0C07398F")
    assert uuid7_time(example) == datetime(2022, 2, 22, 19, 22, 22, tzinfo=UTC)


def test_only_version_7_carries_a_time() -> None:
    with pytest.raises(FieldError, match="UUIDv4"):
        uuid7_time(uuid4())
    with pytest.raises(FieldError, match="9999"):
        uuid7_time(UUID(int=(2**48 - 1) << 80 | 7 << 76 | 0b10 << 62))


def test_ids_increase_strictly() -> None:
    ids = [uuid7() for _ in range(20_000)]
    assert ids == sorted(set(ids))


def test_ids_made_together_are_like_those_made_one_by_one() -> None:
    """They continue those before them, and those after them continue; each can be told apart, hashed and copied."""
    ids = [uuid7(), *uuid7s(5_000), uuid7(), *uuid7s(1), *uuid7s(0), uuid7()]
    assert ids == sorted(set(ids))
    assert len(ids) == 5_004
    assert {(each.version, each.variant) for each in ids} == {(7, "specified in RFC 4122")}
    assert abs(uuid7_time(ids[2_500]) - datetime.now(UTC)) < timedelta(seconds=5)
    again = UUID(str(ids[7]))
    assert (again, hash(again), again.is_safe) == (ids[7], hash(ids[7]), ids[7].is_safe)
    assert copy.deepcopy(ids) == ids


def test_ids_made_together_differ_even_where_no_step_is_random(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_clockwork", module._Clockwork())
    monkeypatch.setattr(os, "urandom", bytes)
    ids = [*uuid7s(100), *uuid7s(100)]
    assert ids == sorted(set(ids))


def test_ids_increase_when_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    first = uuid7()
    earlier = time.time_ns() - 3_600 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: earlier)
    later = [uuid7() for _ in range(1_000)]
    assert [first, *later] == sorted({first, *later})
    assert uuid7_time(later[-1]) - uuid7_time(first) < timedelta(seconds=1)


def test_ids_carry_into_the_next_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    """The random part may be at its end already: the next id is still greater, and still well-formed."""
    clockwork = module._Clockwork()
    clockwork._last = (1_000 << 74) | (2**74 - 1)
    monkeypatch.setattr(module, "_clockwork", clockwork)
    monkeypatch.setattr(time, "time_ns", lambda: 1_000 * 10**6)
    made = uuid7()
    assert (made.version, made.variant, made.int >> 80) == (7, "specified in RFC 4122", 1_001)


def test_ids_of_many_threads_are_distinct_and_increase_in_each() -> None:
    made: list[list[UUID]] = []

    def make() -> None:
        mine = [uuid7() for _ in range(5_000)]
        made.append(mine)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(mine == sorted(mine) for mine in made)
    assert len({id_ for mine in made for id_ in mine}) == 8 * 5_000


def test_the_random_part_is_random() -> None:
    """Every one of the 62 low bits takes both values: none is stuck."""
    ids = [uuid7().int & (2**62 - 1) for _ in range(2_000)]
    ones = [sum(id_ >> bit & 1 for id_ in ids) for bit in range(32)]
    assert all(800 < count < 1_200 for count in ones)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_does_not_repeat_its_parents_ids() -> None:
    uuid7()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"".join(uuid7().bytes for _ in range(100)))
        os._exit(0)
    os.waitpid(child, 0)
    data = os.read(reader, 1_600)
    os.close(reader)
    os.close(writer)
    theirs = {data[at + 6 : at + 16] for at in range(0, 1_600, 16)}
    ours = {uuid7().bytes[6:] for _ in range(100)}
    assert len(theirs) == 100
    assert not theirs & ours
