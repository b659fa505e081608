"""The migration of Django that applies the schema of Holdfast."""
