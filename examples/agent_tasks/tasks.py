"""A task for an agent. Its row is the truth; an event only says that somebody should look at it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import DateTime
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from holdfast import NewEvent
from holdfast.domain_events import RecordsEvents
from holdfast.errors import DomainFault

# The contents of a task are kept for so long after its end; the fact that it existed is kept with the conversation.
RETENTION = timedelta(days=30)


class Base(DeclarativeBase):
    type_annotation_map = {datetime: DateTime(timezone=True), list[Any]: JSONB}  # noqa: RUF012 - SQLAlchemy's way


class Conversation(Base):
    __tablename__ = "conversations"

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    subject: Mapped[str]
    trigger_event_id: Mapped[UUID | None]


class AgentTask(RecordsEvents, Base):
    """awaiting_approval → dispatched → running → done or failed; or refused, or cancelled.

    One that runs is cancelling first: whoever executes it ends it after the step they are at. One whose event has
    become a dead letter is stuck: a replay of the event goes on with it, and a cancellation ends it.
    """

    __tablename__ = "agent_tasks"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    conversation_id: Mapped[UUID]
    trigger_event_id: Mapped[UUID | None]
    kind: Mapped[str]
    status: Mapped[str]
    steps: Mapped[list[Any]]
    transcript: Mapped[list[Any]]
    result: Mapped[str | None]
    decided_by: Mapped[str | None]
    created_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]
    forgotten_at: Mapped[datetime | None]

    @classmethod
    def request(
        cls, conversation: Conversation, kind: str, steps: list[dict[str, Any]], *, approval: bool = True
    ) -> AgentTask:
        """A new task: one that a person has to approve waits for that, any other is dispatched."""
        task = cls(
            id=uuid4(),
            conversation_id=conversation.id,
            trigger_event_id=conversation.trigger_event_id,
            kind=kind,
            status="awaiting_approval",
            steps=steps,
            transcript=[],
            created_at=datetime.now(UTC),
        )
        if approval:
            task._tell("agent.task.requested")
        else:
            task._dispatch()
        return task

    # --- people ---

    def approve(self, by: str) -> None:
        self._require("awaiting_approval")
        self.decided_by = by
        self._dispatch()

    def refuse(self, by: str) -> None:
        self._require("awaiting_approval")
        self.decided_by = by
        self._end("refused", None)

    def cancel(self, by: str) -> None:
        """At once, unless somebody works on it: then they stop after the step they are at."""
        self._require("awaiting_approval", "dispatched", "running", "stuck")
        self.decided_by = by
        if self.status == "running":
            self.status = "cancelling"
        else:
            self._end("cancelled", None)

    # --- the worker ---

    def begin(self) -> bool:
        """Whether there is something to do: not when it was cancelled, or ended in an earlier delivery."""
        if self.status in ("dispatched", "stuck"):
            self.status, self.result = "running", None
        elif self.status == "cancelling":
            self._end("cancelled", None)
        return self.status == "running"  # also when a worker died of it: its steps are in the transcript

    def advance(self, line: str) -> bool:
        """A step is done. Whether to go on."""
        self.transcript = [*self.transcript, line]
        return self.begin()

    def finish(self) -> None:
        if self.begin():
            self._end("done", self.transcript[-1] if self.transcript else "nothing to do")

    def fail(self, why: str) -> None:
        if self.begin():
            self._end("failed", why)

    def stick(self, why: str) -> None:
        """Nobody works on it any more, and nobody will by itself."""
        if self.status == "cancelling":
            self._end("cancelled", None)
        elif self.status in ("dispatched", "running"):
            self.status, self.result = "stuck", why
            self._tell("agent.task.stuck")

    def forget(self) -> None:
        """Retention: what it was about goes, that it was stays."""
        if self.finished_at is not None:
            self.steps, self.transcript, self.result = [], [], None
            self.forgotten_at = datetime.now(UTC)

    # --- events ---

    def _dispatch(self) -> None:
        self.status = "dispatched"
        self._tell("agent.task.dispatched")

    def _end(self, status: str, result: str | None) -> None:
        self.status, self.result, self.finished_at = status, result, datetime.now(UTC)
        self._tell("agent.task.finished")
        self._tell("agent.task.expired", delay=RETENTION)

    def _tell(self, event_type: str, **options: Any) -> None:
        self.record(NewEvent(event_type, {"agent_task_id": str(self.id)}, domain_id=self.id, **options))

    def _require(self, *statuses: str) -> None:
        if self.status not in statuses:
            raise DomainFault(f"task {self.id} is {self.status}, not {' or '.join(statuses)}")
