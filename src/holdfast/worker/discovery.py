"""The routes of one channel from which a worker claims. Pure: no I/O.

A worker with few routes claims from all of them at once. One with many, or with patterns, first asks which have open
rows. They are listed a page at a time, in turn, so that neither many handlers nor many foreign event types make one
look at the outbox long. A page is claimed from in parts, which are as large as fits into a short claim.
"""

from collections.abc import Mapping

from holdfast.postgres.deliveries import RoutePage
from holdfast.worker.lanes import PRIORITIES, Lanes
from holdfast.worker.routing import Owed, Routing

# Routes from which something came are looked at every time, at most so many.
_RECENT = 32
# From so many routes of a page at once: a few rows of each of many cost more than several rows of a few.
_NARROWEST, _WIDEST = 32, 128


class ChannelLanes:
    """The lanes from which one channel is claimed, and those that are split for several handlers."""

    def __init__(self) -> None:
        self.claimed, self.split = Lanes(), Lanes()
        self.after = ""  # where the next page begins
        self.exhausted = True  # nothing was left on the pages since the first
        self.siblings = 1  # that a split makes of one event, at most
        self.empty = False  # nothing came from the lanes the last time
        self._used: Mapping[str, Owed] = {}
        self._recent: dict[str, None] = {}
        self._open: dict[str, None] = {}  # those that may become due, on the pages since the first
        self._rest: dict[str, Owed] = {}  # of the page, what was not claimed from yet
        self._known: dict[str, Owed] = {}  # claimed from with every part of the page
        self._recent_owed: dict[str, Owed] = {}  # the recent ones, claimed from with its first part
        self._width = _NARROWEST

    @property
    def more(self) -> bool:
        """Whether routes are left that were not claimed from since the first page."""
        return bool(self.after or self._rest)

    @property
    def needs_page(self) -> bool:
        """Whether the page was claimed from to its end."""
        return not self._rest

    def restart(self) -> None:
        """Begin again with the first page."""
        self.after, self.exhausted = "", True
        self._open, self._rest = {}, {}

    def use(self, owed: Mapping[str, Owed]) -> None:
        """Claim from these routes, and split these."""
        if owed == self._used:
            return
        self._used = dict(owed)
        self.siblings = max((len(each.siblings) for each in owed.values()), default=1) or 1
        self.claimed.replace({route: each.handler for route, each in owed.items() if not each.split})
        self.split.replace({route: each.handler for route, each in owed.items() if each.split})

    def take_page(self, routing: Routing, page: RoutePage) -> None:
        """Claim from the routes of a page next, with `use_page`.

        When one page does not have every route, also from those that are known without it: what else is open is not in
        their way.
        """
        if not self.after:
            self.restart()
        owed = routing.owed(page.routes)
        self._open.update(dict.fromkeys(owed))
        if not page.every:
            # The first that will be due in a range. A type may lie in the range of a pattern and not match it.
            self._open.update(dict.fromkeys(page.routes[-1:]))
        self.after = page.after
        self._rest, self._recent_owed = owed, routing.owed(self._recent)
        self._known = {} if page.every else routing.known

    def use_page(self, routing: Routing) -> None:
        """Claim from the routes of the page, or the next part of them.

        What is split is claimed at once, from the routes of its siblings, which count as well.
        """
        owed, counted = {**self._known, **self._recent_owed}, 0
        self._recent_owed = {}
        for route, each in tuple(self._rest.items()):
            count = min(len(each.siblings), _WIDEST) or 1
            if counted and counted + count > self._width:
                break
            counted += count
            owed[route] = self._rest.pop(route)
            owed |= routing.owed(each.siblings[:_WIDEST])
        # Never from none at all: it is the claim that finds out whether the subscriptions have changed.
        self.use(owed or routing.owed(routing.some))

    def learn(self, took: float, pace: float) -> None:
        """Learn how many routes fit into a claim that takes about `pace` seconds."""
        self._width = max(_NARROWEST, min(int(self._width * max(0.5, min(pace / took, 1.5))), _WIDEST))

    def note(self, routes: set[str]) -> None:
        """Remember from which routes something came."""
        for route in routes:
            self._recent.pop(route, None)
            self._recent[route] = None
        while len(self._recent) > _RECENT:
            del self._recent[next(iter(self._recent))]

    @property
    def keys(self) -> list[tuple[str, int]]:
        """The lanes in which a row may become due."""
        routes = (self._open.keys() | self._used.keys()) - self.claimed.left_out
        return [(route, priority) for route in routes for priority in PRIORITIES]
