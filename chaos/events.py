"""What is published, to whom it is owed, and what must become of it.

Producers, handlers and the checker share this table. An event is known by its key: a number, or for an event that a
handler publishes the number of its cause with an "r" behind it.
"""

from collections.abc import Mapping
from typing import Literal

# effect     in the handler's transaction, exactly once
# delivery   outside of any transaction, at least once
# failed     a dead letter, never lost from sight
# either     delivered or expired
# waiting    pending, with no attempt burned: nobody wants it
Fate = Literal["effect", "delivery", "failed", "either", "waiting"]
NOBODY = ""

ORDINARY: dict[str, Mapping[str, Fate]] = {
    "order.placed": {"ledger.record": "effect", "mail.confirm": "delivery"},
    "payment.received": {"ledger.pay": "effect", "ledger.total": "effect"},
    "parcel.sent": {"parcel.track": "delivery"},
    "invoice.due": {"invoice.print": "delivery"},
    "stock.counted": {"stock.flaky": "effect"},
    "offer.made": {"offer.show": "either"},
}
# Published by ledger.record, in its transaction.
DERIVED: dict[str, Mapping[str, Fate]] = {"receipt.due": {"ledger.receipt": "effect"}}
TROUBLES: dict[str, Mapping[str, Fate]] = {
    "trouble.exit": {"trouble.exit": "failed"},
    "trouble.block": {"trouble.block": "effect"},
    "trouble.hang": {"trouble.hang": "failed"},
    "trouble.hog": {"trouble.hog": "effect"},
    "trouble.linger": {"trouble.linger": "delivery"},
    "trouble.occupy": {"trouble.occupy": "delivery"},
    "trouble.shout": {"trouble.shout": "delivery"},
    "trouble.die_before_commit": {"trouble.die_before_commit": "effect"},
    "trouble.die_after_commit": {"trouble.die_after_commit": "effect"},
    "trouble.die_after_effect": {"trouble.die_after_effect": "delivery"},
    "trouble.raise": {"trouble.raise": "failed"},
    "trouble.unwind": {"trouble.unwind": "failed"},
    "trouble.text": {"trouble.text": "failed"},
    "trouble.large": {"trouble.large": "effect"},
    "trouble.unrouted": {NOBODY: "waiting"},
}
PROBES: dict[str, Mapping[str, Fate]] = {"probe.sent": {"probe.hear": "delivery"}}
# Hundreds in one transaction.
IMPORTS: dict[str, Mapping[str, Fate]] = {"price.changed": {"price.update": "delivery"}}
# Of the scenarios in chaos/flow.
FLOW: dict[str, Mapping[str, Fate]] = {
    "account.changed": {"account.apply": "effect"},
    "ticket.moved": {"ticket.move": "delivery"},
    "slot.wanted": {"slot.use": "delivery"},
    "call.due": {"call.make": "delivery"},
    "report.due": {"report.render": "delivery"},
    "shipment.due": {"shipment.book": "delivery"},
    "entry.posted": {"entry.post": "delivery"},
    "entry.forged": {"entry.post": "failed"},
}

OWED: dict[str, Mapping[str, Fate]] = ORDINARY | DERIVED | TROUBLES | PROBES | IMPORTS | FLOW
CAUSE = "ledger.record"


def crowd(patterns: int) -> dict[str, Mapping[str, Fate]]:
    """Event types with a handler each: so many that are wanted by a pattern, and ten times as many by their name."""
    wanted = {f"crowd.kind_{n:04}.seen": f"crowd.kind_{n:04}" for n in range(patterns)}
    wanted |= {f"crowd.one_{n:04}": f"crowd.one_{n:04}" for n in range(10 * patterns)}
    return {event_type: {handler: "delivery"} for event_type, handler in wanted.items()}


def derived(key: str) -> str:
    return f"{key}r"
