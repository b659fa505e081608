"""Prices need no outbox, and pay nothing for the plugin."""

import pytest

from examples.bookings.prices import price, total


@pytest.mark.parametrize("row, cents", [("A", 9_000), ("B", 6_000), ("C", 4_000)])
@pytest.mark.parametrize("number", range(1, 9))
def test_a_seat_has_the_price_of_its_row(row: str, number: int, cents: int) -> None:
    assert price(f"{row}{number}") == cents


@pytest.mark.parametrize("seat", ["", "A", "A0", "A9", "A10", "D1", "a1", "A1.5", "A-1", "1A", "AA", " A1"])
def test_there_are_no_other_seats(seat: str) -> None:
    with pytest.raises(ValueError, match="there is no seat"):
        price(seat)


@pytest.mark.parametrize(
    "seats, cents",
    [
        (["A1"], 9_000),
        (["A1", "A2"], 18_000),
        (["A1", "B1", "C1"], 19_000),
        (["C1", "C2", "C3", "C4"], 16_000),
        (["C1", "C2", "C3", "C4", "C5"], 18_000),
        (["A1", "A2", "A3", "A4", "A5", "A6"], 48_600),
    ],
)
def test_groups_pay_less(seats: list[str], cents: int) -> None:
    assert total(seats) == cents


def test_a_seat_is_sold_once() -> None:
    with pytest.raises(ValueError, match="twice"):
        total(["A1", "A1"])
