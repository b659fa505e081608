"""What the admin needs to know of failed deliveries: a name, and permissions. Their rows are read by `Operator`."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import models


class _NoRows(models.Manager):  # type: ignore[misc]
    """Finds nothing, so that what reads every model, such as `dumpdata`, finds no table missing."""

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
