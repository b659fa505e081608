"""Holdfast beside other frameworks. Each module imports its framework, and only the command line imports the module."""
