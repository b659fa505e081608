"""Every verb of an operator once, for the skins that are made from it: the HTTP API and the MCP server.

    verb = VERBS["failed.replay"]
    arguments = verb.parse({"group": "billing.charge_card/ValueError-1f2e", "reason": "fixed", "dry_run": True})
    moved = await verb.run(operator, arguments)
    print(document(moved))

`verb.role` is what who asks has to have; it is for the skin to check, before anything is read.
"""

from typing import Final

from holdfast.operator.catalogue import (
    archive,
    events,
    failed,
    fleet,
    keys,
    overview,
    partitions,
    plans,
    records,
    relay,
    retention,
    schedules,
)
from holdfast.operator.catalogue.verb import REVEAL, Arguments, Catalogue, Counted, Verb
from holdfast.operator.encoding import document, plain

__all__ = ["REVEAL", "VERBS", "Arguments", "Counted", "Verb", "document", "plain"]

VERBS: Final = Catalogue()
for part in (overview, events, failed, plans, archive, fleet, keys, schedules, retention, partitions, relay, records):
    VERBS.update(part.VERBS)
