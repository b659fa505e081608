"""Schedules: when next, and did the last one fire?"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.responses import Response

from holdfast.access.principal import Role
from holdfast.characters import shell_word
from holdfast.console.actions import Action, Done, Question, pages_of, text_of
from holdfast.console.formatting import ago, plural
from holdfast.console.page import Call, Page
from holdfast.operator import Operator, ScheduleStatus

STATES = {
    "waiting": ("delivered", "Waiting"),
    "paused": ("paused", "Paused"),
    "overdue": ("failed", "Overdue"),
    "unserved": ("warning", "No worker declares it"),
}
_WORDS = {
    "pause": ("Pause", "slots that come while it is paused are not fired, also not later"),
    "resume": ("Resume", "it fires from its next slot on"),
}


async def show(call: Call) -> Response:
    """Show all schedules."""
    async with call.operator() as operator:
        found = await operator.schedules.all()
    return call.render(
        "schedules.html",
        active="schedules",
        title="Schedules",
        schedules=found,
        states=STATES,
        sentence=_sentence(call, found),
        cli="holdfast schedules list",
    )


async def show_one(call: Call) -> Response:
    """Show one schedule, with its next slots."""
    name = call.request.path_params["name"]
    async with call.operator() as operator:
        found = await operator.schedules.detail(name)
    return call.render(
        "schedule.html",
        active="schedules",
        title=name,
        schedule=found.schedule,
        upcoming=found.upcoming,
        states=STATES,
        cli=f"holdfast schedules show {shell_word(name)}",
    )


def _sentence(call: Call, found: Sequence[ScheduleStatus]) -> str:
    if not found:
        return "No schedule is declared."
    late = [each.name for each in found if each.state == "overdue"]
    if late:
        return f"{plural(len(late), 'schedule is', 'schedules are')} overdue: {', '.join(late[:3])}."
    coming = [(each.next_slot, each.name) for each in found if each.next_slot is not None and each.paused_at is None]
    following = f" The next is {min(coming)[1]}, {ago(min(coming)[0], call.now)}." if coming else ""
    unserved = sum(each.state == "unserved" for each in found)
    trouble = f" {plural(unserved, 'is', 'are')} declared by no living worker, and will not fire." if unserved else ""
    return f"{plural(len(found), 'schedule')}, none overdue.{trouble}{following}"


async def _ask_trigger(call: Call, operator: Operator) -> Question:
    name = text_of(call, "schedule")
    found = (await operator.schedules.detail(name)).schedule
    await operator.schedules.trigger(name, dry_run=True)
    return Question(
        title=f"Trigger {name} now?",
        facts=[
            ("Publishes", f"one {found.event_type} from {found.source}, in addition to its slots"),
            ("Its slots", "stay as they are"),
        ],
        button=f"Trigger {name}",
        command=f'holdfast schedules trigger {shell_word(name)} --reason "…"',
        back=f"/schedules/{name}",
    )


async def _trigger(call: Call, operator: Operator, reason: str | None) -> Done:
    name = text_of(call, "schedule")
    event = await operator.schedules.trigger(name, reason=reason)
    return Done(path=f"/events/{event}", said=f"{name} was triggered: this is its event.")


def _turning(verb: str) -> Action:
    word, effect = _WORDS[verb]

    async def ask(call: Call, operator: Operator) -> Question:
        name = text_of(call, "schedule")
        change = await getattr(operator.schedules, verb)(name, dry_run=True)
        found = (await operator.schedules.detail(name)).schedule
        return Question(
            title=f"{word} {name}?",
            facts=[("Effect", effect), ("When", found.when)],
            button=f"{word} {name}",
            command=f'holdfast schedules {verb} {shell_word(name)} --reason "…"',
            back=f"/schedules/{name}",
            nothing=not change.changed,
        )

    async def act(call: Call, operator: Operator, reason: str | None) -> Done:
        name = text_of(call, "schedule")
        change = await getattr(operator.schedules, verb)(name, reason=reason)
        said = f"{name} is {verb}d." if change.changed else f"{name} was like that already."
        return Done(path=f"/schedules/{name}", said=said)

    return Action(name=f"schedules.{verb}", active="schedules", ask=ask, act=act)


async def _ask_remove(call: Call, operator: Operator) -> Question:
    name = text_of(call, "schedule")
    await operator.schedules.remove(name, dry_run=True)
    return Question(
        title=f"Remove {name}?",
        facts=[("Effect", "it fires no more; a worker that declares it brings it back")],
        button=f"Remove {name}",
        command=f'holdfast schedules remove {shell_word(name)} --reason "…"',
        back=f"/schedules/{name}",
        danger=True,
    )


async def _remove(call: Call, operator: Operator, reason: str | None) -> Done:
    name = text_of(call, "schedule")
    await operator.schedules.remove(name, reason=reason)
    return Done(path="/schedules", said=f"{name} is removed.")


PAGES = (
    Page("/schedules", "schedules", get=show),
    Page("/schedules/{name}", "schedule", get=show_one, example="schedule"),
    *pages_of(
        Action(name="schedules.trigger", active="schedules", ask=_ask_trigger, act=_trigger),
        _turning("pause"),
        _turning("resume"),
        Action(
            name="schedules.remove",
            active="schedules",
            ask=_ask_remove,
            act=_remove,
            role=Role.ADMIN,
            needs_reason=True,
        ),
    ),
)
