"""A small HTTP server for what machines ask: GET of a few pages, no framework.

    async with serve([Site("127.0.0.1", 9464, {"/metrics": metrics})]) as (port,): ...
    with serve_in_thread([...]) as (port,): ...

The second form answers while the event loop of its process is blocked. A `Site` is also a path for a Unix socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import re
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Final

from holdfast.errors import ConfigurationError
from holdfast.observability.logging import logger
from holdfast.redact import redact_secrets

PLAIN: Final = "text/plain; charset=utf-8"
JSON: Final = "application/json"
LOOPBACK: Final = "127.0.0.1"
_PATIENCE = 5.0  # for a request to arrive, and for its response to be taken
_LONGEST_REQUEST = 16_384
# More than are accepted at once: a request that comes with its connection is read before others take its place.
_MOST_CONNECTIONS = 256


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for, once it is known to be a GET for this host."""

    path: str
    query: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)  # by their names in small letters; of several, the last


@dataclass(frozen=True, slots=True)
class Response:
    """A whole response: everything that is served is small."""

    body: str
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = PLAIN


Page = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Site:
    """Pages, by their paths, at an address. Port 0 is one that the system chooses.

    A request must be for an address, this machine's name, `localhost` or a host in `allowed`: a web page whose name was
    made to lead here sends that name instead.
    """

    host: str
    port: int
    pages: Mapping[str, Page]
    allowed: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class UnixSite:
    """Pages at a Unix socket, which only this user may use: any host is answered."""

    path: str
    pages: Mapping[str, Page]


def combined(sites: Iterable[Site]) -> list[Site]:
    """Sites of which those with the same address are one, with the pages of all of them."""
    found: dict[tuple[str, int], Site] = {}
    for site in sites:
        same = found.get((site.host, site.port))
        if same is not None:
            site = replace(same, pages={**same.pages, **site.pages}, allowed=(*same.allowed, *site.allowed))
        found[site.host, site.port] = site
    return list(found.values())


def address_of(text: str, option: str = "--listen", example: int = 9464) -> tuple[str, int]:
    """Return the host and the port of `9464`, `:9464`, `0.0.0.0:9464` or `[::1]:9464`."""
    found = re.fullmatch(r"(?:(?P<host>[^:\[\]\s]*|\[[0-9a-fA-F:.]+\]):)?(?P<port>[0-9]{1,5})", text)
    if not found or int(found["port"]) > 65_535:
        raise ConfigurationError(option, f"{text!r} is not an address to listen on", f"write {LOOPBACK}:{example}")
    return (found["host"] or LOOPBACK).strip("[]"), int(found["port"])


class CannotListen(OSError):
    """A site whose address cannot be used; `site` is which."""

    def __init__(self, site: Site | UnixSite, error: OSError) -> None:
        super().__init__(error.errno, error.strerror or str(error))
        self.site = site


def unusable(option: str, host: str, port: int, error: OSError) -> ConfigurationError:
    """Return the error for an option with an address that cannot be used; the system's words say why."""
    # asyncio's words quote the address in Python's form.
    reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
    address = f"{f'[{host}]' if ':' in host else host}:{port}"
    problem = f"{address} cannot be used: {reason}"
    return ConfigurationError(option, problem, "name an address of this machine and a free port")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextlib.asynccontextmanager
async def serve(sites: Iterable[Site | UnixSite]) -> AsyncIterator[list[int]]:
    """Serve inside the block; yields the port of each site, 0 for a Unix socket. Raises CannotListen."""
    async with contextlib.AsyncExitStack() as servers:
        ports = []
        for site in sites:
            try:
                server = await _start(site)
            except OSError as error:
                raise CannotListen(site, error) from None
            servers.callback(server.close)
            ports.append(server.sockets[0].getsockname()[1] if isinstance(site, Site) else 0)
        yield ports


@contextlib.contextmanager
def serve_in_thread(sites: Iterable[Site | UnixSite]) -> Iterator[list[int]]:
    """Serve inside the block from a thread with an event loop of its own; yields the port of each site."""
    started = threading.Event()
    ports: list[int] = []
    faults: list[BaseException] = []
    stops: list[Callable[[], object]] = []

    async def run() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        stops.append(lambda: loop.call_soon_threadsafe(stop.set))
        async with serve(sites) as found:
            ports.extend(found)
            started.set()
            await stop.wait()

    def work() -> None:
        try:
            asyncio.run(run())
        except BaseException as fault:
            faults.append(fault)
        finally:
            started.set()

    thread = threading.Thread(target=work, name="holdfast-http", daemon=True)
    thread.start()
    started.wait()
    if faults:
        raise faults[0]
    try:
        yield ports
    finally:
        stops[0]()
        thread.join(_PATIENCE)


