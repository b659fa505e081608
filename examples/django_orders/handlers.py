"""What follows an order: `holdfast worker examples.django_orders.handlers:registry`.

Plain functions with the ORM, as in views. Each runs inside `transaction.atomic()` of the database that `tx` is a
connection of; what it writes and publishes commits together with the delivery, once.
"""

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F

from examples.django_orders.models import Customer, Order, Sale
from holdfast import EventEnvelope, HandlerRegistry, Publisher

registry = HandlerRegistry()
publisher = Publisher("ledger")


@registry.handler("order.placed", name="ledger.record_sale")
def record_sale(event: EventEnvelope, tx: BaseDatabaseWrapper) -> None:
    """An effect in the database, and an event that follows from it: both exactly once."""
    order = Order.objects.get(pk=event.payload["order_id"])
    sale = Sale.objects.create(order=order, total_cents=order.total_cents)
    publisher.publish(tx, "sale.recorded", {"sale_id": sale.pk, "customer": order.customer})


@registry.handler("sale.recorded", name="customers.count_sale")
def count_sale(event: EventEnvelope, tx: BaseDatabaseWrapper) -> None:
    """A counter, which would show every sale that is handled twice."""
    sale = Sale.objects.get(pk=event.payload["sale_id"])
    customer, _ = Customer.objects.get_or_create(name=event.payload["customer"])
    Customer.objects.filter(pk=customer.pk).update(
        orders=F("orders") + 1, spent_cents=F("spent_cents") + sale.total_cents
    )
