"""Holdfast beside other frameworks. Each module imports its framework, and nothing else imports the module."""
