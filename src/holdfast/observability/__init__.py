"""Logs of what a worker reports, and metrics of the outbox for Prometheus."""
