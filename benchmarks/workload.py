"""The one workload that every system runs: about 200 bytes of JSON, one event type, a handler that does nothing."""

import random
import string

EVENT_TYPE = "order.placed"
SLOW_TYPE = "report.due"
EVENT_TYPES = tuple(f"type_{number}.happened" for number in range(50))
PAYLOAD = {"order_id": 12345, "customer": "c-991", "lines": [{"sku": "abc-123-xyz", "qty": 2, "price": "19.90"}] * 3}


def payload_of(size: int) -> dict[str, object]:
    """The payload, padded to about `size` bytes with text that does not compress: Postgres would make little of it."""
    if size <= 200:
        return PAYLOAD
    letters = random.Random(size).choices(string.ascii_letters + string.digits, k=size - 180)
    return PAYLOAD | {"text": "".join(letters)}


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
