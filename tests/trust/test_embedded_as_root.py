"""Root starts, restarts and stops a server whose user puts links and forged files in its way (SEC-1, T6)."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.embedded import EmbeddedPostgres, EmbeddedPostgresError
from holdfast.embedded.account import server_account

pytestmark = [
    pytest.mark.trust,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root hands the server to another user"),
]


@pytest.fixture
def parent() -> Iterator[Path]:
    """A directory that every user can enter and only root can write to."""
    directory = Path(tempfile.mkdtemp(prefix="holdfast-test-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def victim(parent: Path) -> Iterator[Path]:
    """A file of root's that nothing may touch."""
    file = parent / "victim"
    file.write_text("root's own\n")
    file.chmod(0o600)
    before = file.stat()
    yield file
    after = file.stat()
    assert file.read_text() == "root's own\n"
    assert (after.st_uid, after.st_gid, after.st_mode) == (before.st_uid, before.st_gid, before.st_mode)


def as_server(*command: str) -> int:
    """Run a command as the server's user, which an intruder in the server can."""
    return subprocess.run(command, cwd="/", capture_output=True, **server_account().popen_arguments()).returncode


def test_the_server_runs_as_a_user_of_its_own(parent: Path) -> None:
    """The processes are not root's; the files that root writes are, and so is their directory (SEC-1, T6)."""
    root = parent / "server"
    with EmbeddedPostgres(root) as server:
        account = server_account()
        assert Path(f"/proc/{server.pid}").stat().st_uid == account.uid == (root / "cluster").stat().st_uid != 0
        for path in (root, root / "password", root / "port", root / "server.log"):
            assert path.stat().st_uid == 0 and not path.stat().st_mode & 0o022, path


def test_links_and_a_forged_pid_file(parent: Path, victim: Path) -> None:
    """With links wherever the server's user can put them, nothing outside is touched or signalled (SEC-1, T6)."""
    root = parent / "server"
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        with EmbeddedPostgres(root) as server:
            for name in ("server.log", "port", "password"):
                assert as_server("ln", "-sf", str(victim), str(root / name)) != 0, "the directory is root's"
            assert as_server("mv", str(root / "cluster"), str(root / "elsewhere")) != 0

            file, first = root / "cluster" / "postmaster.pid", server.pid
            lines = file.read_text().splitlines()
            file.write_text("\n".join([str(stranger.pid), *lines[1:]]) + "\n")
            assert server.pid == first, "as its parent knows it"
            server.restart()
            assert server.pid not in (first, stranger.pid)

            server.kill()
            assert as_server("ln", "-sf", str(victim), str(file)) == 0
            server.start()
            file.unlink()
            assert as_server("ln", "-sf", str(victim), str(file)) == 0
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_version_file_that_names_a_secret(parent: Path) -> None:
    """An error text does not quote what a link leads to (SEC-1, T6)."""
    root, secret = parent / "server", parent / "secret"
    secret.write_text("S3cr3tCanary")
    EmbeddedPostgres(root).start().stop()
    assert as_server("ln", "-sf", str(secret), str(root / "cluster" / "PG_VERSION")) == 0
    with pytest.raises(EmbeddedPostgresError, match="not a data directory") as refused:
        EmbeddedPostgres(root).start()
    assert "Canary" not in str(refused.value)


@pytest.mark.parametrize("name", ["server.log", "port", "password", "cluster"])
def test_a_directory_that_belonged_to_the_server(parent: Path, victim: Path, name: str) -> None:
    """A directory of the server's user is taken from that user, and links in it are refused (SEC-1, T6)."""
    root, account = parent / "server", server_account()
    root.mkdir()
    (root / "password").write_text("secret\n")
    assert account.uid is not None and account.gid is not None
    os.chown(root, account.uid, account.gid)
    assert as_server("ln", "-sf", str(victim), str(root / name)) == 0
    with pytest.raises(EmbeddedPostgresError, match="is a link"):
        EmbeddedPostgres(root).start()
    assert root.stat().st_uid == 0


def test_a_parent_that_the_server_can_write_to(parent: Path) -> None:
    """The whole directory could be exchanged for another, so it is refused (SEC-1, T6)."""
    account = server_account()
    loose = parent / "loose"
    loose.mkdir()
    assert account.uid is not None and account.gid is not None
    os.chown(loose, account.uid, account.gid)
    with pytest.raises(EmbeddedPostgresError, match="can rename"):
        EmbeddedPostgres(loose / "server").start()
