"""Decides which handler the events of a route are owed to, by the recorded subscriptions. Pure: no I/O.

The route of an event is `<target or *>/<event type>` until it is known which handler it is owed to, and the handler's
name from then on. Reading the subscriptions takes a time that grows with their number, and so does nothing else: what
a route's events are owed to is found by its type, and by the beginnings of its type that some pattern has.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.handlers import Handler, pattern_of
from holdfast.postgres.subscriptions import Subscription, Subscriptions

# With more routes than this, or with patterns, a worker asks which of them have rows before it claims.
_FEW = 48
# The answers for so many routes are kept.
_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class Owed:
    """A route that is ours: owed to one handler, or to several and then split."""

    handler: Handler  # when it is split, one of ours that wants it
    split: bool
    siblings: tuple[str, ...] = ()  # of a split, the handlers of ours that get one


class Routing:
    """The routes of one worker, as of one version of the subscriptions."""

    def __init__(self, subscriptions: Subscriptions, handlers: Iterable[Handler]) -> None:
        self.version = subscriptions.version
        self._ours = {handler.name: handler for handler in handlers}
        self._index = SubscriptionIndex(subscriptions)
        self._owed: dict[str, Owed | None] = {}
        own = [each for each in subscriptions.entries if each[1] in self._ours]
        self.patterns = any("*" in event_type for _, _, event_type in own)
        self._exact = [f"{target}/{kind}" for context, _, kind in own if "*" not in kind for target in ("*", context)]
        self._own = own

    @property
    def few(self) -> bool:
        """Whether all routes are known and can be claimed from at once."""
        return not self.patterns and self._knows_few

    @property
    def _knows_few(self) -> bool:
        return len(self._exact) + len(self._ours) <= _FEW

    @property
    def known(self) -> dict[str, Owed]:
        """The routes that are known without looking into the outbox, if they are few enough to claim from at once."""
        return self.routes if self._knows_few else {}

    @property
    def routes(self) -> dict[str, Owed]:
        """The routes that are known without looking into the outbox, and what they are owed to."""
        return self.owed((*self._ours, *sorted(set(self._exact))))

    @property
    def some(self) -> list[str]:
        """The route of one handler."""
        return list(self._ours)[:1]

    def owed(self, routes: Iterable[str]) -> dict[str, Owed]:
        """Those of the routes that are ours, and what they are owed to."""
        found = {}
        for route in routes:
            if route not in self._owed:
                if len(self._owed) >= _REMEMBERED:
                    self._owed.clear()
                self._owed[route] = self._find(route)
            owed = self._owed[route]
            if owed is not None:
                found[route] = owed
        return found

    def _find(self, route: str) -> Owed | None:
        _, slash, event_type = route.partition("/")
        if not slash:
            handler = self._ours.get(route)
            return None if handler is None else Owed(handler, split=False)
        wanted = self._index.subscribers(route)
        # A handler may be recorded for a type that its present code no longer registers: leave that alone.
        mine = sorted(name for name in wanted & self._ours.keys() if self._ours[name].wants(event_type))
        if not mine:
            return None
        split = len(wanted) > 1
        return Owed(self._ours[mine[0]], split, tuple(mine) if split else ())

    def ranges(self) -> tuple[list[str], list[str]]:
        """Where in the order of their characters our routes lie: the beginnings and the ends, which are outside."""
        spans = [(route, route + "\x01") for route in (*self._ours, *self._exact)]
        for context, _, pattern in self._own:
            prefix, star, _ = pattern.partition("*")
            if star:
                spans += [(f"{target}/{prefix}", _after(f"{target}/{prefix}")) for target in ("*", context)]
        begins: list[str] = []
        ends: list[str] = []
        for begin, end in sorted(set(spans)):
            if ends and begin <= ends[-1]:
                ends[-1] = max(ends[-1], end)
            else:
                begins.append(begin)
                ends.append(end)
        return begins, ends


class SubscriptionIndex:
    """Finds the subscribers of a route."""

    def __init__(self, subscriptions: Subscriptions) -> None:
        self._exact: dict[str, list[Subscription]] = {}
        self._patterns: dict[str, list[Subscription]] = {}  # by what comes before the first star
        for each in subscriptions.entries:
            prefix, star, _ = each[2].partition("*")
            (self._patterns if star else self._exact).setdefault(prefix, []).append(each)

    def subscribers(self, route: str) -> set[str]:
        """The handlers that want the events of a route."""
        target, _, event_type = route.partition("/")
        candidates = list(self._exact.get(event_type, ()))
        if self._patterns:
            for length in range(len(event_type) + 1):
                for each in self._patterns.get(event_type[:length], ()):
                    if pattern_of(each[2]).fullmatch(event_type):
                        candidates.append(each)
        return {name for context, name, _ in candidates if target in ("*", context)}


def subscribers(subscriptions: Subscriptions, route: str) -> set[str]:
    """The handlers that want the events of one route. For many, use a `SubscriptionIndex`."""
    return SubscriptionIndex(subscriptions).subscribers(route)


def outdated(subscriptions: Subscriptions, handlers: Iterable[Handler]) -> list[tuple[str, str]]:
    """Subscriptions of these handlers that they no longer register, or for which they now run in process."""
    known = {handler.name: handler.event_types if handler.via == "outbox" else () for handler in handlers}
    return [(name, kind) for _, name, kind in subscriptions.entries if name in known and kind not in known[name]]


def _after(prefix: str) -> str:
    """The first text after all that begin with the prefix, in the order of characters."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)
