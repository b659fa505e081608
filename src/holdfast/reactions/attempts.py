"""One run of a reaction. It has no delivery to settle: in a transaction, only the inbox row commits with its writes."""

import asyncio
import contextlib
from collections.abc import Mapping
from functools import partial

from holdfast.context import HandlerContext, current_context
from holdfast.envelope import EventEnvelope
from holdfast.handlers import Handler
from holdfast.handling.runner import HandlerCall, HandlerRunner, commit, limited
from holdfast.handling.sessions import SILENCE, NoConnection, Session
from holdfast.outcome import Done, Outcome
from holdfast.postgres.reactions import ReactionStatements

# What became of a reaction; None: the event was handled before.
Result = Outcome | BaseException | None


class Attempts:
    """Runs each reaction once, within its time limit."""

    def __init__(self, statements: ReactionStatements, runner: HandlerRunner) -> None:
        self._statements = statements
        self._runner = runner

    async def run(self, handler: Handler, event: EventEnvelope, headers: Mapping[str, str]) -> Result:
        """Run the handler in a task of its own. Raises nothing but the cancellation of that task."""
        context = HandlerContext(event.event_id, event.event_id, handler.name, 1, headers, event.trace_context)
        current_context.set(context)
        run = self._runner.run(handler, event, context, _started, partial(self._transact, handler, event))
        try:
            return await (run if handler.transactional else limited(handler, run))
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return error  # the handler has cancelled itself
        except NoConnection as missing:
            return missing.fault
        except BaseException as error:
            return error

    async def _transact(
        self, handler: Handler, event: EventEnvelope, session: Session, call: HandlerCall
    ) -> Outcome | None:
        """BEGIN; write the inbox; handler; COMMIT. Only the handler has a time limit. None: it was handled before."""
        outcome: Outcome | None = None
        enter = partial(self._statements.enter, session, handler.name, event, handler.timeout + SILENCE)
        transaction, unhandled = await session.enter(enter)
        try:
            if unhandled:
                outcome = await limited(handler, call())
            if isinstance(outcome, Done):
                await commit(session, transaction, handler)
            else:
                await transaction.rollback()
            return outcome
        except BaseException:
            with contextlib.suppress(Exception):  # the server does it when the session is terminated
                await transaction.rollback()
            raise


def _started(_in_thread: bool) -> None:
    """Nothing to note: the time limit of a reaction includes the wait for a thread."""
