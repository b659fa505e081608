"""What happens to an order is recorded on it; no database is needed to see that."""

import pytest

from examples.orders.model import Order
from holdfast.testing import assert_recorded, recorded_events


@pytest.mark.parametrize("cents", [1, 4_200, 100_000_000])
def test_placing_an_order_is_recorded_on_it(cents: int) -> None:
    order = Order.place("Ada", cents)
    event = assert_recorded(order, "order.placed", {"order_id": order.id, "customer": "Ada", "total_cents": cents})
    assert event.domain_id == order.id
    assert len(recorded_events(order)) == 1
