"""Faults that tests inject behind handlers: each happens once, to the next event of one handler."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import TYPE_CHECKING, Any
from uuid import UUID

from holdfast.context import current_context
from holdfast.handlers import Handler, HandlerRegistry
from holdfast.handling.handler_transaction import HandlerTransaction
from holdfast.postgres.delivery import Delivery
from holdfast.worker.batch_transactions import BatchTransactions
from holdfast.worker.draining import Drainer
from holdfast.worker.transactions import Transactions

if TYPE_CHECKING:
    from holdfast.testing.delivering import Delivering


@dataclass
class Fault(ABC):
    """A fault that happens after a handler has done its work, and before the worker has settled the delivery."""

    handler: str
    met: bool = field(default=False, init=False)
    event_id: UUID | None = field(default=None, init=False)  # the event to which the fault has begun to happen

    @property
    def over(self) -> bool:
        """Whether the fault has happened completely."""
        return self.met and self.event_id is None

    @abstractmethod
    async def strike(self, delivering: Delivering, event_id: UUID) -> None:
        """Do the damage. The handler has done its work; it returns to the worker after this."""

    def __str__(self) -> str:
        return f"{type(self).__name__} after {self.handler}"


class Crash(Fault):
    """The process of the worker is killed."""

    async def strike(self, delivering: Delivering, event_id: UUID) -> None:
        delivering.kill_worker()
        await asyncio.Future()  # a killed process does nothing more


class LostLease(Fault):
    """The lease expires, and another worker delivers meanwhile."""

    async def strike(self, delivering: Delivering, event_id: UUID) -> None:
        async with delivering.claims_stopped:  # or this worker would be the other one
            await delivering.expire_leases(self.handler)
            async with delivering.other_worker() as other:
                await other.deliver()


class Duplicate(Fault):
    """The settlement is lost, and the event is delivered again."""

    async def strike(self, delivering: Delivering, event_id: UUID) -> None:
        await delivering.lose_settlement(self.handler, event_id)
        self.event_id = event_id


class LostAnswer(Fault):
    """The transaction that settles the delivery is committed, and the connection breaks before the answer arrives."""

    async def strike(self, delivering: Delivering, event_id: UUID) -> None:
        self.event_id = event_id  # the commit follows

    def lose(self, event_id: UUID) -> bool:
        """Return whether the answer about this event is lost now: once."""
        if self.event_id != event_id:
            return False
        self.event_id = None
        return True


class StruckRegistry(HandlerRegistry):
    """The handlers of a registry, with faults behind some of them."""

    def __init__(self, registry: HandlerRegistry, delivering: Delivering, faults: Sequence[Fault]) -> None:
        super().__init__()
        self.include(registry)
        for fault in faults:
            if not fault.met and fault.handler in self:
                self._handlers[fault.handler] = _struck(self._handlers[fault.handler], fault, delivering)


def _struck(handler: Handler, fault: Fault, delivering: Delivering) -> Handler:
    loop = asyncio.get_running_loop()

    def first(given: Any) -> UUID | None:
        """Return the id of the event, or of the first one of a batch, if the fault is to happen to it."""
        context = current_context.get()
        if fault.met or (context is None and not isinstance(given, list)):
            return None
        fault.met = True
        event_id: UUID = given[0].event_id if context is None else context.event_id
        return event_id

    def struck(function: Callable[..., Any]) -> Callable[..., Any]:
        if handler.asynchronous:

            @wraps(function)
            async def run(given: Any, **extras: Any) -> Any:
                result = await function(given, **extras)
                if (event_id := first(given)) is not None:
                    await fault.strike(delivering, event_id)
                return result
        else:

            @wraps(function)
            def run(given: Any, **extras: Any) -> Any:
                result = function(given, **extras)
                if (event_id := first(given)) is not None:
                    delivering.strike_from_thread(fault, event_id, loop)
                return result

        return run

    batch = None if handler.batch is None else replace(handler.batch, function=struck(handler.batch.function))
    return replace(handler, function=struck(handler.function), batch=batch)


def stop_claims(worker: Drainer, stopped: asyncio.Lock) -> None:
    """Let a worker claim nothing while the lock is held."""

    def stoppable(claim: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def claiming(*arguments: Any, **options: Any) -> Any:
            async with stopped:
                return await claim(*arguments, **options)

        return claiming

    deliveries, keyed = worker.parts.shared.deliveries, worker.parts.shared.keyed
    for owner, name in ((deliveries, "claim"), (keyed, "claim_ordered"), (keyed, "claim_fair")):
        setattr(owner, name, stoppable(getattr(owner, name)))


@contextlib.contextmanager
def answers_lost(worker: Drainer, faults: Sequence[LostAnswer]) -> Iterator[None]:
    """Break the connection after the commit for which a `LostAnswer` waits, in any library."""
    if not faults:
        yield
        return
    deliveries = worker.parts.shared.deliveries
    settle = deliveries.deliver

    async def settling(connection: Any, batch: Sequence[Delivery], *more: Any, **options: Any) -> Any:
        answer = await settle(connection, batch, *more, **options)
        if any(fault.lose(each.event_id) for fault in faults for each in batch):
            connection.terminate()
            raise ConnectionResetError("the answer was lost")
        return answer

    def losing(conduct: Callable[..., Any]) -> Callable[..., Any]:
        async def conducting(self: object, delivered: Delivery | Sequence[Delivery], *more: Any) -> Any:
            transaction: HandlerTransaction = more[-2]
            commit = transaction.commit

            async def committing(handler: Handler) -> None:
                await commit(handler)
                batch = [delivered] if isinstance(delivered, Delivery) else delivered
                if any(fault.lose(each.event_id) for fault in faults for each in batch):
                    transaction.terminate()
                    raise ConnectionResetError("the answer was lost")

            transaction.commit = committing  # type: ignore[method-assign]
            return await conduct(self, delivered, *more)

        return conducting

    conducts: list[tuple[Any, Any]] = [(each, each._conduct) for each in (Transactions, BatchTransactions)]
    deliveries.deliver = settling  # type: ignore[method-assign]
    for kind, conduct in conducts:
        kind._conduct = losing(conduct)
    try:
        yield
    finally:
        deliveries.deliver = settle  # type: ignore[method-assign]
        for kind, conduct in conducts:
            kind._conduct = conduct
