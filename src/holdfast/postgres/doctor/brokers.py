"""Checks whether somebody relays to brokers, and takes from them, for the handlers that get their events there."""

from __future__ import annotations

from holdfast.postgres.doctor.examination import Examination
from holdfast.postgres.doctor.findings import Check, Finding
from holdfast.postgres.operations.brokers import CarriedHandler
from holdfast.postgres.operations.status import MOST_ROUTES, MUCH_LAG, BrokerBacklog, StrandedMessages

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
            _names([each.handler_name for each in handlers]),
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
    # Without a worker that takes from the broker nobody asks it, which is a finding of its own. Of handlers that were
    # moved to the outbox nobody waits for more than what the broker still holds.
    asking = {each.handler_name for each in await _carried(examination) if each.taken_by and each.via != "outbox"}
    found: list[Finding] = []
    silent: dict[str, list[BrokerBacklog]] = {}
    for row in await examination.rows("list_broker_reports", most_handlers=MOST_ROUTES):
        each = BrokerBacklog(**row)
        if each.seconds is None or each.seconds > _OLD:
            if each.handler_name in asking:
                silent.setdefault(each.broker, []).append(each)
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
    return [*(_silence(broker, backlogs) for broker, backlogs in silent.items()), *found]


def _silence(broker: str, backlogs: list[BrokerBacklog]) -> Finding:
    answers = [each.seconds for each in backlogs if each.seconds is not None]
    since = f"{max(answers):.0f} s ago" if answers else "never"
    return Finding(
        "problem",
        "broker-silent",
        broker,
        f"{broker} does not answer the workers of {_names([each.handler_name for each in backlogs])}; "
        "what is relayed waits",
        f"last answer: {since}",
        f"see to {broker}; the workers' logs have its answer as broker_unavailable"
        + ("; a queue without a leader: docs/brokers.md" if broker == "rabbitmq" else ""),
    )


def _names(handlers: list[str]) -> str:
    return ", ".join(handlers[:5]) + (" and others" if len(handlers) > 5 else "")


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


async def _stranded(examination: Examination) -> list[Finding]:
    await examination.require_installed()
    found = [StrandedMessages(**row) for row in await examination.rows("list_stranded")]
    return [
        Finding(
            "problem",
            "broker-stranded",
            f"{each.broker}: {each.handler_name}",
            f"{each.broker} has {'perhaps' if each.waiting is None else each.waiting} messages for {each.handler_name} "
            "by names that no worker uses any more",
            f"the names were {each.naming}",
            f"start the workers with these names again until they are taken, or holdfast relay check {each.broker} "
            "--repair and delete what has these names: docs/brokers.md#names",
        )
        for each in found
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
        "brokers answer and let each handler take, and hold few messages that nobody has taken",
        ("broker-silent", "broker-lag"),
        _lag,
    ),
    Check(
        "broker-names",
        "health",
        "brokers have nothing left for a handler by names that its workers had before",
        ("broker-stranded",),
        _stranded,
    ),
    Check(
        "broker-settings",
        "health",
        "no setting of a broker loses events, keeps them for less than 7 days, or for longer than the inbox knows them",
        ("broker-weak",),
        _weaknesses,
    ),
)
