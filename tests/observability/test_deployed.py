"""What docs/deploying.md gives to systemd, Docker and Kubernetes (OBS-3): its commands are run, its probes asked."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.docs.support import ROOT, blocks
from tests.docs.test_deploying import documents
from tests.observability.support import Command
from tests.observability.test_service_manager import Manager
from tests.worker.support import until
from tests.worker.test_old_primary import free_port

pytestmark = pytest.mark.abandons_leases

HANDLERS = """
from holdfast import HandlerRegistry

registry = HandlerRegistry()

@registry.handler("order.placed", name="billing.charge")
async def charge(event): ...
"""


class Container:
    """Runs commands as a container of the page would: in a directory of the application, with its environment."""

    def __init__(self, directory: Path, dsn: str) -> None:
        (directory / "app").mkdir()
        (directory / "app" / "handlers.py").write_text(HANDLERS)
        self.directory = directory
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        runtime = str(directory / "run")
        self.environment = {**os.environ, "PATH": path, "HOLDFAST_DSN": dsn, "HOLDFAST_RUNTIME_DIR": runtime}

    @asynccontextmanager
    async def runs(self, command: list[str], **variables: str) -> AsyncIterator[Command]:
        environment = {**self.environment, **variables}
        with (self.directory / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(*command, cwd=self.directory, env=environment, stderr=log)
        try:
            yield Command(process, self.directory)
            process.terminate()
            assert await asyncio.wait_for(process.wait(), 20) == 0, (self.directory / "log").read_text()
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def code(self, command: list[str]) -> int:
        done = await asyncio.to_thread(
            subprocess.run, command, cwd=self.directory, env=self.environment, capture_output=True, timeout=30
        )
        return done.returncode


@pytest.fixture
def container(dsn: str, tmp_path: Path) -> Container:
    return Container(tmp_path, dsn)


def manifest(kind: str) -> Any:
    (found,) = [each for each in documents() if each.get("kind") == kind]
    return found


async def test_the_probes_of_kubernetes(container: Container) -> None:
    """Each of them succeeds at the worker of the manifest, over HTTP and as a command (OBS-3)."""
    (worker,) = manifest("Deployment")["spec"]["template"]["spec"]["containers"]
    (port,) = [each["containerPort"] for each in worker["ports"]]
    command = [word.replace("$(POD_NAME)", "shop-worker-1") for word in worker["command"]]
    assert command[-1] == f"0.0.0.0:{port}"
    command[-1] = f"127.0.0.1:{free_port()}"
    kinds = ("startupProbe", "livenessProbe", "readinessProbe")
    asked = [worker[kind]["httpGet"] for kind in kinds]
    assert {each["port"] for each in asked} == {worker["ports"][0]["name"]}
    (probes,) = [each for each in documents() if list(each) == ["livenessProbe", "readinessProbe"]]
    async with container.runs(command, HOLDFAST_GENERATION="0") as running:
        for each in asked:
            assert each["path"].startswith("/health/")
            await running.until_asked(each["path"].removeprefix("/health/"), 200)
        for probe in probes.values():
            assert await container.code(probe["exec"]["command"]) == 0
        assert "shop-worker-1" in (await running.status())[1]
    for probe in probes.values():
        assert await container.code(probe["exec"]["command"]) == 1, "it has ended"


async def test_the_commands_of_docker(container: Container) -> None:
    """Of the Dockerfile and of compose; both say the same (OBS-3)."""
    (file,) = blocks("dockerfile", pages=[ROOT / "docs" / "deploying.md"])
    command = json.loads(re.findall(r"^CMD (\[.*\])$", file.text, re.MULTILINE)[0])
    check = json.loads(re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", file.text, re.MULTILINE)[0])
    (compose,) = [each for each in documents() if "services" in each]
    migrate, worker = compose["services"]["migrate"], compose["services"]["worker"]
    assert (worker["command"], worker["healthcheck"]["test"]) == (command, ["CMD", *check])
    grace = int(command[command.index("--grace") + 1])
    assert int(worker["stop_grace_period"].removesuffix("s")) > grace + 15
    assert await container.code(migrate["command"]) == 0
    async with container.runs(command):

        async def healthy() -> bool:
            return await container.code(check) == 0

        await until(healthy, what="it is healthy")


async def test_the_command_of_the_unit(container: Container, tmp_path: Path) -> None:
    """Systemd is told that it is ready, by the command of the unit (OBS-3)."""
    (unit,) = [block.text for block in blocks("ini") if "holdfast worker" in block.text]
    settings = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line)
    assert settings["Type"] == "notify" and int(settings["WatchdogSec"]) > 30
    assert f"/run/{settings['RuntimeDirectory']}" in unit and settings["RuntimeDirectoryMode"] == "0700"
    command = settings["ExecStart"].split()
    assert command[0].endswith("/bin/holdfast")
    manager = Manager(str(tmp_path / "notify"))
    variables = {**manager.variables, "WATCHDOG_USEC": f"{int(settings['WatchdogSec'])}000000"}
    async with container.runs(["holdfast", *command[1:]], **variables):
        await manager.until("READY=1")
        await manager.until("WATCHDOG=1")
    assert manager.times("STOPPING=1")
    manager.close()
