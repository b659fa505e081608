"""What can be done about a handler: pause, resume, limit, its breaker, and to retire it."""

from __future__ import annotations

from typing import Any, Final

from holdfast.access.principal import Role
from holdfast.characters import shell_word
from holdfast.console.actions import Action, Done, Question, pages_of, text_of, whole_of
from holdfast.console.formatting import count, plural
from holdfast.console.handler_view import limits
from holdfast.console.page import Call
from holdfast.operator import FlowChange, Operator

_LIMITS: Final = ("fleet_concurrency", "rate")
_WORDS: Final = {
    "pause": ("Pause", "paused", "nothing more is claimed for it; what runs may finish, and its events wait"),
    "resume": ("Resume", "resumed", "its workers are woken and go on with what waits"),
    "open": (
        "Open the breaker of",
        "its breaker is open",
        "one event probes now and then; the first success closes it",
    ),
    "close": ("Close the breaker of", "its breaker is closed", "everything that waits is tried, without a probe"),
}


def _done(name: str, said: str) -> Done:
    feeds = ("handlers", f"handler:{name}", "overview")
    return Done(path=f"/handlers/{name}", said=said, feeds=feeds)


def _turning(verb: str) -> Action:
    word, ended, effect = _WORDS[verb]

    async def ask(call: Call, operator: Operator) -> Question:
        name = text_of(call, "handler")
        found = await operator.handlers.show(name)
        change: FlowChange = await getattr(operator.handlers, verb)(name, dry_run=True)
        return Question(
            title=f"{word} {name}?",
            facts=[
                ("Effect", effect),
                ("Open", f"{count(found.open, 10_000)} wait for it"),
                ("Workers", f"{plural(len(found.workers), 'living worker has', 'living workers have')} it"),
            ],
            button=f"{word} {name}",
            command=f'holdfast handlers {verb} {shell_word(name)} --reason "…"',
            back=f"/handlers/{name}",
            nothing=not change.changed,
        )

    async def act(call: Call, operator: Operator, reason: str | None) -> Done:
        name = text_of(call, "handler")
        change: FlowChange = await getattr(operator.handlers, verb)(name, reason=reason)
        said = f"{name}: {ended}." if change.changed else f"{name} was like that already."
        return _done(name, said)

    return Action(name=f"handlers.{verb}", active="handlers", ask=ask, act=act)


def _limits_of(call: Call) -> dict[str, Any]:
    return {
        "fleet_concurrency": whole_of(call.form, "fleet_concurrency"),
        "rate": call.form.get("rate").strip() or None,
        "clear": [each for each in call.form.all("clear") if each in _LIMITS],
    }


async def _ask_limit(call: Call, operator: Operator) -> Question:
    name, wanted = text_of(call, "handler"), _limits_of(call)
    before = (await operator.handlers.show(name)).flow
    change = await operator.handlers.limit(name, dry_run=True, **wanted)
    options = "".join(
        f" --{key.replace('_', '-')} {shell_word(str(wanted[key]))}" for key in _LIMITS if wanted[key] is not None
    ) + "".join(f" --clear {each}" for each in wanted["clear"])
    return Question(
        title=f"Change the limits of {name}?",
        facts=[
            ("Now", ", ".join(limits(before)) or "no limit"),
            ("Then", ", ".join(limits(change.flow)) or "no limit"),
            ("Effect", "for the whole fleet at once; it wins over what the code declares until it is cleared"),
        ],
        button=f"Limit {name}",
        command=f'holdfast handlers limit {shell_word(name)}{options} --reason "…"',
        back=f"/handlers/{name}",
        nothing=not change.changed,
    )


async def _limit(call: Call, operator: Operator, reason: str | None) -> Done:
    name = text_of(call, "handler")
    change = await operator.handlers.limit(name, reason=reason, **_limits_of(call))
    return _done(name, f"{name}: {', '.join(limits(change.flow)) or 'no limit'}.")


async def _ask_retire(call: Call, operator: Operator) -> Question:
    name = text_of(call, "handler")
    found = await operator.handlers.show(name)
    ends = await operator.handlers.retire(name, dry_run=True) if found.event_types else 0
    return Question(
        title=f"Retire {name}?",
        facts=[
            ("Ends", f"{plural(ends, 'subscription')}: {', '.join(found.event_types[:8]) or 'none'}"),
            ("Stays", f"{count(found.open, 10_000)} open and {count(found.failed)} failed, as they are"),
            ("Workers", f"{plural(len(found.workers), 'living worker has', 'living workers have')} it"),
            ("Beware", "a worker that starts with it subscribes it again"),
        ],
        button=f"Retire {name}",
        command=f'holdfast handlers retire {shell_word(name)} --reason "…"',
        back=f"/handlers/{name}",
        danger=True,
        nothing=not ends,
    )


async def _retire(call: Call, operator: Operator, reason: str | None) -> Done:
    name = text_of(call, "handler")
    ended = await operator.handlers.retire(name, reason=reason)
    return _done(name, f"{name} is retired: {plural(ended, 'subscription has', 'subscriptions have')} ended.")


ACTIONS = (
    *(_turning(verb) for verb in _WORDS),
    Action(name="handlers.limit", active="handlers", ask=_ask_limit, act=_limit),
    Action(name="handlers.retire", active="handlers", ask=_ask_retire, act=_retire, role=Role.ADMIN, needs_reason=True),
)
PAGES = pages_of(*ACTIONS)
