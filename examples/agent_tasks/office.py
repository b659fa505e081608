"""Who does what when. The worker runs these, except for the two reactions that stay in the process."""

from collections.abc import Callable
from datetime import timedelta
from uuid import UUID

import asyncpg
from pydantic import BaseModel
from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from examples.agent_tasks.tasks import AgentTask, Conversation
from examples.agent_tasks.tools import ToolFault, use
from holdfast import EventEnvelope, HandlerRegistry, Publisher, Reactions
from holdfast.errors import NotFoundFault
from holdfast.integrations.sqlalchemy import DomainEvents

# Tasks that are under way, and whose event has failed for good: by its error, or because workers died of it.
_ABANDONED = text("""
    SELECT t.id, coalesce(o.last_error, o.failure_reason) FROM core.my_outbox o JOIN agent_tasks t ON t.id = o.domain_id
    WHERE o.source = 'agents' AND o.event_type = 'agent.task.dispatched'
      AND o.failed_at IS NOT NULL AND o.deleted_at IS NULL AND t.status IN ('dispatched', 'running', 'cancelling')
""")


class Dispute(BaseModel):
    order_id: str
    cents: int


class TaskRef(BaseModel):
    """All that an event says of a task."""

    agent_task_id: UUID


class Office:
    """Sessions that publish what is recorded on tasks, and the handlers of the events that come of it."""

    def __init__(self, dsn: str, *, notify: Callable[[str], object], rounds: timedelta = timedelta(seconds=30)) -> None:
        self.registry = HandlerRegistry()
        self.reactions = Reactions(dsn, self.registry)
        self._engine = create_async_engine(dsn.replace("postgresql://", "postgresql+asyncpg://", 1))
        self.sessions = async_sessionmaker(self._engine, expire_on_commit=False)
        DomainEvents(Publisher("agents"), self.reactions).attach(self.sessions)
        self._notify = notify
        add = self.registry.add
        add("agents.open_conversation", ("order.disputed",), self.open_conversation)
        # A reminder for somebody who looks at the list anyway: lost with the process, it is no harm.
        add("agents.ask_for_approval", ("agent.task.requested",), self.ask_for_approval, via="in_process")
        add("agents.ask_for_help", ("agent.task.stuck",), self.ask_for_help, via="in_process")
        add("agents.execute", ("agent.task.dispatched",), self.execute, timeout=3600)
        add("conversations.post_result", ("agent.task.finished",), self.post_result)
        add("agents.forget", ("agent.task.expired",), self.forget)
        self.registry.schedule("agent.round.due", name="agents.round", every=rounds, missed="skip")
        add("agents.look_after", ("agent.round.due",), self.look_after)

    async def close(self) -> None:
        await self._engine.dispose()

    async def open_conversation(self, event: EventEnvelope, payload: Dispute) -> None:
        """Nobody has asked for this conversation: the event has, and it names the event."""
        async with self.sessions.begin() as session:
            known = select(Conversation).where(Conversation.trigger_event_id == event.event_id)
            if await session.scalar(known) is not None:
                return  # an earlier delivery
            conversation = Conversation(subject=f"order {payload.order_id}", trigger_event_id=event.event_id)
            session.add(conversation)
            await session.flush()
            steps = [{"look_up": payload.order_id}, {"refund": payload.cents, "order": payload.order_id}]
            session.add(AgentTask.request(conversation, "refund", steps))

    async def ask_for_approval(self, event: EventEnvelope, payload: TaskRef) -> None:
        async with self.sessions() as session:
            task = await _load(session, payload)
            self._notify(f"waits for approval: {task.kind} {task.id}")

    async def ask_for_help(self, event: EventEnvelope, payload: TaskRef) -> None:
        async with self.sessions() as session:
            task = await _load(session, payload)
            self._notify(f"is stuck: {task.kind} {task.id}: {task.result}")

    async def execute(self, event: EventEnvelope, payload: TaskRef) -> None:
        """One transaction before, between and after the steps, and none open while a tool works.

        A worker that dies in between leaves its row at the step it had reached, and the event comes back.
        """
        async with self.sessions.begin() as session:
            task = await _load(session, payload, lock=True)
            if not task.begin():
                return
            steps, reached = task.steps, len(task.transcript)
        for number, step in enumerate(steps[reached:], reached):
            try:
                line = await use(step, f"task:{payload.agent_task_id}:{number}")
            except ToolFault as fault:
                async with self.sessions.begin() as session:
                    (await _load(session, payload, lock=True)).fail(str(fault))
                return
            async with self.sessions.begin() as session:
                if not (await _load(session, payload, lock=True)).advance(line):
                    return
        async with self.sessions.begin() as session:
            (await _load(session, payload, lock=True)).finish()

    async def post_result(self, event: EventEnvelope, payload: TaskRef, tx: asyncpg.Connection) -> None:
        """Back into the conversation, exactly once: the message and the delivery commit together."""
        await tx.execute(
            """
            INSERT INTO messages (conversation_id, agent_task_id, author, text)
            SELECT conversation_id, id, 'agent', kind || ' ' || status || coalesce(': ' || result, '')
            FROM agent_tasks WHERE id = $1
            """,
            payload.agent_task_id,
        )

    async def look_after(self, event: EventEnvelope) -> None:
        """A dead letter says nothing to its task: whoever handled it is gone. So somebody looks, now and then."""
        async with self.sessions() as session:
            found = (await session.execute(_ABANDONED)).all()
        for task_id, why in found:
            async with self.sessions.begin() as session:
                (await _load(session, TaskRef(agent_task_id=task_id), lock=True)).stick(why)

    async def forget(self, event: EventEnvelope, payload: TaskRef) -> None:
        async with self.sessions.begin() as session:
            (await _load(session, payload, lock=True)).forget()


async def _load(session: AsyncSession, payload: TaskRef, *, lock: bool = False) -> AgentTask:
    task = await session.get(AgentTask, payload.agent_task_id, with_for_update=lock)
    if task is None:
        raise NotFoundFault(f"there is no task {payload.agent_task_id}")
    return task
