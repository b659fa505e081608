"""What programs import: a worker that starts must not wait for what it does not need."""

import subprocess
import sys

NOT_NEEDED = ("rich", "typer", "structlog", "prometheus_client", "opentelemetry", "nats", "holdfast.brokers")


def imported(statement: str) -> set[str]:
    """Return the names in NOT_NEEDED that a process has imported after a statement."""
    code = f"{statement}; import sys; print(*(name for name in {NOT_NEEDED!r} if name in sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def test_a_worker_and_a_publisher_import_nothing_that_only_others_need() -> None:
    assert imported("from holdfast import HandlerRegistry, Publisher, Worker") == set()
