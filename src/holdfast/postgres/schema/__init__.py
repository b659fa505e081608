"""Holdfast's own schema: migrations, ownership, comparison with the code, removal."""
