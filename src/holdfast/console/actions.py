"""Actions of pages: the question is the dry run, and the answer acts. One template asks for all of them.

An `Action` has an address of its own, `/do/` and its name. A form that is sent there is answered with the question, in
a dialog where there is a script; the form of the question comes back to the same address with `confirmed`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from starlette.responses import Response

from holdfast.access.principal import Role
from holdfast.console.page import Call, Form, Page
from holdfast.errors import ConfigurationError
from holdfast.operator import Operator, Refused

_OURS: Final = ("_token", "confirmed", "reason", "typed", "expected", "force")
TYPED_ABOVE: Final = 10_000  # of more rows than these the number has to be typed


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What an action would do, as the dry run has found it."""

    title: str
    button: str  # what it says; the name of the environment follows
    command: str
    back: str  # the page that it was asked on
    subject: str = ""
    facts: Sequence[tuple[str, str]] = ()
    lines: Sequence[tuple[str, int]] = ()  # what is counted, one by one
    danger: bool = False
    nothing: bool = False  # it would change nothing
    typed: str | None = None  # what has to be typed
    refused: str | None = None  # why it needs force
    keep: Mapping[str, str] = field(default_factory=dict)  # fields that the answer gets in addition


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What was done, and the page that shows it."""

    path: str
    said: str
    feeds: Sequence[str] = ()  # live parts that show it


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Something that a page offers to do."""

    name: str
    active: str  # the entry of the navigation
    ask: Callable[[Call, Operator], Awaitable[Question]]
    act: Callable[[Call, Operator, str | None], Awaitable[Done]]
    role: Role = Role.OPERATOR
    needs_reason: bool = False
    can_force: bool = False  # what is refused may be done by force, with a reason


def forced(call: Call) -> bool:
    """Whether who asks insists on what was refused."""
    return call.form.get("force") == "on"


def pages_of(*actions: Action) -> tuple[Page, ...]:
    """Return the addresses of actions."""
    return tuple(
        Page(f"/do/{each.name}", f"do.{each.name}", post=_answering(each), post_role=each.role) for each in actions
    )


def _answering(action: Action) -> Callable[[Call], Awaitable[Response]]:
    async def answer(call: Call) -> Response:
        if call.form.get("confirmed") == "yes":
            return await _act(action, call)
        return await _ask(action, call)

    return answer


async def _ask(action: Action, call: Call) -> Response:
    async with call.operator() as operator:
        try:
            question = await action.ask(call, operator)
        except Refused as refusal:
            if not action.can_force or forced(call):
                raise
            call.form = call.form.plus("force", "on")
            question = replace(await action.ask(call, operator), refused=refusal.problem, danger=True)
    by_force = forced(call)
    return call.render(
        "ask.html",
        active=action.active,
        title=question.title,
        action=action.name,
        question=question,
        force=by_force,
        needs_reason=action.needs_reason or by_force,
        kept=[(name, value) for name, value in call.form.fields if name not in _OURS and name not in question.keep],
    )


async def _act(action: Action, call: Call) -> Response:
    reason = call.form.get("reason").strip() or None
    if reason is None and (action.needs_reason or forced(call)):
        raise ConfigurationError("reason", "is empty", "say why: it stands in the audit")
    if "expected" in call.form and call.form.get("typed").strip().replace(",", "") != call.form.get("expected"):
        raise ConfigurationError("the number", "that was typed is another", f"type {call.form.get('expected')[:40]}")
    async with call.operator() as operator:
        done = await action.act(call, operator, reason)
    call.console.hub.expire(*done.feeds)
    return call.back(done.path, said=done.said)


def typed(count: int, *, force: bool = False) -> str | None:
    """Return what has to be typed before so many rows are changed."""
    return str(count) if count > TYPED_ABOVE or (force and count) else None


def text_of(call: Call, name: str, most: int = 300) -> str:
    """Return a field of the form that has to be there."""
    found = call.form.get(name).strip()
    if not found or len(found) > most:
        raise ConfigurationError(name, "is empty or too long", "go back and choose again")
    return found


def number_of(call: Call, name: str) -> int:
    """Return a field of the form that has to be a whole number."""
    found = whole_of(call.form, name)
    if found is None:
        raise ConfigurationError(name, "is empty", "write a whole number")
    return found


def whole_of(form: Form, name: str) -> int | None:
    """Return a field that is a whole number, or empty."""
    text = form.get(name).strip()
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise ConfigurationError(name, "is not a whole number", "write digits, or leave it empty")
    return int(text)


def decimal_of(form: Form, name: str) -> float | None:
    """Return a field that is a number, or empty."""
    text = form.get(name).strip()
    try:
        return float(text) if text else None
    except ValueError:
        raise ConfigurationError(name, "is not a number", "write it with digits and a point") from None
