"""Leaving at once, on a second signal."""

import os


def exit_now(signal_number: int) -> None:
    """End the process without waiting for anything; leases give the events back. The status is 128 + signal."""
    os._exit(128 + signal_number)
