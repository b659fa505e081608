"""What a worker says when its broker cannot be used."""

from __future__ import annotations

from holdfast.brokers.engine import BrokerUnavailable
from holdfast.redact import redact_dsn
from holdfast.telemetry import Notice

_REMEDY = "see whether the broker runs at this address and lets this login in: holdfast relay show --substrate URL"


def unavailable_notice(broker: str, address: str, fault: BrokerUnavailable, **details: object) -> Notice:
    """Say which broker cannot be used, where it is, and what to do about it."""
    common = {
        "broker": broker,
        "address": redact_dsn(address),
        "error": str(fault)[:500],
        "remedy": fault.remedy or _REMEDY,
    }
    return Notice("warning", "broker_unavailable", {**details, **common})
