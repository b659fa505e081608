"""The business table of the benchmarks, as a model of Django; imported when Django is set up."""

from django.db import models


class Order(models.Model):
    """A row of `orders`."""

    note = models.TextField()

    class Meta:
        app_label = "bench"
        db_table = "orders"
        managed = False
