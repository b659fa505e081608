"""What the view, the handlers and both together do: `python -m django test examples.django_orders.tests`."""

from typing import Any

from django.db import connection, transaction
from django.test import TestCase

from examples.django_orders.handlers import registry
from examples.django_orders.models import Customer, Order, Sale
from holdfast import Done, EventEnvelope, HandlerRegistry
from holdfast.testing import run_handler
from holdfast.testing.django import HoldfastSchema, HoldfastTestCase

FAULTS = ["crash_after_effect", "lose_commit_answer", "duplicate_delivery", "expire_lease"]
HANDLERS = ["ledger.record_sale", "customers.count_sale"]


class OrderTests(HoldfastTestCase):
    """Everything together: the view, a commit, and what a worker does then."""

    registry = registry

    def place(self, customer: str = "Ada", cents: int = 4_200) -> int:
        order = {"customer": customer, "total_cents": cents}
        placed = self.client.post("/orders", order, content_type="application/json")
        self.assertEqual(placed.status_code, 201)
        return int(placed.json()["order_id"])

    def books(self) -> list[Any]:
        """Each customer with orders and money, and the number of sales."""
        return [*Customer.objects.order_by("name").values_list("name", "orders", "spent_cents"), Sale.objects.count()]

    def test_an_order_is_stored_and_published(self) -> None:
        order = self.place()
        self.outbox.assert_published("order.placed", {"order_id": order}, source="orders", times=1)
        self.assertEqual(Order.objects.get().pk, order)

    def test_what_is_rolled_back_publishes_nothing(self) -> None:
        with transaction.atomic():
            self.place()
            transaction.set_rollback(True)
        self.assertEqual((self.outbox.published(), Order.objects.count()), ([], 0))

    def test_a_sale_is_recorded_and_counted(self) -> None:
        order = self.place()
        self.place("Grace", 100)
        self.outbox.drain()
        self.outbox.assert_handled("ledger.record_sale", {"order_id": order})
        self.outbox.assert_published("sale.recorded", {"customer": "Ada"}, source="ledger", times=1)
        self.outbox.assert_all_delivered()
        self.assertEqual(self.books(), [("Ada", 1, 4_200), ("Grace", 1, 100), 2])

    def test_an_order_is_counted_once_whatever_breaks(self) -> None:
        """The handlers write with the ORM, in the transaction of `tx`: there is one sale, and it is counted once."""
        orders = 0
        for handler in HANDLERS:
            for fault in FAULTS:
                with self.subTest(handler=handler, fault=fault):
                    self.place()
                    orders += 1
                    getattr(self.outbox, fault)(handler)
                    self.outbox.drain()
                    self.assertEqual(self.books(), [("Ada", orders, 4_200 * orders), orders])

    def test_an_order_that_is_gone_is_a_dead_letter(self) -> None:
        self.place()
        Order.objects.all().delete()
        self.outbox.drain()
        self.outbox.assert_failed("ledger.record_sale", error=Order.DoesNotExist)
        self.assertEqual(self.books(), [0])


class AsynchronousTests(HoldfastTestCase):
    """Handlers that are `async def`, with Django's asynchronous ORM."""

    def test_it_finds_the_order(self) -> None:
        registry, found = HandlerRegistry(), []

        @registry.handler("order.placed", name="mail.confirm")
        async def confirm(event: EventEnvelope) -> None:
            found.append((await Order.objects.aget(pk=event.payload["order_id"])).customer)

        order = Order.objects.create(customer="Ada", total_cents=4_200)
        self.outbox.publish("order.placed", {"order_id": order.pk})
        self.outbox.drain(registry)
        self.assertEqual(found, ["Ada"])


class HandlerTests(HoldfastSchema, TestCase):
    """One handler in the transaction of the test, which is rolled back."""

    def test_a_sale_is_recorded(self) -> None:
        order = Order.objects.create(customer="Ada", total_cents=4_200)
        run_handler(registry, "ledger.record_sale", {"order_id": order.pk}, tx=connection)
        self.assertEqual(Sale.objects.get().order, order)

    def test_a_sale_is_counted(self) -> None:
        order = Order.objects.create(customer="Ada", total_cents=4_200)
        sale = Sale.objects.create(order=order, total_cents=4_200)
        for _ in range(2):
            counted = {"sale_id": sale.pk, "customer": "Ada"}
            self.assertEqual(run_handler(registry, "customers.count_sale", counted, tx=connection), Done())
        ada = Customer.objects.get(name="Ada")
        self.assertEqual((ada.orders, ada.spent_cents), (2, 8_400))

    def test_a_sale_that_is_not_there(self) -> None:
        with self.assertRaises(Sale.DoesNotExist):
            run_handler(registry, "customers.count_sale", {"sale_id": 1, "customer": "Ada"}, tx=connection)
