"""The parts of one worker and the arrows between them. Each part is one loop in one module of this package.

claimer ──feed──▶ dispatcher ──settlements──▶ settler       lease keeper ──cancel──▶ dispatcher
   ▲                  │                          │                ▲
   │                 wake                        │              doubt
   └──────────────── wakeups ◀───────wake────────┘                │
                        ▲  ▲                                      │
                        │  └──────────────wake─────────────── listener ──hears, ping, reset──▶ sleeper
                        └──────────────look again─────────────────────────────────────────────────┘

claimer, settler, lease keeper ──statements──▶ database ──notifications──▶ listener
dispatcher ──one attempt──▶ attempts ──handler──▶ handling (loop, thread), transactions (a handler that takes `tx`)
maintenance (heartbeat, warnings, clock, sweeps) and the scheduler (slots) stand alone, each with a connection
substrate (a broker): a relay among the handlers, and takers that feed the dispatcher beside the claimer
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

from holdfast.failure import Redactor
from holdfast.handlers import HandlerRegistry
from holdfast.handling.application.sources import Transactions
from holdfast.handling.lifespans import Lifespans
from holdfast.observing import ObserverGroup
from holdfast.postgres.brokers import BrokerStatements
from holdfast.postgres.deliveries import Deliveries
from holdfast.postgres.fleet import Fleet
from holdfast.postgres.flow import FlowStatements
from holdfast.postgres.keyed import KeyedDeliveries
from holdfast.postgres.queries import Queries
from holdfast.postgres.schedules import Schedules
from holdfast.postgres.statements import NamedStatements
from holdfast.postgres.subscriptions import SubscriptionStatements
from holdfast.postgres.wakeup.sleeper import Sleeper
from holdfast.settings import WorkerSettings
from holdfast.telemetry import Counters
from holdfast.tracing import Tracing
from holdfast.worker.breakers import Breakers
from holdfast.worker.claimer import Claimer
from holdfast.worker.connections import Connections
from holdfast.worker.dispatcher import Dispatcher
from holdfast.worker.heartbeat import Heartbeat
from holdfast.worker.held import Held
from holdfast.worker.in_flight import InFlight
from holdfast.worker.lease_keeper import LeaseKeeper
from holdfast.worker.listener import Listener
from holdfast.worker.maintenance import Activity, Chore, Maintenance, registration
from holdfast.worker.outage import Outages
from holdfast.worker.partitioner import Partitioner
from holdfast.worker.pulse import Pulse
from holdfast.worker.reports import Reports
from holdfast.worker.rollup import RollupWriter
from holdfast.worker.scheduler import Scheduler
from holdfast.worker.settlements import Judge
from holdfast.worker.settler import Settler
from holdfast.worker.shared import Shared
from holdfast.worker.sweeper import Sweeper
from holdfast.worker.tally import Tally
from holdfast.worker.wakeups import Wakeups

if TYPE_CHECKING:
    from holdfast.worker.substrate import Substrate


class Parts:
    """Makes the parts in the order in which they need each other. `Lifecycle` starts and stops them."""

    def __init__(
        self,
        dsn: str,
        worker: UUID,
        registry: HandlerRegistry,
        settings: WorkerSettings,
        observe: ObserverGroup,
        redact: Redactor | None,
        tracing: Tracing | None,
        transactions: Transactions = None,
        connections: Connections | None = None,
    ) -> None:
        queries = Queries(settings.schema)
        handlers = list(registry)
        self.lifespans = Lifespans(handlers, observe, redact)
        self.connections = connections = connections or Connections(dsn, worker, registry, settings, transactions)
        statements = NamedStatements(queries, connections.address)
        identity: dict[str, Any] = {"worker": worker, "generation": settings.generation, "lease": settings.lease}
        self.substrate: Substrate | None = None
        in_flight: type[InFlight] = InFlight
        reports: type[Reports] = Reports
        if settings.substrate is None:
            deliveries = Deliveries(statements, **identity)
        else:
            # Most workers have no broker, and start without the code for it.
            from holdfast.postgres.messages import MessageDeliveries
            from holdfast.worker.substrate import MessageReports, MessagesInFlight, Substrate

            self.substrate = Substrate(settings.substrate, handlers, settings, connections, statements, observe)
            handlers.append(self.substrate.relay.handler)
            deliveries = messages = MessageDeliveries(statements, **identity, relays=self.substrate.relays)
            in_flight, reports = MessagesInFlight, MessageReports
        self.handlers = handlers
        self.brokers = BrokerStatements(statements)
        counters = Counters()
        tally = Tally(counters, deliveries.clock, observe)
        meter = None if tracing is None else tracing.meter
        self.shared = shared = Shared(
            settings=settings,
            connections=connections,
            deliveries=deliveries,
            keyed=KeyedDeliveries(
                statements,
                worker=worker,
                generation=settings.generation,
                lease=settings.lease,
                clock=deliveries.clock,
            ),
            subscriptions=SubscriptionStatements(statements),
            flow=FlowStatements(statements),
            held=Held(),
            breakers=Breakers(handlers, observe),
            in_flight=in_flight(),
            counters=counters,
            tally=tally,
            observe=observe,
            reports=reports(tally, observe, settings.generation, meter),
            outages=Outages(observe, connections.address.dsn),
            pulse=Pulse(),
            states=self.lifespans.states,
            tracing=tracing,
        )

        wakeups = Wakeups()
        self.settler = Settler(shared, wakeups)
        self.dispatcher = Dispatcher(shared, self.settler, Judge(redact), handlers, wakeups)
        self.heartbeat = Heartbeat(deliveries, settings, observe, wakeups)
        self.lease_keeper = LeaseKeeper(shared, self.dispatcher, self.heartbeat)
        self.sleeper = Sleeper(connections.sleeper, queries, worker, wakeups.look_again, possible=settings.listen)
        self.listener: Listener | None = None
        if settings.listen:
            self.listener = Listener(shared, queries, worker, wakeups, self.sleeper, self.lease_keeper)
        if self.substrate is not None:
            self.substrate.serve(shared, messages, self.dispatcher, self.settler)
        self.claimer = Claimer(shared, self.dispatcher, handlers, wakeups, self.sleeper, self.heartbeat)

        chores: list[Chore] = [RollupWriter(queries, settings.generation, shared.tally, observe)]
        chores.append(Partitioner(queries, observe, drop=settings.sweep))
        if settings.sweep:
            chores.append(Sweeper(queries, worker, observe))
        introduction = registration(worker, handlers, settings)
        self.name = introduction.name
        self.maintenance = Maintenance(
            connections.maintenance,
            shared.deliveries,
            shared.subscriptions,
            Fleet(queries),
            introduction,
            observe,
            Activity(shared.in_flight, counters),
            shared.outages.of("maintain"),
            chores,
        )
        self.scheduler: Scheduler | None = None
        if registry.schedules:
            schedules = Schedules(statements, settings.generation)
            self.scheduler = Scheduler(
                connections.schedule, schedules, registry.schedules, counters, observe, shared.outages, tracing
            )
