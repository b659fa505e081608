"""What counts as out of order within a key."""

from chaos.order import Place, inversions

PLACES = {("h", "1"): Place("k", 10), ("h", "2"): Place("k", 11), ("h", "3"): Place("other", 12)}


def test_what_is_in_order() -> None:
    """The next begins when the first run of the one before has ended; a late second run says nothing (LSN-9)."""
    runs = [("h", "1", 1.0, 2.0), ("h", "2", 2.0, 3.0), ("h", "1", 1.5, 9.0), ("h", "3", 0.0, 9.0)]
    assert inversions(PLACES, [("h", "1"), ("h", "3"), ("h", "2")], runs) == []


def test_what_is_out_of_order() -> None:
    """An effect behind that of a later number, and a run that began before the one in front of it ended (LSN-9)."""
    assert len(inversions(PLACES, [("h", "2"), ("h", "1")], [])) == 1
    assert len(inversions(PLACES, [], [("h", "2", 1.0, 2.0), ("h", "1", 1.5, 3.0)])) == 1