async def _start(site: Site | UnixSite) -> asyncio.Server:
    answer = _Answering(site)
    if isinstance(site, UnixSite):
        return await asyncio.start_unix_server(answer, site.path, limit=_LONGEST_REQUEST)
    return await asyncio.start_server(answer, site.host, site.port, limit=_LONGEST_REQUEST)


class _Connections:
    """The open connections of a site. Where there are too many, one is closed for the newest.

    It is the oldest that has sent no whole request, of the address with the most of these: neither idle connections nor
    slow ones shut out a probe.
    """

    def __init__(self) -> None:
        self._open: dict[asyncio.StreamWriter, str] = {}
        self._waiting: dict[str, dict[asyncio.StreamWriter, None]] = {}

    def enter(self, writer: asyncio.StreamWriter) -> None:
        """Note a new connection."""
        if len(self._open) >= _MOST_CONNECTIONS:
            waiting = max(self._waiting.values(), key=len, default=self._open)
            oldest = next(iter(waiting))
            self.leave(oldest)
            oldest.transport.abort()
        peer = writer.get_extra_info("peername")
        address = peer[0] if isinstance(peer, tuple) else ""
        self._open[writer] = address
        self._waiting.setdefault(address, {})[writer] = None

    def requested(self, writer: asyncio.StreamWriter) -> None:
        """Note that a request has arrived whole."""
        address = self._open.get(writer, "")
        waiting = self._waiting.get(address, {})
        waiting.pop(writer, None)
        if not waiting:
            self._waiting.pop(address, None)

    def leave(self, writer: asyncio.StreamWriter) -> None:
        """Note that a connection is closed."""
        self.requested(writer)
        self._open.pop(writer, None)


class _Answering:
    """Answers the requests of one site, one for each connection."""

    def __init__(self, site: Site | UnixSite) -> None:
        self._pages = site.pages
        self._names: Container[str] | None = None
        if isinstance(site, Site):
            names = (site.host, "localhost", socket.gethostname(), *site.allowed)
            self._names = frozenset(name.lower().rstrip(".") for name in names)
        self._connections = _Connections()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.enter(writer)
        try:
            async with asyncio.timeout(_PATIENCE):
                request = await reader.readuntil(b"\r\n\r\n")
            self._connections.requested(writer)
            writer.write(await self._respond(request))
            async with asyncio.timeout(_PATIENCE):
                await writer.drain()
        except TimeoutError:
            writer.transport.abort()  # or it would be kept, with what is not sent, for as long as the client likes
        except asyncio.LimitOverrunError:
            text = "the request is too long\n"
            writer.write(_encoded(Response(text, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)))
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client is gone
        finally:
            self._connections.leave(writer)
            writer.close()

    async def _respond(self, request: bytes) -> bytes:
        method, _, rest = request.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        target, _, protocol = rest.rpartition(" ")
        if not protocol.startswith("HTTP/1."):
            return _encoded(Response("this is not HTTP\n", HTTPStatus.BAD_REQUEST))
        fields = [line.decode("latin-1").partition(":") for line in request.split(b"\r\n")[1:]]
        named = [(name.strip().lower(), value.strip()) for name, _, value in fields]
        if not self._is_for_us([value for name, value in named if name == "host"]):
            text = "this host is not served; name it with --allow-host\n"
            return _encoded(Response(text, HTTPStatus.MISDIRECTED_REQUEST))
        if method not in ("GET", "HEAD"):
            text = "only GET is supported\n"
            return _encoded(Response(text, HTTPStatus.METHOD_NOT_ALLOWED), "Allow: GET, HEAD\r\n")
        path, _, query = target.partition("?")
        page = self._pages.get(path)
        if page is None:
            text = f"there is {' and '.join(self._pages)}\n"
            return _encoded(Response(text, HTTPStatus.NOT_FOUND))
        try:
            response = await page(Request(path, query, dict(named)))
        except Exception as error:
            logger().error("page_failed", path=path, error=redact_secrets(f"{type(error).__name__}: {error}")[:500])
            response = Response("this page could not be made; the log says why\n", HTTPStatus.INTERNAL_SERVER_ERROR)
        return _encoded(response, with_body=method == "GET")

    def _is_for_us(self, hosts: list[str]) -> bool:
        """Whether the one `Host` of a request is ours. An address is: only names can be made to lead elsewhere."""
        if self._names is None:
            return True
        if len(hosts) != 1:
            return False
        host = re.sub(r":[0-9]*$", "", hosts[0]).lower().rstrip(".")
        try:
            ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        except ValueError:
            return host in self._names
        return True


def _encoded(response: Response, headers: str = "", *, with_body: bool = True) -> bytes:
    body = response.body.encode("utf-8", "backslashreplace")
    head = (
        f"HTTP/1.1 {response.status.value} {response.status.phrase}\r\nContent-Type: {response.content_type}\r\n"
        f"Content-Length: {len(body)}\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
        f"{headers}Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (body if with_body else b"")
