"""What seats cost."""

ROWS = {"A": 9_000, "B": 6_000, "C": 4_000}
GROUP, GROUP_DISCOUNT = 5, 10  # from so many seats on, so many percent off


def price(seat: str) -> int:
    """Return the price of a seat in cents; a `ValueError` names one that is not there."""
    row, number = seat[:1], seat[1:]
    if row not in ROWS or not number.isdigit() or not 1 <= int(number) <= 8:
        raise ValueError(f"there is no seat {seat!r}")
    return ROWS[row]


def total(seats: list[str]) -> int:
    """Return what seats cost together."""
    if len(set(seats)) < len(seats):
        raise ValueError("a seat is named twice")
    full = sum(map(price, seats))
    return full * (100 - GROUP_DISCOUNT) // 100 if len(seats) >= GROUP else full
