"""`holdfast worker --health` and `holdfast worker status` (OBS-3, LSN-2): what probes see, whatever happens."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
from pathlib import Path

import asyncpg
import httpx
import pytest

from holdfast.cli.worker_sites import ProcessesHealth
from holdfast.embedded import EmbeddedPostgres
from holdfast.observability.health import Health
from holdfast.observability.health_pages import response
from holdfast.observability.http import Request, Response, UnixSite, serve_in_thread
from holdfast.observability.runtime_dir import PAGE
from holdfast.settings import WorkerSettings
from tests.observability.support import Command, worker_command, worker_status
from tests.operator.test_starting import IMPORTED, SLOW, python
from tests.worker.support import publish, until
from tests.worker.test_old_primary import free_port

pytestmark = pytest.mark.abandons_leases


@pytest.mark.slow
async def test_from_the_start_to_the_end(dsn: str, conn: asyncpg.Connection, tmp_path: Path) -> None:
    """Not ready at once after SIGTERM, live while the last handler runs, and nothing is left of the socket (OBS-3)."""
    async with worker_command(dsn, tmp_path, "--health", "0", "--name", "box") as worker:
        await worker.until_asked("ready", 200)
        status, body = await worker.asked("live")
        assert (status, body["live"], body["ready"], body["problems"], body["name"]) == (200, True, True, [], "box")
        assert (await worker.asked("live", host="evil.example"))[0] == 421
        (serving,) = worker.log("pages_served")
        assert serving["url"].startswith("http://127.0.0.1:") and "note" not in serving
        await publish(conn, "shop.waited", {"s": 2})
        await until(lambda: in_flight(worker, 1), what="a handler runs")
        worker.process.send_signal(signal.SIGTERM)
        body = await worker.until_asked("ready", 503, within=1)
        assert (body["state"], body["live"]) == ("draining", True) and "draining" in body["problems"][0]
        code, said, _ = await worker.status()
        assert code == 0 and said.startswith("worker box (pid ") and "live, not ready: it is draining" in said
        assert (await worker.status("--ready"))[0] == 1
        assert await worker.ended() == 0
        assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
async def test_the_addresses_come_from_the_environment(dsn: str, tmp_path: Path, processes: str) -> None:
    """For commands that would take the options for their own; the parent serves, and none of its processes (OBS-3)."""
    variables = {"HOLDFAST_HEALTH": "0", "HOLDFAST_METRICS": f"127.0.0.1:{free_port()}"}
    async with worker_command(dsn, tmp_path, "--processes", processes, environment=variables) as worker:
        await worker.until_asked("ready", 200, within=60)
        served = {page for entry in worker.log("pages_served") for page in entry["pages"]}
        assert served == {"/health/live", "/health/ready", "/metrics"}
        assert len(worker.log("pages_served")) == 2

        async def counted() -> bool:
            async with httpx.AsyncClient() as http:
                found = await http.get(f"http://{variables['HOLDFAST_METRICS']}/metrics")
            return f"holdfast_worker_processes {processes}.0" in found.text

        await until(counted, what="all processes have reported")


@pytest.mark.parametrize("variable", ["HOLDFAST_HEALTH", "HOLDFAST_METRICS"])
async def test_an_address_in_the_environment_that_is_none(dsn: str, tmp_path: Path, variable: str) -> None:
    """The error names the variable (OBS-3)."""
    async with worker_command(dsn, tmp_path, environment={variable: "here"}) as worker:
        assert await worker.ended() == 2
        assert f"error: {variable} 'here' is not an address" in (tmp_path / "log").read_text()


async def in_flight(worker: Command, count: int) -> bool:
    return bool((await worker.asked("live"))[1]["in_flight"] == count)


@pytest.mark.slow
async def test_the_loop_is_blocked(dsn: str, conn: asyncpg.Connection, tmp_path: Path) -> None:
    """Both answer all the time, and name the handler once that lasts (OBS-3)."""
    async with worker_command(dsn, tmp_path, "--health", "0", "--loop-patience", "1") as worker:
        await worker.until_asked("ready", 200)
        await publish(conn, "shop.slept", {"s": 4})
        await until(lambda: in_flight(worker, 1), what="a handler runs")
        body = await worker.until_asked("live", 503, within=4)
        assert body["problems"][0] == "the event loop has been blocked for 1 s; running: shop.sleep"
        code, said, _ = await worker.status()
        assert code == 1 and "not live: the event loop has been blocked" in said
        await worker.until_asked("ready", 200)
        assert (await worker.status("--ready"))[0] == 0


@pytest.mark.slow
async def test_the_database_is_away(own_server: EmbeddedPostgres, own_dsn: str, tmp_path: Path) -> None:
    """Live, not ready, not listening; and nothing of it is needed to ask (OBS-3, LSN-2)."""
    async with worker_command(own_dsn, tmp_path, "--health", "0", "--poll-interval", "0.5") as worker:
        await worker.until_asked("ready", 200)
        await asyncio.to_thread(own_server.kill)
        body = await worker.until_asked("ready", 503)
        assert body["live"] and "the database has been away" in body["problems"][0]
        assert own_dsn.partition("postgres:")[2].partition("@")[0] not in json.dumps(body)
        code, said, _ = await worker.status()
        assert code == 0 and "live, not ready: the database has been away" in said
        await asyncio.to_thread(own_server.start)
        await worker.until_asked("ready", 200)


async def test_there_is_no_database_yet(tmp_path: Path) -> None:
    """It serves before it is connected (OBS-3)."""
    dsn = f"postgresql://shop:secret@127.0.0.1:{free_port()}/shop"
    async with worker_command(dsn, tmp_path, "--health", "0") as worker:
        await worker.until_asked("live", 200)
        body = await worker.until_asked("ready", 503)
        assert body["state"] == "starting" and "secret" not in json.dumps(body)
        worker.process.send_signal(signal.SIGTERM)
        assert await worker.ended() == 0


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_several_processes_have_one_endpoint(dsn: str, conn: asyncpg.Connection, tmp_path: Path) -> None:
    """Ready when each is; one that died is started again, one that hangs is not live; draining at once (OBS-3)."""
    async with worker_command(dsn, tmp_path, "--health", "0", "--processes", "2", "--name", "wide") as worker:
        body = await worker.until_asked("ready", 200)
        assert [each["name"] for each in body["processes"]] == ["wide/1", "wide/2"]
        code, said, _ = await worker.status("--name", "wide", "--ready")
        assert code == 0 and said.count("\n") == 1 and "2 processes" in said
        hanging, dying = worker.children()
        os.kill(hanging, signal.SIGSTOP)
        body = await worker.until_asked("live", 503)
        assert "it does not answer within 1 s" in body["problems"][0] and body["problems"][0].startswith("process ")
        (frozen,) = [each for each in body["processes"] if not each["live"]]
        assert [frozen[name] for name in ("state", "generation", "in_flight", "pid")] == [None, None, None, hanging]
        # The parent answers in time, and it is not the parent that is blamed.
        code, said, _ = await worker.status()
        assert code == 1 and f"not live: process {frozen['name'][-1]}: it does not answer within 1 s" in said
        await until(lambda: worker.log("worker_unresponsive"), within=20, what="a line says so")
        (told,) = worker.log("worker_unresponsive")
        assert (told["worker"], told["pid"], told["level"]) == (frozen["name"], hanging, "warning")
        os.kill(hanging, signal.SIGCONT)
        await worker.until_asked("ready", 200)
        os.kill(dying, signal.SIGKILL)
        await until(lambda: worker.log("worker_died"), what="a line says so")
        (died,) = worker.log("worker_died")
        assert (died["worker"], died["pid"], died["signal"]) == (f"wide/{died['number']}", dying, "SIGKILL")
        body = await worker.until_asked("ready", 503)
        assert body["live"] and "it is being started" in body["problems"][0]
        await worker.until_asked("ready", 200)
        await publish(conn, "shop.waited", {"s": 2})
        await until(lambda: in_flight(worker, 1), what="a handler runs")
        worker.process.send_signal(signal.SIGTERM)
        body = await worker.until_asked("ready", 503, within=1)
        assert body["state"] == "draining" and "its processes end" in body["problems"][0]
        assert await worker.ended() == 0
        assert list((tmp_path / "run").iterdir()) == []
        assert {(entry["worker"], bool(entry["pid"])) for entry in worker.log()} == {
            ("wide", True), ("wide/1", True), ("wide/2", True),
        }, "lines of several processes can be told apart"  # fmt: skip


@pytest.mark.slow
async def test_a_process_that_hangs_or_is_killed(dsn: str, tmp_path: Path) -> None:
    """The exec probe of a process that cannot answer, and of none (OBS-3)."""
    async with worker_command(dsn, tmp_path) as worker:
        await until(lambda: worker_status(tmp_path, "--ready")[0] == 0, what="it is ready")
        (found,) = json.loads((await worker.status("--json"))[1])
        assert (found["ready"], found["pid"], found["listener"] is not None) == (True, worker.process.pid, True)
        assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
        worker.process.send_signal(signal.SIGSTOP)
        code, said, _ = await worker.status()
        blamed = f"(pid {worker.process.pid}): not live: it does not answer within 2 s: it is stopped, or too busy\n"
        assert code == 1 and said.endswith(blamed), "and nothing is invented"
        (found,) = json.loads((await worker.status("--json"))[1])
        assert (found["state"], found["generation"], found["in_flight"]) == (None, None, None)
        worker.process.send_signal(signal.SIGKILL)
        await worker.ended()
        code, said, errors = await worker.status()
        assert (code, said) == (1, "") and errors.startswith("error: no worker of this user runs here")
        problem, remedy = errors.splitlines()
        assert problem.endswith("/run") and remedy.startswith("try: start it ") and "HOLDFAST_RUNTIME_DIR" in remedy
    with socket.socket(socket.AF_UNIX) as killed:  # of a process under --processes
        killed.bind(str(tmp_path / "run" / "process-4194305-1.sock"))
    async with worker_command(dsn, tmp_path) as worker:
        await until(lambda: worker_status(tmp_path, "--ready")[0] == 0, what="another is ready")
        assert len(list((tmp_path / "run").iterdir())) == 1, "the sockets of killed ones are removed"


@pytest.mark.slow
async def test_one_of_several_workers(dsn: str, tmp_path: Path) -> None:
    """--name asks one; without it, each has a line, and all must be well (OBS-3)."""
    async with worker_command(dsn, tmp_path, "--name", "a b\x1b[31m") as one, worker_command(dsn, tmp_path) as two:
        await until(lambda: worker_status(tmp_path, "--ready")[1].count("ready (") == 2, what="both are ready")
        code, said, _ = await one.status("--name", "a b\x1b[31m")
        assert code == 0 and said.count("\n") == 1 and "\x1b" not in said
        code, _, errors = await one.status("--name", "another")
        assert code == 1 and "no worker of this user named another runs here" in errors
        two.process.send_signal(signal.SIGSTOP)
        code, said, _ = await one.status()
        assert code == 1 and said.count("\n") == 2
        two.process.send_signal(signal.SIGCONT)


def test_nothing_runs(tmp_path: Path) -> None:
    """Not even the directory is there, or it is no directory (OBS-3)."""
    assert worker_status(tmp_path)[0] == 1
    assert worker_status(tmp_path, HOLDFAST_RUNTIME_DIR=str(tmp_path / "no" / "where"))[0] == 1
    (tmp_path / "file").write_text("")
    code, _, errors = worker_status(tmp_path, HOLDFAST_RUNTIME_DIR=str(tmp_path / "file"))
    assert code == 1 and "no worker" in errors
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "worker-1.sock").write_text("no socket")
    (tmp_path / "run" / "worker-x.sock").write_text("")
    assert worker_status(tmp_path)[0] == 1


@pytest.mark.parametrize("made", ["by another user", "open to others", "a link"])
async def test_a_directory_that_others_may_have_made(tmp_path: Path, made: str) -> None:
    """What answers there proves nothing; the directory is named as the problem, with the remedy (OBS-3, SEC-1)."""
    folder, elsewhere = tmp_path / f"holdfast-{os.getuid()}", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if made == "a link":
        folder.symlink_to(elsewhere)
    else:
        folder.mkdir(mode=0o700)
    if made == "open to others":
        folder.chmod(0o755)
    elif made == "by another user":
        if os.getuid() != 0:
            pytest.skip("only root can make a directory of another user")
        os.chown(folder, 12345, 12345)

    async def health(_request: Request) -> Response:
        return Response(json.dumps(Health("running", name="forged", pid=1).as_data()))

    with serve_in_thread([UnixSite(str(folder / "worker-1.sock"), {PAGE: health})]):
        code, said, errors = worker_status(tmp_path, HOLDFAST_RUNTIME_DIR="", TMPDIR=str(tmp_path))
    assert (code, said) == (1, "")
    assert f"{folder} is not a directory of this user alone\ntry: set HOLDFAST_RUNTIME_DIR" in errors
    assert "start it" not in errors


def test_a_probe_is_quick() -> None:
    """It is run every few seconds: it imports neither the worker nor a driver nor asyncio (OBS-3)."""
    code, imported = json.loads(python("-c", IMPORTED, "worker", "status", "--name", "nobody").stderr.splitlines()[-1])
    assert (code, SLOW & set(imported) - {"pydantic", "pydantic_core"}) == (1, set()), "typer itself may import those"
    assert not {name for name in imported if name.startswith("holdfast.worker")}


async def refused(dsn: str, directory: Path, *options: str, **environment: str) -> str:
    async with worker_command(dsn, directory, *options, environment=environment) as worker:
        assert await worker.ended() == 2
    return (directory / "log").read_text()


async def test_an_address_that_cannot_be_used(dsn: str, tmp_path: Path) -> None:
    """Told at the start, in two lines, with the option and the address of the one that is in use (OBS-3)."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = await refused(dsn, tmp_path, "--metrics", "127.0.0.1:0", "--health", address)
        both = await refused(dsn, tmp_path, "--metrics", address, "--health", address)
    assert f"error: --health {address} cannot be used: Address already in use\ntry: " in said
    assert f"error: --health and --metrics {address} cannot be used" in both and "Traceback" not in said + both
    said = await refused(dsn, tmp_path, "--health", "nonsense:x")
    assert "--health 'nonsense:x' is not an address to listen on\ntry: write 127.0.0.1:8080" in said


