"""What the loops of one worker share."""

from dataclasses import dataclass

from holdfast.lifespan import States
from holdfast.postgres.deliveries import Deliveries
from holdfast.postgres.subscriptions import SubscriptionStatements
from holdfast.settings import WorkerSettings
from holdfast.telemetry import Counters, Observer
from holdfast.worker.connections import Connections
from holdfast.worker.in_flight import InFlight
from holdfast.worker.outage import Outages
from holdfast.worker.tally import Tally


@dataclass(frozen=True, slots=True)
class Shared:
    """One value for every loop: its settings, the database, the deliveries in flight, and where it reports."""

    settings: WorkerSettings
    connections: Connections
    deliveries: Deliveries
    subscriptions: SubscriptionStatements
    in_flight: InFlight
    counters: Counters
    tally: Tally
    observe: Observer
    outages: Outages
    states: States  # of the lifespans of handlers
