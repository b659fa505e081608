"""Live parts of pages: one reader for all browsers, which are sent what has changed.

A `Feed` reads a value and renders it as fragments, by the ids of the elements that they replace. While somebody
watches a feed, the `Hub` reads it every two seconds, once for all. A page shows the same value when it is loaded
(`Hub.latest`), and renders with `feed=` its name and `snapshot=`. Fragments are shared by everybody, so they hold
nothing that depends on who looks: no actions, no payloads.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.operator import DATABASE_ERRORS, DatabaseAway, Operator, Operators, ReadTimeout, is_away

MOST_WATCHERS: Final = 200
MOST_OF_ONE: Final = 20  # of them, for one principal
SELDOM: Final = 10.0  # seconds until what every page shows is read again, when nobody looks at its own page
SLOW_FOR: Final = 30.0  # seconds until a feed is read again whose reading took too long
LARGEST_MESSAGE: Final = 4_096
_READER: Final = "holdfast console"
_MOST_KEPT = 50
LONGEST_NAME: Final = 200


class Feed(Protocol):
    """What the live parts of a page are made of. `argument` is what stands behind the colon of a feed's name."""

    def normal(self, argument: str) -> str | None:
        """Return an argument in its canonical form, so that equal ones share a read; None if it is not acceptable."""

    async def read(self, operator: Operator, argument: str, before: Any) -> Any:
        """Read the value; `before` is the last one, for what need not be read so often."""

    def fragments(self, value: Any) -> Mapping[str, tuple[str, dict[str, Any]]]:
        """Return the template and its values for each element."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A value of a feed, and when it was read."""

    value: Any
    at: datetime
    version: str
    milliseconds: float


@dataclass(frozen=True, slots=True)
class Outage:
    """The database does not answer."""

    since: datetime
    error: BaseException


@dataclass(slots=True)
class _Watched:
    snapshot: Snapshot | None = None
    watchers: int = 0
    stale: bool = False  # something was changed that it shows
    not_before: float = 0.0  # of the monotonic clock
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    rendered: dict[tuple[str, str, str], Mapping[str, str]] = field(default_factory=dict)


Render = Callable[[str, str, str, dict[str, Any]], str]


