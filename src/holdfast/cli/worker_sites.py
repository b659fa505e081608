"""Where `holdfast worker` answers: --health, --metrics, the socket for `worker status`, and the service manager."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from holdfast.cli import environment
from holdfast.errors import ConfigurationError
from holdfast.observability import health_pages
from holdfast.observability.health import Health, ReadHealth, State, joined, read_now
from holdfast.observability.http import (
    CannotListen,
    Page,
    Request,
    Response,
    Site,
    UnixSite,
    address_of,
    combined,
    is_loopback,
    serve_in_thread,
    unusable,
)
from holdfast.observability.runtime_dir import PAGE, NoAnswer, RuntimeDir, ask
from holdfast.observability.service_manager import ServiceManager
from holdfast.settings import WorkerSettings
from holdfast.telemetry import Notice, Observer

# Less than the two seconds for which `worker status` waits for the parent.
_PROCESS_PATIENCE = 1.0
_WATCH_INTERVAL = 10.0

Pages = Mapping[str, Page]

Asked = tuple[str, str]  # the option or the variable, and its address
Sites = Mapping[str, Site]  # by the option or the variable that asks for it


def sites(
    health: Asked | None,
    metrics: Asked | None,
    allowed: Iterable[str],
    read: ReadHealth,
    pages: Callable[[], Pages],
    databases: Iterable[str] = (),
) -> Sites:
    """The sites of --health and --metrics, as far as they are wanted; `databases` are the names of several."""
    found = {}
    if health is not None:
        name, address = health
        found[name] = Site(*address_of(address, name, 8080), health_pages.pages(read, databases), tuple(allowed))
    if metrics is not None:
        name, address = metrics
        found[name] = Site(*address_of(address, name, 9464), pages(), tuple(allowed))
    return found


@contextlib.contextmanager
def serving(sites: Sites, read: ReadHealth, socket_path: str | None, observe: Observer) -> Iterator[None]:
    """Serve the sites, and the health on the worker's socket, from a thread, until the block ends."""
    together = combined(sites.values())

    async def health(_request: Request) -> Response:
        return health_pages.response(await read_now(read), True)

    unix = [UnixSite(socket_path, {PAGE: health})] if socket_path is not None else []
    with contextlib.ExitStack() as stack:
        if socket_path is not None:
            stack.callback(_remove, socket_path)
        try:
            ports = stack.enter_context(serve_in_thread([*together, *unix]))
        except CannotListen as error:
            raise _unusable(error, sites) from None
        for site, port in zip(together, ports, strict=False):
            details: dict[str, object] = {"url": Site(site.host, port, {}).url, "pages": list(site.pages)}
            if not is_loopback(site.host):
                details["note"] = "every client that reaches this address can read them"
            observe(Notice("info", "pages_served", details))
        yield


def _unusable(error: CannotListen, sites: Sites) -> ConfigurationError:
    """Name each option that asks for the address which cannot be used."""
    site = error.site
    if isinstance(site, UnixSite):
        problem = f"cannot be used: {error.strerror}"
        return ConfigurationError("HOLDFAST_RUNTIME_DIR", problem, "name a directory of this user alone")
    asking = [option for option, each in sites.items() if (each.host, each.port) == (site.host, site.port)]
    return unusable(" and ".join(asking), site.host, site.port, error)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def own_socket(observe: Observer) -> str | None:
    """The path of the socket of this process; None where there can be none."""
    folder = _runtime_dir(observe)
    return None if folder is None else folder.of_worker(os.getpid())


def _runtime_dir(observe: Observer) -> RuntimeDir | None:
    """The directory of the sockets; None, with a warning, where there can be none."""
    folder = RuntimeDir(environment.runtime_dir())
    try:
        folder.prepare()
    except OSError as error:
        if environment.has_runtime_dir():
            problem = f"cannot be used: {error.strerror or error}"
            raise ConfigurationError("HOLDFAST_RUNTIME_DIR", problem, "name a directory of this user alone") from None
        details: dict[str, object] = {
            "error": f"{type(error).__name__}: {error}",
            "remedy": "set HOLDFAST_RUNTIME_DIR to a directory that this user can write to",
        }
        observe(Notice("warning", "status_unavailable", details))
        return None
    return folder


