"""The search itself: it sees every state, finds the shortest way to a bad one, and what is stuck or goes round."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest

from tests.model.protocols.search import Model, Searched, Step, Violation, search

pytestmark = pytest.mark.trust


class Walk(Model[int]):
    """From number to number, along the given ways."""

    stands_for: ClassVar[dict[str, str]] = {"goes": "a walk"}

    def __init__(self, ways: dict[int, tuple[int, ...]], *, bad: int = -1, home: int = 3, ends: bool = False) -> None:
        self._ways, self._bad, self._home = ways, bad, home
        self.ends = ends

    def initial(self) -> int:
        return 0

    def steps(self, state: int) -> Iterator[tuple[Step, int]]:
        for target in self._ways.get(state, ()):
            yield Step("it", "goes", f"to {target}"), target

    def broken(self, state: int) -> str | None:
        return "it is where it must not be" if state == self._bad else None

    def good(self, state: int) -> bool:
        return state == self._home


def test_every_state_and_every_step_is_counted() -> None:
    assert search(Walk({0: (1, 2), 1: (3,), 2: (3,)}, ends=True)) == Searched(states=4, steps=4)


def test_the_shortest_way_to_a_bad_state_is_printed() -> None:
    with pytest.raises(Violation) as caught:
        search(Walk({0: (1, 2), 1: (2,), 2: (4,), 4: (5,), 1_000: ()}, bad=4))
    assert [state for _, state in caught.value.trace] == [0, 2, 4]
    assert str(caught.value).splitlines() == [
        "it is where it must not be",
        "  0. at first: 0",
        "  1. it goes (to 2)   [a walk]",
        "       : 0 -> 2",
        "  2. it goes (to 4)   [a walk]",
        "       : 2 -> 4",
    ]


def test_a_state_without_a_way_to_a_good_one_is_found() -> None:
    with pytest.raises(Violation, match="nothing good") as caught:
        search(Walk({0: (1, 2), 1: (3,), 2: (2,)}))
    assert caught.value.trace[-1][1] == 2


def test_a_circle_is_found_where_there_must_be_an_end() -> None:
    ways = {0: (1,), 1: (2, 3), 2: (1,)}
    assert search(Walk(ways)).states == 4
    with pytest.raises(Violation, match="for ever") as caught:
        search(Walk(ways, ends=True))
    assert caught.value.trace[-1][1] == 1


def test_a_model_that_is_not_small_is_refused() -> None:
    with pytest.raises(ValueError, match="make it smaller"):
        search(Walk({n: (n + 1,) for n in range(100)}), most=50)
