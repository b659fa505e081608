"""Reports settlements that the database refuses for good."""

from holdfast.observing import ObserverGroup
from holdfast.postgres.delivery import Delivery
from holdfast.postgres.faults import PASSING_FAULTS
from holdfast.postgres.messages import Message
from holdfast.telemetry import Notice
from holdfast.worker.hourly import HourlyLimit
from holdfast.worker.reports import Reports

# Remedies. Refused messages are reported once an hour: they come again at once, and not when a lease expires.
_ROW = "the row is due again when its lease expires; compare the schema with holdfast migrate status"
_MESSAGE = (
    "a message whose content is refused is kept in short as a dead letter, any other comes again; "
    "compare the schema with holdfast migrate status"
)
_ARCHIVE = (
    "the rows stay in the outbox and are due again when their leases expire; holdfast doctor says what is "
    "wrong with core.archive, and workers with dead_letters='in_place' do without it"
)
# Classes of SQLSTATE that are the event's own fault: data exceptions, violated constraints, exceeded limits.
_BY_CONTENT = ("22", "23", "54")


class Refusals:
    """Reports each delivery that the database refuses to settle, as lost and with the reason."""

    def __init__(self, reports: Reports, observe: ObserverGroup) -> None:
        self._reports = reports
        self._observe = observe
        self._hourly = HourlyLimit()

    def report(self, delivery: Delivery, refusal: Exception, *, archiving: bool) -> None:
        """Count a delivery as lost, and report why; `archiving` says that core.archive refused it."""
        sqlstate = getattr(refusal, "sqlstate", None)
        if isinstance(delivery, Message) and (isinstance(refusal, ValueError) or str(sqlstate)[:2] in _BY_CONTENT):
            delivery.refused = str(refusal)
        self._reports.lost((delivery,))
        name = "settle_refused"
        remedy = _ROW
        if isinstance(refusal, PASSING_FAULTS):
            name = "settle_abandoned"  # the obstacle passes, and is not the delivery's own fault
        elif archiving:
            name = "archive_refused"
            remedy = _ARCHIVE
            if not self._hourly.due(name, str(sqlstate)):
                return  # the archive refuses all deliveries for one reason: one report is enough
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