def service_manager() -> ServiceManager | None:
    """The service manager that started this process, if it wants to be told."""
    found = environment.service_manager()
    return None if found is None else ServiceManager(*found)


class ProcessesHealth:
    """The health of a parent and its worker processes, which it asks at their sockets."""

    def __init__(self, settings: WorkerSettings, count: int, observe: Observer) -> None:
        self.socket: str | None = None  # the parent's own
        self._sockets: list[str] = []
        self._settings = settings
        self._observe = observe
        self._pids: dict[int, int | None] = {}  # of the processes, as each last said
        self._unresponsive: set[int] = set()
        self._state: State = "running"
        if (folder := _runtime_dir(observe)) is not None:
            self.socket = folder.of_worker(os.getpid())
            self._sockets = [folder.of_process(os.getpid(), number) for number in range(1, count + 1)]

    def option(self, number: int) -> list[str]:
        """What tells a child its socket."""
        return ["--socket", self._sockets[number - 1]] if self._sockets else []

    def draining(self) -> None:
        """Note that the processes have been told to stop."""
        self._state = "draining"

    async def read(self) -> Health:
        """Ask all of them. One that is being started, or started again, is not ready, and no reason to start anew."""
        settings = self._settings
        own = Health(self._state, name=settings.shown_name, pid=os.getpid(), generation=settings.generation)
        if self._state == "draining":
            own = replace(own, not_ready=("it is draining: its processes end when their handlers have ended",))
        elif not self._sockets:
            own = replace(own, not_ready=("its processes cannot be asked: set HOLDFAST_RUNTIME_DIR",))
        return joined(own, await asyncio.gather(*map(self._ask, range(1, len(self._sockets) + 1))))

    async def _ask(self, number: int) -> Health:
        name = f"{self._settings.shown_name}/{number}"
        try:
            # Whoever asks the parent waits for two seconds, and is to hear from it which process does not answer.
            found = await asyncio.to_thread(ask, self._sockets[number - 1], timeout=_PROCESS_PATIENCE)
        except NoAnswer as silence:
            return Health(None, not_live=(str(silence),), name=name, pid=self._pids.get(number))
        if found is None:
            if self._state == "draining":
                return Health("stopped", not_ready=("it has stopped",), name=name, in_flight=0)
            return Health("starting", not_ready=("it is being started",), name=name, in_flight=0)
        self._pids[number] = found.pid
        if found.state == "stopped":  # it is about to end: its parent, which lives, starts it again or wanted that
            return replace(found, not_live=(), not_ready=("it has stopped",))
        return found

    async def watch(self) -> None:
        """Report a process that no longer answers, and one that does again, until it is cancelled."""
        while self._sockets:
            await asyncio.sleep(_WATCH_INTERVAL)
            for number, each in enumerate((await self.read()).processes, start=1):
                details: dict[str, object] = {"number": number, "worker": each.name, "pid": each.pid}
                if each.state is None and number not in self._unresponsive:
                    self._unresponsive.add(number)
                    details |= {"problem": each.problems[0], "remedy": "if that lasts, end it: it is started again"}
                    self._observe(Notice("warning", "worker_unresponsive", details))
                elif each.state is not None and number in self._unresponsive:
                    self._unresponsive.discard(number)
                    self._observe(Notice("info", "worker_responsive", details))


@contextlib.asynccontextmanager
async def told(manager: ServiceManager | None, read: ReadHealth) -> AsyncIterator[None]:
    """Tell the service manager, if there is one, how the worker is, until the block ends."""
    if manager is None:
        yield
        return
    telling = asyncio.create_task(manager.follow(read))
    try:
        yield
    finally:
        telling.cancel()
