"""Models of the Django shop: its tables exist already. To be imported when Django is set up."""

from django.db import models


class Seat(models.Model):
    name = models.TextField(primary_key=True)

    class Meta:
        app_label = "shop"
        db_table = "seats"
        managed = False


class Counter(models.Model):
    name = models.TextField(primary_key=True)
    value = models.IntegerField()

    class Meta:
        app_label = "shop"
        db_table = "counters"
        managed = False
