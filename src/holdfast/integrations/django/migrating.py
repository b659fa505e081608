"""Holdfast's schema, applied by `manage.py migrate`."""

from __future__ import annotations

from holdfast.integrations._waiting import wait_for
from holdfast.integrations.django.configuration import Configuration
from holdfast.postgres import migrate


def migrate_holdfast(using: str) -> None:
    """Bring the schema to the installed release, if this database has the outbox and it is not up to date."""
    configuration = Configuration.read()
    if using == configuration.using:
        wait_for(migrate.apply(configuration.dsn, schema=configuration.schema))
