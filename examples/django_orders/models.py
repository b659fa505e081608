"""An order, and what follows it."""

from django.db import models


class Order(models.Model):
    """An order of a customer's."""

    customer = models.CharField(max_length=200)
    total_cents = models.PositiveIntegerField()
    placed_at = models.DateTimeField(auto_now_add=True)


class Sale(models.Model):
    """A line of the ledger. Nothing here forbids a second one for an order; that is the worker's doing."""

    order = models.ForeignKey(Order, on_delete=models.PROTECT, related_name="sales")
    total_cents = models.PositiveIntegerField()


class Customer(models.Model):
    """What a customer has spent."""

    name = models.CharField(max_length=200, unique=True)
    orders = models.PositiveIntegerField(default=0)
    spent_cents = models.PositiveBigIntegerField(default=0)
