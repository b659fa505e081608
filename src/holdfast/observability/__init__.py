"""What can be seen from outside: logs of what a worker tells, and metrics of the outbox for Prometheus."""
