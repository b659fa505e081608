"""Explicit-state search: every state that a small protocol can reach, and the shortest way to the first bad one.

A model is a set of hashable states and the steps between them. `search` visits all of them breadth first and raises
`Violation`, whose text is the shortest trace, when

- a state breaks the model's invariant (`broken`),
- a state has no way to a good one (`good`): something is lost or stuck,
- with `ends=True`, the steps can go round in a circle, so that the protocol need not come to an end.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

State = TypeVar("State", bound=Hashable)


class Step(NamedTuple):
    """One step of one actor: `verb` is a key of the model's `stands_for`."""

    actor: str
    verb: str
    note: str = ""


class Model(Generic[State]):
    """What is searched. A step that the product takes as one statement is one step; what may come between is not."""

    # What each verb stands for: "path/below/src/holdfast name", or plain words for what the product does not do itself.
    stands_for: ClassVar[dict[str, str]] = {}
    # Whether every way comes to an end.
    ends = False

    def initial(self) -> State:
        raise NotImplementedError

    def steps(self, state: State) -> Iterator[tuple[Step, State]]:
        raise NotImplementedError

    def broken(self, state: State) -> str | None:
        """Which invariant the state breaks."""
        return None

    def good(self, state: State) -> bool:
        """Whether nothing is left to do. From every state some good one must be in reach."""
        return True

    def same(self, state: State) -> Hashable:
        """What a state is compared by: states that differ only in which of several equal actors is which are one."""
        return state


@dataclass(frozen=True, slots=True)
class Searched:
    """How much there was."""

    states: int
    steps: int


class Violation(AssertionError):
    """A protocol that does not keep its word. `trace` are the steps to the state that shows it."""

    def __init__(self, problem: str, trace: list[tuple[Step | None, Any]], model: Model[Any]) -> None:
        self.problem = problem
        self.trace = trace
        super().__init__(f"{problem}\n{_printed(trace, model)}")

    @property
    def steps(self) -> list[tuple[str, str]]:
        return [(step.actor, step.verb) for step, _ in self.trace if step is not None]


def search(model: Model[State], *, most: int = 400_000) -> Searched:
    """Visit every state; a model with more than `most` of them is not a small one."""
    collecting = gc.isenabled()
    gc.disable()  # all of it is kept to the end, and there are no circles among tuples
    try:
        return _search(model, most)
    finally:
        if collecting:
            gc.enable()


def _search(model: Model[State], most: int) -> Searched:
    first = model.initial()
    found: dict[Hashable, int] = {model.same(first): 0}
    states: list[State] = [first]
    origins: list[tuple[int, Step | None]] = [(0, None)]
    ways: list[tuple[int, ...]] = []
    todo = deque([0])
    count = 0

    def fail(problem: str, number: int) -> Violation:
        trace: list[tuple[Step | None, State]] = []
        while True:
            origin, step = origins[number]
            trace.append((step, states[number]))
            if step is None:
                return Violation(problem, trace[::-1], model)
            number = origin

    if problem := model.broken(first):
        raise fail(problem, 0)
    while todo:
        number = todo.popleft()
        targets = []
        for step, state in model.steps(states[number]):
            count += 1
            key = model.same(state)
            target = found.get(key)
            if target is None:
                target = found[key] = len(states)
                if target >= most:
                    raise ValueError(f"{type(model).__name__} has more than {most} states: make it smaller")
                states.append(state)
                origins.append((number, step))
                if problem := model.broken(state):
                    raise fail(problem, target)
                todo.append(target)
            targets.append(target)
        ways.append(tuple(targets))
    back: list[list[int]] = [[] for _ in ways]
    for origin, reached in enumerate(ways):
        for target in reached:
            back[target].append(origin)
    stuck = _stuck(back, [model.good(state) for state in states])
    if stuck is not None:
        raise fail("from here nothing good can be reached any more", stuck)
    if model.ends and (turning := _turning(ways, back)) is not None:
        raise fail("from here it can go on for ever", turning)
    return Searched(len(states), count)


def _stuck(back: list[list[int]], good: list[bool]) -> int | None:
    """The first state, nearest to the beginning, that has no way to a good one."""
    saved = list(good)
    todo = [number for number, is_good in enumerate(good) if is_good]
    while todo:
        for origin in back[todo.pop()]:
            if not saved[origin]:
                saved[origin] = True
                todo.append(origin)
    return next((number for number, is_saved in enumerate(saved) if not is_saved), None)


def _turning(ways: list[tuple[int, ...]], back: list[list[int]]) -> int | None:
    """The first state, nearest to the beginning, that can be reached from itself."""
    left = [len(targets) for targets in ways]
    todo = [number for number, count in enumerate(left) if count == 0]
    while todo:
        for origin in back[todo.pop()]:
            left[origin] -= 1
            if left[origin] == 0:
                todo.append(origin)
    # What is left can reach a circle; one that is on it comes back to itself.
    for number, count in enumerate(left):
        if count and _returns(ways, number):
            return number
    return None


def _returns(ways: list[tuple[int, ...]], start: int) -> bool:
    seen: set[int] = set()
    todo = list(ways[start])
    while todo:
        number = todo.pop()
        if number == start:
            return True
        if number not in seen:
            seen.add(number)
            todo.extend(ways[number])
    return False


# --- a trace for people -------------------------------------------------------------------------------------


def _printed(trace: list[tuple[Step | None, Any]], model: Model[Any]) -> str:
    lines = []
    for number, (step, state) in enumerate(trace):
        if step is None:
            lines.append(f"  0. at first: {_shown(state)}")
            continue
        where = model.stands_for.get(step.verb, "")
        note = f" ({step.note})" if step.note else ""
        lines.append(f"  {number}. {step.actor} {step.verb}{note}   [{where}]")
        lines.extend(f"       {change}" for change in _changes(trace[number - 1][1], state))
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if hasattr(value, "_fields"):
        return " ".join(f"{name}={_shown(getattr(value, name))}" for name in value._fields)
    if isinstance(value, tuple):
        return f"[{', '.join(f'({_shown(each)})' if hasattr(each, '_fields') else _shown(each) for each in value)}]"
    return repr(value) if isinstance(value, str) else str(value)


def _changes(before: Any, after: Any, name: str = "") -> Iterator[str]:
    if before == after:
        return
    if hasattr(after, "_fields") and type(before) is type(after):
        for field in after._fields:
            yield from _changes(getattr(before, field), getattr(after, field), f"{name}.{field}" if name else field)
    elif isinstance(after, tuple) and isinstance(before, tuple) and len(before) == len(after):
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from _changes(old, new, f"{name}[{number}]")
    else:
        yield f"{name}: {_shown(before)} -> {_shown(after)}"


def replaced(items: tuple[Any, ...], number: int, item: Any) -> tuple[Any, ...]:
    """The same tuple with another item in one place."""
    return (*items[:number], item, *items[number + 1 :])
