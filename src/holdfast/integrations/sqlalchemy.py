"""Domain events of SQLAlchemy aggregates, published in the transaction that stores the aggregates.

    Session = async_sessionmaker(engine)
    DomainEvents(Publisher("shop"), reactions).attach(Session)

    async with Session.begin() as session:
        order = await session.get(Order, order_id)
        order.place()                  # records order.placed, see holdfast.domain_events

Events follow the object they were recorded on: they are written before its commit, in the order of recording; a
rollback, also of a savepoint, discards them; an object that is expunged keeps them. After the commit, the reactions
registered with `via="in_process"` run.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any, Final, Union
from weakref import WeakKeyDictionary

from pydantic_core import from_json

from holdfast.installing import require_extra

require_extra("sqlalchemy", "sqlalchemy")

from sqlalchemy import Connection, Engine, event
from sqlalchemy import inspect as state_of
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, SessionTransaction, object_session, scoped_session, sessionmaker

from holdfast.checks import instance
from holdfast.domain_events import Recorded, forget, position, recorded_on, watchers
from holdfast.envelope import EventEnvelope
from holdfast.errors import ConfigurationError, FieldError
from holdfast.new_event import NewEvent
from holdfast.postgres.publisher import Publisher
from holdfast.reactions.reactions import Reactions

Target = Union[
    "sessionmaker[Any]",
    "async_sessionmaker[Any]",
    "scoped_session[Any]",
    "async_scoped_session[Any]",
    Session,
    AsyncSession,
    type[Session],
]

_Batch = list[tuple[Recorded, NewEvent]]

_KEY: Final = "holdfast.events"


@dataclass(slots=True)
class _Ledger:
    """The recorded events of one session."""

    held: dict[int, object] = field(default_factory=dict)  # aggregates with events, kept from garbage collection
    begun: WeakKeyDictionary[SessionTransaction, int] = field(default_factory=WeakKeyDictionary)  # savepoints
    committed: SessionTransaction | None = None  # the last transaction or savepoint that was committed
    written: dict[int, tuple[EventEnvelope, dict[str, str]] | None] = field(default_factory=dict)
    pending_commits: int = 0  # requested while a savepoint was open, and not finished

    def of(self, session: Session) -> list[object]:
        """Return the aggregates that still belong to the session."""
        self.held = {key: each for key, each in self.held.items() if object_session(each) is session}
        return list(self.held.values())


class DomainEvents:
    """Publishes the events recorded on the aggregates of sessions, and hands them to in-process reactions."""

    def __init__(self, publisher: Publisher, reactions: Reactions | None = None) -> None:
        self._publisher = instance("publisher", publisher, Publisher, 'pass Publisher("shop")')
        if reactions is not None:
            instance("reactions", reactions, Reactions, "pass Reactions(dsn, registry)")
        self._reactions = reactions

    def attach(self, target: Target) -> None:
        """Publish for the sessions of a factory, for a class of sessions, or for a single session."""
        listened = _sync(target)
        if event.contains(listened, "before_commit", self._before_commit):
            raise ConfigurationError("target", "is attached already", "attach each factory once")
        event.listen(listened, "before_commit", self._before_commit)
        event.listen(listened, "after_commit", self._after_commit)
        event.listen(listened, "after_attach", _attached)
        event.listen(listened, "after_transaction_create", _begun)
        event.listen(listened, "after_transaction_end", self._ended)
        if isinstance(listened, Session):
            for aggregate in listened:
                _attached(listened, aggregate)

    # --- writing --------------------------------------------------------------------------------------

    def _before_commit(self, session: Session) -> None:
        if session.in_nested_transaction():
            _ledger(session).pending_commits += 1  # of the savepoint, or of the whole transaction
        else:
            self._publish(session)

    def _ended(self, session: Session, transaction: SessionTransaction) -> None:
        """Discard the events of a transaction or savepoint that ended without a commit.

        Objects that the rollback removes from the session keep their events.
        """
        if transaction.parent is not None and not transaction.nested:
            return  # the transaction of a flush
        ledger = _ledger(session)
        since = ledger.begun.pop(transaction, 0)
        if transaction is not ledger.committed:
            ledger.pending_commits = 0
            for aggregate in ledger.of(session):
                forget(aggregate, lambda each: each.position > since)
        if transaction.parent is None:
            ledger.written.clear()
            ledger.committed = None
        elif ledger.pending_commits and not session.in_nested_transaction():
            # The whole transaction is being committed, and SQLAlchemy calls no further hook for it.
            ledger.pending_commits = 0
            self._publish(session)

    def _publish(self, session: Session) -> None:
        ledger = _ledger(session)
        session.flush()  # whose hooks may record events
        found = [
            (each, aggregate)
            for aggregate in ledger.of(session)
            for each in recorded_on(aggregate)
            if each.position not in ledger.written
        ]
        found.sort(key=lambda pair: pair[0].position)
        batches: dict[Connection, _Batch] = {}
        for recorded, aggregate in found:
            new, mapper = recorded.event(), state_of(aggregate).mapper
            self._require_reactable(new, session.get_bind(mapper))
            connection = session.connection(bind_arguments={"mapper": mapper})
            batches.setdefault(connection, []).append((recorded, new))
        for connection, batch in batches.items():
            for part in _parts(batch):
                trace_context = self._write(connection, [new for _, new in part])
                ledger.written.update(
                    {recorded.position: self._for_reactions(new, trace_context) for recorded, new in part}
                )

    def _write(self, connection: Connection, events: list[NewEvent]) -> str | None:
        """Publish the events; return the trace context of those that have none of their own."""
        if len(events) == 1:
            return self._publisher.publish_event(connection, events[0]).trace_context
        rows = self._publisher.publish_rows(connection, events)
        own = (row.trace_context for row, new in zip(rows, events, strict=True) if new.trace_context is None)
        return next(own, None)

    # --- reacting -------------------------------------------------------------------------------------

    def _require_reactable(self, new: NewEvent, bind: Engine | Connection) -> None:
        """Refuse an event without a possible reaction before the commit: afterwards no caller could get the error."""
        if self._reactions is None or not (handlers := self._reactions.wanted(new.event_type, new.target)):
            return
        self._reactions.require_open()
        if isinstance(bind, Connection):
            raise ConfigurationError(
                "session",
                f"is bound to a connection, and {handlers[0].name} reacts in process to its commit, while the "
                "connection's own transaction goes on",
                'bind the session to an engine, or register the handler with via="outbox"',
            )
        for name in ("delay", "available_at", "key"):
            if getattr(new, name) is not None:
                raise FieldError(
                    name,
                    f"is given for {new.event_type}, to which {handlers[0].name} reacts in process, at once",
                    'register the handler with via="outbox"',
                )

    def _for_reactions(self, new: NewEvent, trace_context: str | None) -> tuple[EventEnvelope, dict[str, str]] | None:
        if self._reactions is None or not self._reactions.wanted(new.event_type, new.target):
            return None
        row = self._publisher.row_of(new)
        envelope = EventEnvelope(
            event_id=row.id,
            event_type=row.event_type,
            event_version=row.event_version,
            occurred_at=row.occurred_at,
            source=row.source,
            target=row.target,
            domain_id=row.domain_id,
            payload=from_json(row.payload),
            idempotency_key=row.idempotency_key,
            trace_context=new.trace_context or trace_context,
        )
        return envelope, from_json(row.headers) if row.headers else {}

    def _after_commit(self, session: Session) -> None:
        ledger = _ledger(session)
        ledger.committed = session.get_nested_transaction() or session.get_transaction()
        if session.in_nested_transaction():
            ledger.pending_commits -= 1
            return
        for aggregate in ledger.held.values():
            forget(aggregate, lambda each: each.position in ledger.written)
        # Events recorded after `_publish`, before the same commit, are for the next commit.
        ledger.held = {key: each for key, each in ledger.held.items() if recorded_on(each)}
        written, ledger.written = ledger.written, {}  # so that a factory attached twice reacts once
        for published in written.values():
            if published is not None and self._reactions is not None:
                # Closed in the meantime: the process is ending, and the event stays in the outbox.
                with contextlib.suppress(ConfigurationError):
                    self._reactions.react(*published)


def _parts(batch: _Batch) -> list[_Batch]:
    """Split a batch for publishing: all at once, or one by one if an event has a key, which is looked up first."""
    return [batch] if all(new.key is None for _, new in batch) else [[each] for each in batch]


def _ledger(session: Session) -> _Ledger:
    ledger: _Ledger = session.info.setdefault(_KEY, _Ledger())
    return ledger


def _sync(target: Any) -> Any:
    """Return the target that accepts SQLAlchemy's event listeners: the synchronous part of an asynchronous one."""
    if isinstance(target, async_scoped_session):
        target = target.session_factory
    if isinstance(target, async_sessionmaker):
        given = target.kw.get("sync_session_class") or target.class_.sync_session_class
        own = type(given.__name__, (given,), {})  # not the class that other factories share
        target.configure(sync_session_class=own)
        return own
    if isinstance(target, AsyncSession):
        return target.sync_session
    if isinstance(target, sessionmaker | scoped_session | Session) or (
        isinstance(target, type) and issubclass(target, Session)
    ):
        return target
    raise ConfigurationError(
        "target", f"is {type(target).__name__}", "attach a sessionmaker, an async_sessionmaker or a session"
    )


# --- hooks of sessions and aggregates ------------------------------------------------------------------------


def _hold(aggregate: object) -> None:
    state = state_of(aggregate, raiseerr=False)
    session = None if state is None else state.session
    if session is not None and _KEY in session.info:  # otherwise nothing would ever release it
        _ledger(session).held[id(aggregate)] = aggregate


watchers.append(_hold)


def _attached(session: Session, aggregate: object) -> None:
    ledger = _ledger(session)
    if recorded_on(aggregate):
        ledger.held[id(aggregate)] = aggregate


def _begun(session: Session, transaction: SessionTransaction) -> None:
    ledger = _ledger(session)
    if transaction.nested:
        ledger.begun[transaction] = position()