class Hub:
    """The reader of a process, and everybody who watches."""

    def __init__(
        self,
        operators: Operators,
        feeds: Mapping[str, Feed],
        render: Render,
        interval: float,
        everywhere: tuple[str, str] | None = None,
    ) -> None:
        self._operators = operators
        self._feeds = feeds
        self._render = render
        self._interval = interval
        self._everywhere = everywhere  # a feed, and the element of it that every page has
        self._watched: dict[str, _Watched] = {}
        self._watching: Counter[str] = Counter()  # how many streams each principal has
        self._round = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._number = 0
        self.outage: Outage | None = None
        self.closed = False

    @property
    def watchers(self) -> int:
        """How many browsers watch."""
        return sum(each.watchers for each in self._watched.values())

    def is_full(self, who: str) -> bool:
        """Whether nobody more may watch, or not this principal."""
        return self.watchers >= MOST_WATCHERS or self._watching[who] >= MOST_OF_ONE

    def named(self, name: str) -> str | None:
        """Return the name by which a feed is read; None: there is no such feed."""
        kind, _, given = name.partition(":")
        if len(name) > LONGEST_NAME or kind not in self._feeds:
            return None
        argument = self._feeds[kind].normal(given)
        return f"{kind}:{argument}" if argument else kind if argument is not None else None

    async def exists(self, name: str) -> bool:
        """Whether there is what the feed shows. While the database is away, nobody knows: it may be waited for."""
        if self.last(name) is not None:
            return True
        try:
            await self.latest(name)
        except ConfigurationError:  # such as a plan that is not found
            return False
        except DATABASE_ERRORS as error:
            return is_away(error)
        except HoldfastError:
            return True
        return True

    def last(self, name: str) -> Any:
        """Return the last value, however old; None: it was never read."""
        watched = self._watched.get(name)
        return watched.snapshot.value if watched is not None and watched.snapshot is not None else None

    def expire(self, *names: str) -> None:
        """Have feeds read again by whoever asks next, because something was changed that they show."""
        for name in names:
            if (watched := self._watched.get(name)) is not None:
                watched.stale = True

    async def latest(self, name: str) -> Snapshot:
        """Return a value that is not older than the interval, or, while the database is away, the last one."""
        watched = self._place(name)
        async with watched.reading:
            now = datetime.now(UTC)
            last = watched.snapshot
            if last is not None and not watched.stale and (now - last.at).total_seconds() < self._interval:
                return last
            if last is not None and self.outage is not None and watched.watchers:
                return last  # the reader tries already
            try:
                return await self._read(name, watched)
            except (*DATABASE_ERRORS, HoldfastError):
                if last is None:
                    raise
                return last

    async def watch(
        self,
        name: str,
        zone: str,
        prefix: str,
        *,
        who: str = "",
        version: str = "",
        parts: Container[str] | None = None,
        allowed: Callable[[], Awaitable[bool]] | None = None,
    ) -> AsyncIterator[str]:
        """Yield the messages for one browser, until it goes away; `parts` are the elements that its page has.

        `allowed` is asked in every round whether it may still see them.
        """
        if self.is_full(who):  # many may have asked before the first of them began
            return
        watched = self._place(name)
        watched.watchers += 1
        self._watching[who] += 1
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._run())
        seen: dict[str, str] = {}
        was_away = False
        if watched.snapshot is not None and watched.snapshot.version == version:
            seen = dict(self._fragments(name, watched, zone, prefix))
        try:
            yield "retry: 3000\n\n"
            while not self.closed:
                upcoming = self._round
                if self.outage is not None:
                    yield _message({"away": _problem(self.outage)})
                    was_away = True
                elif watched.snapshot is not None:
                    if was_away:
                        seen, was_away = {}, False
                        yield _message({"back": True})
                    current = {
                        **self._of_every_page(name, zone, prefix),
                        **self._fragments(name, watched, zone, prefix),
                    }
                    for id, html in current.items():
                        if seen.get(id) != html and (parts is None or id in parts):
                            yield _fragment(id, html)
                    seen = dict(current)
                    yield _message({"at": watched.snapshot.at.timestamp(), "watchers": self.watchers})
                await upcoming.wait()
                if allowed is not None and not await allowed():
                    return
        finally:
            watched.watchers -= 1
            self._watching[who] -= 1
            if not self._watching[who]:
                del self._watching[who]

    def fragment(self, name: str, id: str, zone: str, prefix: str) -> str | None:
        """Return one fragment that was too large for a message."""
        watched = self._watched.get(name)
        if watched is None or watched.snapshot is None:
            return None
        found = self._fragments(name, watched, zone, prefix)
        return found[id] if id in found else self._of_every_page(name, zone, prefix).get(id)

    async def close(self) -> None:
        """Stop reading, and let everybody go."""
        self.closed = True
        self._next_round()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    async def _run(self) -> None:
        """Read what is watched, again and again, while somebody watches."""
        while self.watchers and not self.closed:
            began = time.monotonic()
            for name, watched in list(self._watched.items()):
                if watched.watchers and watched.not_before <= time.monotonic() and not await self._tried(name, watched):
                    break
            await self._read_for_every_page()
            self._next_round()
            await asyncio.sleep(max(0.1, self._interval - (time.monotonic() - began)))

    async def _read_for_every_page(self) -> None:
        """Read now and then what every page shows, when nobody looks at the page that it comes from."""
        if self._everywhere is None or self.outage is not None:
            return
        watched = self._place(self._everywhere[0])
        last = watched.snapshot
        if watched.watchers or watched.not_before > time.monotonic():
            return
        if last is None or watched.stale or (datetime.now(UTC) - last.at).total_seconds() >= SELDOM:
            await self._tried(self._everywhere[0], watched)

    def _of_every_page(self, name: str, zone: str, prefix: str) -> Mapping[str, str]:
        """Return what every page shows, unless the feed has it itself."""
        if self._everywhere is None or name == self._everywhere[0]:
            return {}
        feed, id = self._everywhere
        found = self.fragment(feed, id, zone, prefix)
        return {} if found is None else {id: found}

    async def _tried(self, name: str, watched: _Watched) -> bool:
        """Read one feed, and return whether the others can be read too. What is wrong with it concerns nobody else."""
        try:
            async with watched.reading:
                await self._read(name, watched)
        except ReadTimeout:
            watched.not_before = time.monotonic() + SLOW_FOR  # or the others would wait for it in every round
        except DatabaseAway:
            return False  # `outage` says so, to everybody
        except HoldfastError:
            pass  # such as a plan that does not exist
        except Exception as error:
            if is_away(error):
                return False
            # Without its text, which may quote a row. Whoever runs the loop decides where such things are logged.
            said = f"the feed {name!r} of the console failed: {type(error).__name__}"
            asyncio.get_running_loop().call_exception_handler({"message": said})
        return True

    async def _read(self, name: str, watched: _Watched) -> Snapshot:
        kind, _, argument = name.partition(":")
        began = time.perf_counter()
        before = None if watched.snapshot is None or watched.stale else watched.snapshot.value
        watched.stale = False
        try:
            async with self._operators.acting(_READER) as operator:
                value = await self._feeds[kind].read(operator, argument, before)
        except (*DATABASE_ERRORS, DatabaseAway) as error:
            away = isinstance(error, DatabaseAway) or is_away(error)
            self.outage = (self.outage or Outage(datetime.now(UTC), error)) if away else None
            raise
        except ConfigurationError:
            self.outage = None  # it has answered
            raise
        self.outage = None
        self._number += 1
        took = (time.perf_counter() - began) * 1000
        watched.snapshot = Snapshot(value, datetime.now(UTC), f"{self._number}", took)
        watched.rendered.clear()
        return watched.snapshot

    def _fragments(self, name: str, watched: _Watched, zone: str, prefix: str) -> Mapping[str, str]:
        """Return the fragments of the last value, rendered once for all who share a zone."""
        snapshot = watched.snapshot
        assert snapshot is not None  # noqa: S101 - whoever asks has looked
        key = (zone, prefix, snapshot.version)
        if key not in watched.rendered:
            feed = self._feeds[name.partition(":")[0]]
            made = feed.fragments(snapshot.value).items()
            watched.rendered[key] = {
                id: self._render(template, zone, prefix, values) for id, (template, values) in made
            }
        return watched.rendered[key]

    def _place(self, name: str) -> _Watched:
        if name not in self._watched:
            if len(self._watched) >= _MOST_KEPT:
                idle = [each for each, watched in self._watched.items() if not watched.watchers]
                for each in idle[: max(1, len(idle) // 2)]:
                    del self._watched[each]
            self._watched[name] = _Watched()
        return self._watched[name]

    def _next_round(self) -> None:
        done, self._round = self._round, asyncio.Event()
        done.set()


def _problem(outage: Outage) -> dict[str, Any]:
    return {"since": outage.since.timestamp()}


def _fragment(id: str, html: str) -> str:
    """A message with the fragment; of a large one, that it has to be fetched."""
    whole = _message({"id": id, "html": html})
    if len(whole.encode()) <= LARGEST_MESSAGE:
        return whole
    return _message({"id": id, "fetch": hashlib.sha256(html.encode()).hexdigest()[:12]})


def _message(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
