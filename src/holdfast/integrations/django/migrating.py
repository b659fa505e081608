"""Holdfast's schema, applied by `manage.py migrate`."""

from __future__ import annotations

from holdfast.integrations._waiting import wait_for
from holdfast.integrations.django.configuration import Configuration
from holdfast.postgres import migrate


def migrate_holdfast(using: str) -> None:
    """Bring the schema to the installed release, if this is its database; one that is up to date is left as it is."""
    configuration = Configuration.read()
    if using == configuration.using:
        wait_for(migrate.apply(configuration.dsn, schema=configuration.schema))
