"""A model of failed deliveries with a name and permissions for the admin; `Operator` reads the rows."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import models


class _NoRows(models.Manager):  # type: ignore[misc]
    """Finds no rows, so that commands which read every model, such as `dumpdata`, do not miss a table."""

    def get_queryset(self) -> Any:
        return super().get_queryset().none()


class FailedDelivery(models.Model):  # type: ignore[misc]
    """A dead letter: an event that one handler has given up on. It has no table of Django's."""

    id = models.UUIDField(primary_key=True)
    objects = _NoRows()

    class Meta:
        managed = False
        base_manager_name = "objects"
        verbose_name = "failed delivery"
        verbose_name_plural = "failed deliveries"
        default_permissions = ("view",)
        permissions: ClassVar[list[tuple[str, str]]] = [
            ("replay_faileddelivery", "Can replay failed deliveries"),
            ("discard_faileddelivery", "Can discard failed deliveries"),
            ("read_payload_faileddelivery", "Can read the payloads of failed deliveries"),
        ]
