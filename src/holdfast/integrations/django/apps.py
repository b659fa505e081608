"""The application for INSTALLED_APPS: migrations, the command `manage.py holdfast`, and pages of the admin."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.models.signals import pre_migrate

from holdfast.errors import HoldfastError

_MIDDLEWARE = "holdfast.integrations.django.IdempotencyMiddleware"


class HoldfastConfig(AppConfig):  # type: ignore[misc]
    """Holdfast in a Django project. `database_names` has those of the settings, which a test runner changes."""

    name = "holdfast.integrations.django"
    label = "holdfast"
    verbose_name = "Holdfast"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        self.database_names = {alias: each.get("NAME") for alias, each in settings.DATABASES.items()}
        pre_migrate.connect(_migrating, sender=self)
        checks.register(_checked)


def _checked(**_: Any) -> list[checks.CheckMessage]:
    """Refuse settings that cannot be used, before any command begins."""
    from holdfast.integrations.django.configuration import Configuration
    from holdfast.integrations.django.middleware import configured

    found = _refused("HOLDFAST", "holdfast.E001", Configuration.read)
    if _MIDDLEWARE in settings.MIDDLEWARE:
        found += _refused("HOLDFAST_IDEMPOTENCY", "holdfast.E002", configured)
    return found


def _refused(name: str, id: str, read: Callable[[], object]) -> list[checks.CheckMessage]:
    try:
        read()
    except (ImproperlyConfigured, HoldfastError, TypeError, ValueError) as error:
        return [checks.Error(str(error), hint=f"see {name} in the settings", id=id)]
    return []


def _migrating(using: str, **_: Any) -> None:
    """Bring an existing schema to the installed release, before migrations of the project publish to it."""
    from django.db.migrations.recorder import MigrationRecorder

    from holdfast.integrations.django.migrating import migrate_holdfast

    if "--fake" in sys.argv:  # the signal does not tell
        return
    if ("holdfast", "0001_initial") in MigrationRecorder(connections[using]).applied_migrations():
        migrate_holdfast(using)
