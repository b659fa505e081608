"""Settlements that the database refuses for good: what becomes of the delivery, and who is told."""

from holdfast.observing import ObserverGroup
from holdfast.postgres.delivery import Delivery
from holdfast.postgres.faults import PASSING_FAULTS
from holdfast.postgres.messages import Message
from holdfast.telemetry import Notice
from holdfast.worker.hourly import HourlyLimit
from holdfast.worker.reports import Reports

# A row is due again when its lease expires, a message at once: that would be told many times a second.
_ROW = "the row is due again when its lease expires; compare the schema with holdfast migrate status"
_MESSAGE = (
    "a message whose content is refused is kept in short as a dead letter, any other comes again; compare the schema"
)
_ARCHIVE = (
    "the rows stay in the outbox and are due again when their leases expire; holdfast doctor says what is "
    "wrong with core.archive, and workers with dead_letters='in_place' do without it"
)
# Data exceptions, violated constraints and exceeded limits: the database takes other events.
_BY_CONTENT = ("22", "23", "54")


class Refusals:
    """Reports what the database refuses to settle, each delivery as lost."""

    def __init__(self, reports: Reports, observe: ObserverGroup) -> None:
        self._reports = reports
        self._observe = observe
        self._hourly = HourlyLimit()

    def report(self, delivery: Delivery, refusal: Exception, *, archiving: bool) -> None:
        """Give a delivery up, and tell why."""
        sqlstate = getattr(refusal, "sqlstate", None)
        if isinstance(delivery, Message) and (isinstance(refusal, ValueError) or str(sqlstate)[:2] in _BY_CONTENT):
            delivery.refused = str(refusal)
        self._reports.lost((delivery,))
        name = "settle_refused"
        remedy = _ROW
        if isinstance(refusal, PASSING_FAULTS):
            name = "settle_abandoned"  # the obstacle is not the row's own fault, and passes
        elif archiving:
            name = "archive_refused"
            remedy = _ARCHIVE
            if not self._hourly.due(name, str(sqlstate)):
                return  # what is wrong with the archive is wrong for all of them
        elif isinstance(delivery, Message):
            remedy = _MESSAGE
            if not self._hourly.due(name, delivery.handler.name, str(sqlstate)):
                return
        details: dict[str, object] = {
            "delivery_id": str(delivery.id),
            "handler_name": delivery.handler.name,
            "error": type(refusal).__name__,
            "sqlstate": sqlstate,
            "remedy": remedy,
        }
        self._observe(Notice("error", name, details))
