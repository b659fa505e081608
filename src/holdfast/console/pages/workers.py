"""Workers: who serves what, and who was not heard of?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from starlette.responses import Response

from holdfast.console.actions import Action, Done, Question, forced, pages_of, text_of, typed
from holdfast.console.formatting import count, duration, plural
from holdfast.console.page import Call, Page
from holdfast.errors import ConfigurationError, NotFound
from holdfast.operator import Operator, Status, WorkerStatus


class WorkersFeed:
    """The live list."""

    def normal(self, argument: str) -> str | None:
        """It is one for all."""
        return None if argument else ""

    async def read(self, operator: Operator, argument: str, before: Any) -> Status:
        """Read the status, which has the workers."""
        return await operator.status()

    def fragments(self, value: Status) -> Mapping[str, tuple[str, dict[str, Any]]]:
        """Return the list, and the sentence about it."""
        return {f"workers-{name}": (f"workers/{name}.html", _shown(value)) for name in ("line", "list")}


async def show(call: Call) -> Response:
    """Show the workers that have not stopped."""
    snapshot = await call.console.hub.latest("workers")
    return call.render(
        "workers.html",
        active="workers",
        title="Workers",
        cli="holdfast workers list",
        feed="workers",
        snapshot=snapshot,
        **_shown(snapshot.value),
    )


async def show_one(call: Call) -> Response:
    """Show one worker, and what it serves."""
    async with call.operator() as operator:
        worker = await _worker(operator, call.request.path_params["id"])
    return call.render(
        "worker.html",
        active="workers",
        title=worker.name,
        worker=worker,
        sentence=_sentence(worker),
        cli="holdfast workers list" if worker.living else f'holdfast workers release {worker.id} --reason "…"',
    )


def _shown(status: Status) -> dict[str, Any]:
    workers: Sequence[WorkerStatus] = status.workers
    living = [each for each in workers if each.living]
    silent = [each for each in workers if not each.living]
    if not workers:
        line = "No worker is running."
    else:
        line = f"{plural(len(living), 'worker lives', 'workers live')}"
        line += f"; {plural(len(silent), 'is', 'are')} silent." if silent else ", and each was heard of in time."
    if status.unserved:
        line += f" {plural(status.unserved_channels, 'channel has', 'channels have')} events and no living worker."
    return {"workers": workers, "line": line, "left_out": status.workers.left_out, "unserved": status.unserved}


def _sentence(worker: WorkerStatus) -> str:
    if worker.living:
        return f"It lives: heard of {duration(worker.silent_for)} ago."
    return f"It is silent for {duration(worker.silent_for)}. What it holds is due again when its leases end."


async def _worker(operator: Operator, id: str) -> WorkerStatus:
    try:
        asked = UUID(id)
    except ValueError:
        raise ConfigurationError("worker", "is not an id", "open one from the list of workers") from None
    for each in await operator.workers.all():
        if each.id == asked:
            return each
    raise NotFound(
        "worker", f"{asked} is unknown", "it has stopped, or was silent for an hour; see the list of workers"
    )


async def _ask_release(call: Call, operator: Operator) -> Question:
    id, force = text_of(call, "worker"), forced(call)
    worker = await _worker(operator, id)
    found = await operator.workers.release(worker.id, force=force, dry_run=True)
    return Question(
        title=f"Release what {worker.name} holds?",
        subject=str(worker.id),
        facts=[
            ("Releases", f"{plural(found.released, 'event')}, whose attempts are not counted"),
            ("The worker", "leaves the list, until it is heard of again" if found.unlisted else "stays in the list"),
            *(
                [("Beware", "it lives: its handlers would run beside those of the next worker")]
                if worker.living
                else []
            ),
        ],
        button=f"Release {count(found.released)}",
        command=f'holdfast workers release {worker.id}{" --force" if force else ""} --reason "…"',
        back=f"/workers/{worker.id}",
        danger=worker.living,
        typed=typed(found.released, force=force),
    )


async def _release(call: Call, operator: Operator, reason: str | None) -> Done:
    done = await operator.workers.release(text_of(call, "worker"), force=forced(call), reason=reason)
    left = f"; {count(done.left)} are still locked by a transaction" if done.left else ""
    said = f"{plural(done.released, 'event')} released{left}."
    return Done(path="/workers", said=said, feeds=("workers", "overview"))


PAGES = (
    Page("/workers", "workers", get=show),
    Page("/workers/{id}", "worker", get=show_one, example="worker"),
    *pages_of(Action(name="workers.release", active="workers", ask=_ask_release, act=_release, can_force=True)),
)
