"""The one workload that every system runs: about 200 bytes of JSON, one event type, a handler that does nothing."""

EVENT_TYPE = "order.placed"
PAYLOAD = {"order_id": 12345, "customer": "c-991", "lines": [{"sku": "abc-123-xyz", "qty": 2, "price": "19.90"}] * 3}


def payload_of(size: int) -> dict[str, object]:
    """The payload, padded to about `size` bytes."""
    return PAYLOAD if size <= 200 else PAYLOAD | {"text": "x" * (size - 180)}


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
