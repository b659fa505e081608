"""Checks whether somebody relays to brokers, and takes from them, for the handlers that get their events there."""

from __future__ import annotations

from holdfast.postgres.doctor.examination import Examination
from holdfast.postgres.doctor.findings import Check, Finding
from holdfast.postgres.operations.brokers import CarriedHandler


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
)
