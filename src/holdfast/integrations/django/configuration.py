"""The setting `HOLDFAST` of a Django project: which of its databases has the outbox."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from holdfast.errors import ConfigurationError
from holdfast.names import schema_name
from holdfast.postgres.addresses import django_address, other_database, readable_address

_KNOWN = {"USING", "SCHEMA", "DSN"}


@dataclass(frozen=True, slots=True)
class Configuration:
    """Where the outbox is. `dsn` is for connections that Holdfast opens besides Django's own."""

    using: str
    schema: str
    dsn: str
    place: str  # where the settings have that address, for remedies

    @classmethod
    def read(cls) -> Configuration:
        """Read the setting `HOLDFAST`, whose parts are optional, and `DATABASES`."""
        options = setting("HOLDFAST", '{"USING": "default"}')
        if unknown := sorted(set(options) - _KNOWN):
            raise ImproperlyConfigured(f"HOLDFAST: {unknown[0]} is unknown; use {', '.join(sorted(_KNOWN))}")
        using, schema = options.get("USING", "default"), schema_name(options.get("SCHEMA", "core"))
        if using not in settings.DATABASES:
            raise ImproperlyConfigured(f"HOLDFAST: USING is {using!r}, which is not in DATABASES")
        dsn = options.get("DSN")
        return cls(using, schema, _address(using, dsn), 'HOLDFAST["DSN"]' if dsn else f'DATABASES["{using}"]')


def setting(name: str, example: str) -> dict[str, Any]:
    """Return a setting that is a dictionary, as a copy; an empty one where there is none."""
    found = getattr(settings, name, {})
    if not isinstance(found, dict):
        raise ImproperlyConfigured(f"{name} is {type(found).__name__}, not dict; write {name} = {example}")
    return dict(found)


def _address(using: str, dsn: str | None) -> str:
    """Return the address of the settings, or that of the connection; under a test runner, with the test database."""
    # From the connection, not from the settings: a test runner changes the name of the database there.
    connection = connections[using]
    try:
        if not dsn:
            return _own_address(connection)
        dsn, name = readable_address(dsn, 'HOLDFAST["DSN"]'), connection.settings_dict["NAME"]
        # A pooler may have another name for the database than the server, so the name is replaced only in tests.
        return dsn if name == apps.get_app_config("holdfast").database_names[using] else other_database(dsn, name)
    except ConfigurationError as error:
        raise ImproperlyConfigured(str(error)) from error


def _own_address(connection: Any) -> str:
    if connection.vendor != "postgresql":
        problem = f"the database {connection.alias!r} is {connection.vendor}; Holdfast is for Postgres"
        raise ImproperlyConfigured(f"HOLDFAST: {problem}")
    return django_address(connection.settings_dict)
