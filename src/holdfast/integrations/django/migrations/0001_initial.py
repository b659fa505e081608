"""Apply Holdfast's schema. Migrations of your own that publish events depend on this one.

It has a connection and transactions of its own, and is not taken back: `manage.py holdfast uninstall` removes the
schema, with every event in it. Later releases of the schema are applied by every `manage.py migrate`, before
its migrations.
"""

from typing import Any, ClassVar

from django.db import migrations, models

from holdfast.integrations.django.migrating import migrate_holdfast


def _apply(_apps: Any, schema_editor: Any) -> None:
    migrate_holdfast(schema_editor.connection.alias)


class Migration(migrations.Migration):  # type: ignore[misc]
    """The schema, and the permissions of the admin's pages."""

    initial = True
    atomic = False
    dependencies: ClassVar[list[Any]] = []
    operations: ClassVar[list[Any]] = [
        migrations.RunPython(_apply, migrations.RunPython.noop, elidable=False),
        migrations.CreateModel(
            name="FailedDelivery",
            fields=[("id", models.UUIDField(primary_key=True, serialize=False))],
            options={
                "managed": False,
                "base_manager_name": "objects",
                "verbose_name": "failed delivery",
                "verbose_name_plural": "failed deliveries",
                "default_permissions": ("view",),
                "permissions": [
                    ("replay_faileddelivery", "Can replay failed deliveries"),
                    ("discard_faileddelivery", "Can discard failed deliveries"),
                    ("read_payload_faileddelivery", "Can read the payloads of failed deliveries"),
                ],
            },
        ),
    ]
