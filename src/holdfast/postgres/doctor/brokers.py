"""Checks whether somebody relays to brokers, and takes from them, for the handlers that get their events there."""

from __future__ import annotations

from holdfast.postgres.doctor.examination import Examination
from holdfast.postgres.doctor.findings import Check, Finding
from holdfast.postgres.operations.brokers import CarriedHandler
from holdfast.postgres.operations.status import MOST_ROUTES, MUCH_LAG, BrokerBacklog

# Workers ask each 15 seconds.
_OLD = 90.0


async def _unrelayed(examination: Examination) -> list[Finding]:
    brokers: dict[str, list[CarriedHandler]] = {}
    for each in await _carried(examination):
        if each.via != "outbox" and not each.relayed_by:
            brokers.setdefault(each.via, []).append(each)
    return [
        Finding(
            "problem",
            "broker-unrelayed",
            f"relay.{broker}",
            f"no living worker sends events to {broker}, and handlers get theirs from there",
            ", ".join(each.handler_name for each in handlers[:5]) + (" and others" if len(handlers) > 5 else ""),
            f"start their workers with --substrate, or holdfast relay run; or, if {broker} is gone: "
            f"holdfast handlers via outbox {handlers[0].handler_name}",
        )
        for broker, handlers in brokers.items()
    ]


async def _untaken(examination: Examination) -> list[Finding]:
    return [
        Finding(
            "problem",
            "broker-untaken",
            each.handler_name,
            f"no living worker takes the events of {each.handler_name} from {each.draining or each.via}",
            f"relayed by {', '.join(each.relayed_by) or 'nobody'}",
            "start a worker that has the handler with --substrate",
        )
        for each in await _carried(examination)
        if not each.taken_by and (each.relayed_by or each.draining)
    ]


async def _lag(examination: Examination) -> list[Finding]:
    await examination.require_installed()
    found = []
    for row in await examination.rows("list_broker_reports", most_handlers=MOST_ROUTES):
        each = BrokerBacklog(**row)
        if each.seconds is None or each.seconds > _OLD:
            since = "never" if each.seconds is None else f"{each.seconds:.0f} s ago"
            found.append(
                Finding(
                    "problem",
                    "broker-silent",
                    each.handler_name,
                    f"{each.broker} does not answer the workers of {each.handler_name}; what is relayed waits",
                    f"last answer: {since}",
                    f"see to {each.broker}; the workers' logs have its answer as broker_unavailable",
                )
            )
        elif each.waiting is not None and each.waiting >= MUCH_LAG:
            found.append(
                Finding(
                    "warning",
                    "broker-lag",
                    each.handler_name,
                    f"{each.broker} has {each.waiting} messages for {each.handler_name} that nobody has taken",
                    f"{each.unacknowledged} taken and not acknowledged, {each.redelivered} of them delivered again",
                    "start more workers with the handler: docs/runbooks/alerts.md#holdfastbrokerlag",
                )
            )
    return found


async def _weaknesses(examination: Examination) -> list[Finding]:
    await examination.require_installed()
    return [
        Finding(
            "warning",
            "broker-weak",
            f"{row['broker']}: {row['subject']}",
            f"{row['subject']} of {row['broker']} {row['problem']}",
            "as a worker has read it from the broker",
            row["remedy"],
        )
        for row in await examination.rows("list_broker_weaknesses")
    ]


async def _carried(examination: Examination) -> list[CarriedHandler]:
    await examination.require_installed()
    return [CarriedHandler(**row) for row in await examination.rows("list_carried", only=None)]


CHECKS = (
    Check(
        "relays",
        "health",
        "living workers send events to every broker that carries some",
        ("broker-unrelayed",),
        _unrelayed,
    ),
    Check(
        "takers",
        "health",
        "living workers take what brokers have for the handlers of this database",
        ("broker-untaken",),
        _untaken,
    ),
    Check(
        "broker-lag",
        "health",
        "brokers answer, and hold few messages that nobody has taken",
        ("broker-silent", "broker-lag"),
        _lag,
    ),
    Check(
        "broker-settings",
        "health",
        "no setting of a broker that workers have seen loses events",
        ("broker-weak",),
        _weaknesses,
    ),
)
