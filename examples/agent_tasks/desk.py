"""What people do with tasks. Nothing here publishes: the task says what happened, and its commit does the rest."""

from typing import Literal
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from examples.agent_tasks.tasks import AgentTask
from holdfast.errors import NotFoundFault

Sessions = async_sessionmaker[AsyncSession]
Decision = Literal["approve", "refuse", "cancel"]


async def decide(sessions: Sessions, task_id: UUID, decision: Decision, by: str) -> AgentTask:
    """Approve, refuse or cancel a task. A decision that comes too late is refused itself."""
    async with sessions.begin() as session:
        task = await session.get(AgentTask, task_id, with_for_update=True)
        if task is None:
            raise NotFoundFault(f"there is no task {task_id}")
        {"approve": task.approve, "refuse": task.refuse, "cancel": task.cancel}[decision](by)
        return task


async def waiting(
    sessions: Sessions, status: Literal["awaiting_approval", "stuck"] = "awaiting_approval"
) -> list[AgentTask]:
    """What somebody has to look at, the oldest first."""
    async with sessions() as session:
        query = select(AgentTask).where(AgentTask.status == status).order_by(AgentTask.created_at)
        return list(await session.scalars(query))


async def find(sessions: Sessions, task_id: UUID) -> AgentTask:
    async with sessions() as session:
        return await session.get_one(AgentTask, task_id)