async def test_a_runtime_directory_that_cannot_be_used(dsn: str, tmp_path: Path) -> None:
    """A chosen one is an error; without a default one the worker works, and says what is missing (OBS-3, SEC-1)."""
    (tmp_path / "open").mkdir(mode=0o755)
    for path in (tmp_path / "open", tmp_path / ("x" * 90), tmp_path / "hf_handlers.py"):
        said = await refused(dsn, tmp_path, HOLDFAST_RUNTIME_DIR=str(path))
        assert "HOLDFAST_RUNTIME_DIR cannot be used" in said and "Traceback" not in said
    environment = {"HOLDFAST_RUNTIME_DIR": "", "TMPDIR": str(tmp_path / "hf_handlers.py")}
    async with worker_command(dsn, tmp_path, "--health", "0", environment=environment) as worker:
        await worker.until_asked("ready", 200)
        (warning,) = worker.log("status_unavailable")
        assert "HOLDFAST_RUNTIME_DIR" in warning["remedy"]


async def test_a_process_that_has_stopped_is_no_reason_to_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While --processes drains, those that are done first have stopped, and are not started again (OBS-3)."""

    async def stopped(_request: Request) -> Response:
        return response(Health("stopped", not_live=("it has stopped",), name="wide/1"), well=True)

    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path / "run"))
    children = ProcessesHealth(WorkerSettings(name="wide", generation=7), 2, lambda _fact: None)
    with serve_in_thread([UnixSite(children.option(1)[1], {PAGE: stopped})]):
        ending, gone = (await children.read()).processes
        assert (ending.live, ending.ready, ending.name, ending.problems) == (True, False, "wide/1", ("it has stopped",))
        assert (gone.state, gone.name, gone.problems) == ("starting", "wide/2", ("it is being started",))
        children.draining()
        found = await children.read()
    assert found.live and found.in_flight == 0
    assert [(each.state, each.problems) for each in found.processes] == [("stopped", ("it has stopped",))] * 2
