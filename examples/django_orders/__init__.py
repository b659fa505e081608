"""The orders service in Django: models, a view that publishes, and handlers that use the ORM as views do."""
