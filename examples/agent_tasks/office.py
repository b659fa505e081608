"""Who does what when. The worker runs these, except for the one reaction that stays in the process."""

from collections.abc import Callable
from uuid import UUID

import asyncpg
from pydantic import BaseModel
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from examples.agent_tasks.tasks import AgentTask, Conversation
from examples.agent_tasks.tools import ToolFault, use
from holdfast import EventEnvelope, HandlerRegistry, Publisher, Reactions
from holdfast.errors import NotFoundFault
from holdfast.integrations.sqlalchemy import DomainEvents


class Dispute(BaseModel):
    order_id: str
    cents: int


class TaskRef(BaseModel):
    """All that an event says of a task."""

    agent_task_id: UUID


class Office:
    """Sessions that publish what is recorded on tasks, and the handlers of the events that come of it."""

    def __init__(self, dsn: str, *, notify: Callable[[str], object]) -> None:
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
        add("agents.execute", ("agent.task.dispatched",), self.execute, timeout=3600)
        add("conversations.post_result", ("agent.task.finished",), self.post_result)
        add("agents.forget", ("agent.task.expired",), self.forget)

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

    async def forget(self, event: EventEnvelope, payload: TaskRef) -> None:
        async with self.sessions.begin() as session:
            (await _load(session, payload, lock=True)).forget()


async def _load(session: AsyncSession, payload: TaskRef, *, lock: bool = False) -> AgentTask:
    task = await session.get(AgentTask, payload.agent_task_id, with_for_update=lock)
    if task is None:
        raise NotFoundFault(f"there is no task {payload.agent_task_id}")
    return task
