"""What the scenarios of chaos/flow count: forbidden calls of a key, calls at once, slots used."""

import pytest

from chaos.flow.calls import Call, Mark, calls
from chaos.flow.limits import most_at_once, used
from chaos.flow.model import violations

KEYS = {"k": ["1", "2", "3"]}


def lines(*texts: str) -> list[Mark]:
    """Marks like "began 1 by 7", one second after the other."""
    split = [text.split() for text in texts]
    return [Mark(what, "h", key, float(at), int(by)) for at, (what, key, _, by) in enumerate(split)]


def test_calls_that_are_allowed() -> None:
    """Retries, a dead letter that is replayed, and what a killed process may have left unsettled (LSN-9)."""
    story = lines(
        *("began 1 by 7", "retried 1 by 7", "began 1 by 8", "rejected 1 by 8", "began 1 by 7", "done 1 by 7"),
        *("began 1 by 8", "done 1 by 8", "began 2 by 8", "began 2 by 9", "done 2 by 9", "began 3 by 9", "done 3 by 9"),
    )
    assert violations(story, KEYS, {7: 5.5, 8: 8.5}) == ([], 1)


@pytest.mark.parametrize(
    "story",
    [
        ("began 2 by 7",),
        ("began 1 by 7", "retried 1 by 7", "began 2 by 7"),
        ("began 1 by 7", "rejected 1 by 7", "began 2 by 7"),
        ("began 1 by 7", "began 1 by 8"),
        ("began 1 by 7", "done 1 by 7", "began 1 by 7"),
    ],
)
def test_calls_that_are_not_allowed(story: tuple[str, ...]) -> None:
    """One behind the head, two at once, and one again whose process lives (LSN-9)."""
    found, finished = violations(lines(*story), KEYS, {})
    assert (len(found), finished) == (1, 0)


def test_calls_end_with_their_process() -> None:
    """A call that was killed counts until then (LSN-10)."""
    found = calls(lines("began 1 by 7", "began 2 by 8", "done 1 by 7"), {8: 1.5})
    assert found == [Call("h", "1", 0.0, 2.0), Call("h", "2", 1.0, 1.5)]
    assert most_at_once(found, 0.0, 2.0) == 2
    assert used(found, 0.0, 2.0) == pytest.approx(1.25)
