"""What the loops of one worker share."""

from dataclasses import dataclass

from holdfast.lifespan import States
from holdfast.observing import ObserverGroup
from holdfast.postgres.deliveries import Deliveries
from holdfast.postgres.flow import FlowStatements
from holdfast.postgres.keyed import KeyedDeliveries
from holdfast.postgres.subscriptions import SubscriptionStatements
from holdfast.settings import WorkerSettings
from holdfast.telemetry import Counters
from holdfast.tracing import Tracing
from holdfast.worker.breakers import Breakers
from holdfast.worker.connections import Connections
from holdfast.worker.held import Held
from holdfast.worker.in_flight import InFlight
from holdfast.worker.outage import Outages
from holdfast.worker.pulse import Pulse
from holdfast.worker.reports import Reports
from holdfast.worker.tally import Tally


@dataclass(frozen=True, slots=True)
class Shared:
    """One value for every loop: its settings, the database, the deliveries in flight, and where it reports."""

    settings: WorkerSettings
    connections: Connections
    deliveries: Deliveries
    keyed: KeyedDeliveries
    subscriptions: SubscriptionStatements
    flow: FlowStatements
    held: Held
    breakers: Breakers
    in_flight: InFlight
    counters: Counters
    tally: Tally
    observe: ObserverGroup
    reports: Reports
    outages: Outages
    pulse: Pulse
    states: States  # of the lifespans of handlers
    tracing: Tracing | None
