"""Generations: who serves which, and may this one go?"""

from __future__ import annotations

from starlette.responses import Response

from holdfast.access.principal import Role
from holdfast.characters import shell_word
from holdfast.console.actions import Action, Done, Question, forced, number_of, pages_of, typed
from holdfast.console.formatting import count, plural
from holdfast.console.page import Call, Page
from holdfast.operator import Generation, Operator


async def show(call: Call) -> Response:
    """Show all generations, the newest first."""
    async with call.operator() as operator:
        found = await operator.generations.all()
    return call.render(
        "generations.html",
        active="generations",
        title="Generations",
        generations=found,
        left_out=getattr(found, "left_out", 0),
        sentence=_sentence(found),
        cli="holdfast generations list",
    )


def _sentence(found: list[Generation]) -> str:
    current = next((each for each in found if each.current), None)
    unserved = [each for each in found if each.unserved]
    free = [each for each in found if not each.in_the_way and not each.retired_at]
    first = f"Generation {current.generation} is the current one" if current else "No generation is current"
    if unserved:
        named = ", ".join(str(each.generation) for each in unserved[:5])
        return f"{first}. Events wait in {named}, which no living worker serves."
    if free:
        named = ", ".join(str(each.generation) for each in free[:5])
        return f"{first}. {named} can be retired: nothing is open there, and no worker serves it."
    return f"{first}, and every generation with open events is served."


async def _ask_begin(call: Call, operator: Operator) -> Question:
    label = call.form.get("label").strip() or None
    number = await operator.generations.begin(label, dry_run=True)
    current = next((each for each in await operator.generations.all() if each.current), None)
    return Question(
        title="Begin a generation?",
        subject=label or "",
        facts=[
            ("Number", f"about {number}: the next that is free"),
            ("Effect", "publishers that name none write to it from then on; its events wait until a worker serves it"),
            ("Now", f"generation {current.generation} is current" if current else "none is current"),
        ],
        button="Begin a generation",
        command=f'holdfast generations begin{f" --label {shell_word(label)}" if label else ""} --reason "…"',
        back="/generations",
        danger=True,
    )


async def _begin(call: Call, operator: Operator, reason: str | None) -> Done:
    number = await operator.generations.begin(call.form.get("label").strip() or None, reason=reason)
    return _done(f"Generation {number} has begun.")


async def _ask_retire(call: Call, operator: Operator) -> Question:
    number, force = number_of(call, "generation"), forced(call)
    found = await operator.generations.retire(number, force=force, dry_run=True)
    return Question(
        title=f"Retire generation {number}?",
        subject=found.label or "",
        facts=[
            ("Open", f"{count(found.open)} would wait there" if found.open else "nothing is open there"),
            ("Failed", f"{count(found.failed)}; they can be replayed into another one"),
            ("Workers", f"{plural(len(found.workers), 'living worker serves', 'living workers serve')} it"),
        ],
        button=f"Retire generation {number}",
        command=f'holdfast generations retire {number}{" --force" if force else ""} --reason "…"',
        back="/generations",
        danger=True,
        typed=typed(found.open, force=force),
    )


async def _retire(call: Call, operator: Operator, reason: str | None) -> Done:
    found = await operator.generations.retire(number_of(call, "generation"), force=forced(call), reason=reason)
    return _done(f"Generation {found.generation} is retired.")


async def _ask_move(call: Call, operator: Operator) -> Question:
    number, to, force = number_of(call, "generation"), number_of(call, "to"), forced(call)
    found = await operator.generations.move(number, to, force=force, dry_run=True)
    return Question(
        title=f"Move {plural(found.moved, 'event')} to generation {to}?",
        facts=[
            (
                "Moves",
                f"{plural(found.moved, 'pending event')} from generation {number} to {to}, a few thousand at a time",
            ),
            ("Stays", f"{count(found.left)} in flight or locked" if found.left > 0 else "nothing"),
            ("Undo", "move them back; those that were handled meanwhile are not there any more"),
        ],
        button=f"Move {count(found.moved)}",
        command=f'holdfast generations move {number} --to {to}{" --force" if force else ""} --reason "…"',
        back="/generations",
        danger=force,
        nothing=not found.moved,
        typed=typed(found.moved, force=force),
    )


async def _move(call: Call, operator: Operator, reason: str | None) -> Done:
    number, to = number_of(call, "generation"), number_of(call, "to")
    done = await operator.generations.move(number, to, force=forced(call), reason=reason)
    left = f" {count(done.left)} are left." if done.left else ""
    return _done(f"{plural(done.moved, 'event')} moved from generation {number} to {to}.{left}")


def _done(said: str) -> Done:
    return Done(path="/generations", said=said, feeds=("overview", "workers"))


def _action(name: str, ask: object, act: object, *, can_force: bool = False) -> Action:
    return Action(
        name=f"generations.{name}",
        active="generations",
        ask=ask,  # type: ignore[arg-type]
        act=act,  # type: ignore[arg-type]
        role=Role.ADMIN,
        can_force=can_force,
    )


PAGES = (
    Page("/generations", "generations", get=show),
    *pages_of(
        _action("begin", _ask_begin, _begin),
        _action("retire", _ask_retire, _retire, can_force=True),
        _action("move", _ask_move, _move, can_force=True),
    ),
)
