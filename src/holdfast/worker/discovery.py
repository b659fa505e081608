"""The routes of one channel from which a worker claims. Pure: no I/O.

A worker with few routes claims from all of them at once. One with many, or with patterns, first asks which have open
rows. They are listed a page at a time, in turn, so that neither many handlers nor many foreign event types make one
look at the outbox long.
"""

from collections.abc import Mapping

from holdfast.postgres.deliveries import RoutePage
from holdfast.worker.lanes import PRIORITIES, Lanes
from holdfast.worker.routing import Owed, Routing

# Routes from which something came are looked at every time, at most so many.
_RECENT = 32


class ChannelLanes:
    """The lanes from which one channel is claimed, and those that are split for several handlers."""

    def __init__(self) -> None:
        self.claimed, self.split = Lanes(), Lanes()
        self.after = ""  # where the next page begins
        self.exhausted = True  # nothing was left on the pages since the first
        self.empty = False  # nothing came from the lanes the last time
        self._used: Mapping[str, Owed] = {}
        self._recent: dict[str, None] = {}
        self._open: dict[str, None] = {}  # those that may become due, on the pages since the first

    def restart(self) -> None:
        """Begin again with the first page."""
        self.after, self.exhausted = "", True
        self._open = {}

    def use(self, owed: Mapping[str, Owed]) -> None:
        """Claim from these routes, and split these."""
        if owed == self._used:
            return
        self._used = dict(owed)
        self.claimed.replace({route: each.handler for route, each in owed.items() if not each.split})
        self.split.replace({route: each.handler for route, each in owed.items() if each.split})

    def use_page(self, routing: Routing, page: RoutePage) -> None:
        """Claim from the routes of a page, and from those of late.

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
        # Never from none at all: it is the claim that finds out whether the subscriptions have changed.
        known = {} if page.every else routing.known
        self.use({**owed, **routing.owed(self._recent), **known} or routing.owed(routing.some))

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
