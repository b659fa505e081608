"""Holdfast in other frameworks. Each module imports its framework; inside Holdfast only the command line imports it."""
