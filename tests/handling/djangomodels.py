"""Django in the test's own process, on the database of the test."""

from __future__ import annotations

from typing import Any, ClassVar

import django
from django.conf import settings

if not settings.configured:
    settings.configure(
        DATABASES={"default": {"ENGINE": "django.db.backends.postgresql"}}, INSTALLED_APPS=[], USE_TZ=True
    )
    django.setup()

from django.db import connection, connections, models

__all__ = ["Entry", "connection", "use"]


class Entry(models.Model):
    event_id = models.UUIDField()
    n = models.IntegerField(null=True)

    objects: ClassVar[models.Manager[Entry]]

    class Meta:
        app_label = "ledger"
        db_table = "entries"
        managed = False


def use(database: dict[str, Any]) -> None:
    """Have new threads connect there."""
    connections.settings["default"].update(database)
