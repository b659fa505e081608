"""What a worker says of its health, from any thread: it reads what the loops have noted, and asks nobody."""

import os

from holdfast.observability.health import Health, ListenerState, State
from holdfast.worker.connections import IDLE_LIMIT
from holdfast.worker.parts import Parts

# Claims take milliseconds; the statements of a database that does not answer are given up later than this.
_CLAIM_PATIENCE = 10.0
# Without LISTEN the worker polls: it delivers, if later.
_DISPENSABLE = frozenset({"listen"})


class HealthReader:
    """Reads the health of one worker."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._settings = parts.shared.settings

    def read(self, state: State) -> Health:
        """The health at this moment, of a worker in this state."""
        parts = self._parts
        beat = parts.heartbeat.sent_for
        return Health(
            state=state,
            not_live=tuple(self._not_live(state)),
            not_ready=tuple(self._not_ready(state)),
            name=parts.name,
            pid=os.getpid(),
            generation=self._settings.generation,
            listener=self._listener(state),
            in_flight=len(parts.shared.in_flight),
            concurrency=parts.dispatcher.concurrency.limit,
            loop_silent_s=None if state in ("new", "stopped") else round(parts.shared.pulse.silent_for, 1),
            heartbeat_s=None if beat is None else round(beat, 1),
        )

    def _not_live(self, state: State) -> list[str]:
        if state == "new":
            return ["it has not been started"]
        if state == "stopped":
            return ["it has stopped"]
        found = []
        parts = self._parts
        silent = parts.shared.pulse.silent_for
        if silent > self._settings.loop_patience:
            handlers = sorted({each.handler.name for each in parts.dispatcher.running() if each.handler.asynchronous})
            running = f"; running: {', '.join(handlers[:5])}" if handlers else ""
            found.append(f"the event loop has been blocked for {silent:.0f} s{running}")
        unsent = parts.lease_keeper.silent_for
        if unsent > self._settings.loop_patience:
            found.append(f"the thread that sends heartbeats has been blocked for {unsent:.0f} s, or has ended")
        return found

    def _not_ready(self, state: State) -> list[str]:
        parts, found = self._parts, []
        if state == "starting":
            found.append("it is starting")
        elif state == "draining":
            found.append("it is draining: it claims nothing, and stops when the running handlers have ended")
        met = parts.shared.outages.met
        faults = [fault for loop, fault in met.items() if loop not in _DISPENSABLE]
        if faults:
            # Each loop meets the outage by itself, later or with another error: the first one stands for all.
            first = min(faults, key=lambda fault: fault.since)
            found.append(f"the database has been away for {first.lasted:.0f} s: {first.error}")
        asking = parts.claimer.asking_for
        # While the event loop is blocked nobody can take an answer, and the database is not to blame for that.
        blocked = parts.shared.pulse.silent_for
        if not faults and asking is not None and asking - blocked > _CLAIM_PATIENCE:
            found.append(f"no claim has succeeded for {asking:.0f} s")
        beat = parts.heartbeat.sent_for
        if not faults and beat is not None and beat > self._settings.lease:
            found.append(f"no heartbeat has passed for {beat:.0f} s, and the lease of the worker has run out")
        if (mismatch := parts.maintenance.schema_mismatch) is not None:
            found.append(mismatch)
        return found

    def _listener(self, state: State) -> ListenerState:
        if not self._settings.listen or state in ("draining", "stopped"):
            return "off"
        sleeper = self._parts.sleeper
        # A loop that is blocked for so long does not notice that the server has ended the session as idle.
        hears = sleeper.hears and self._parts.shared.pulse.silent_for < IDLE_LIMIT
        return "listening" if hears else "connecting" if sleeper.possible else "pooled"
