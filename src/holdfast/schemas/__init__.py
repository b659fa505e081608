"""Schemas of events: the AsyncAPI document of an application, and what changed between two of them."""
