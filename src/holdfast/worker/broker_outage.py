"""The notice of a worker whose broker cannot be used."""

from __future__ import annotations

from holdfast.brokers.engine import BrokerUnavailable
from holdfast.redact import redact_dsn
from holdfast.telemetry import Notice

_REMEDY = "check that the broker runs at this address and accepts this login: holdfast relay show --substrate URL"


def unavailable_notice(broker: str, address: str, fault: BrokerUnavailable, **details: object) -> Notice:
    """Return a notice that says which broker cannot be used, its address, the error, and the remedy."""
    common = {
        "broker": broker,
        "address": redact_dsn(address),
        "error": str(fault)[:500],
        "remedy": fault.remedy or _REMEDY,
    }
    return Notice("warning", "broker_unavailable", {**details, **common})
