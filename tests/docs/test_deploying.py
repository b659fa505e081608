"""The pages about deploying and upgrading: every command, in their order, while events are published and handled."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from chaos.releases import make_next
from tests.docs.support import ROOT, Block, blocks, parameters
from tests.worker.support import until

pytestmark = pytest.mark.newcomer

DOCS = ROOT / "docs"

HANDLERS = """
import asyncpg
from holdfast import EventEnvelope, HandlerRegistry

registry = HandlerRegistry()


@registry.handler("order.placed", name="billing.charge")
async def charge(event: EventEnvelope, tx: asyncpg.Connection) -> None:
    await tx.execute("INSERT INTO ledger (order_id) VALUES ($1)", event.payload["order_id"])
"""

# Two producers: a service, whose number is that of its deployment, and a script, which has none. Each writes an order
# and its event in one transaction, until there is a file named stop.
LOAD = """
import asyncio, os, asyncpg
from pathlib import Path
from holdfast import Publisher

async def order(connection, publisher):
    async with connection.transaction():
        number = await connection.fetchval("INSERT INTO orders DEFAULT VALUES RETURNING id")
        await publisher.publish(connection, "order.placed", {"order_id": number})
    await asyncio.sleep(0.02)

async def script(publisher):
    connection = await asyncpg.connect(os.environ["HOLDFAST_DSN"])
    while not Path("stop").exists():
        await order(connection, publisher)

async def service():
    connection, running, publisher = await asyncpg.connect(os.environ["HOLDFAST_DSN"]), "", Publisher("shop")
    while not Path("stop").exists():
        if (wanted := Path("wanted").read_text()) != running:
            os.environ["HOLDFAST_GENERATION"] = running = wanted  # a new process has it from its start
            publisher = Publisher("shop")
            Path("running").write_text(running)
        await order(connection, publisher)

async def main():
    await asyncio.gather(script(Publisher("shop")), service())

asyncio.run(main())
"""

# Wait for a condition in the database: wait.py CONDITION
WAIT = """
import asyncio, os, sys, asyncpg

async def main():
    connection = await asyncpg.connect(os.environ["HOLDFAST_DSN"])
    async with asyncio.timeout(60):
        while not await connection.fetchval(sys.argv[1]):
            await asyncio.sleep(0.1)

asyncio.run(main())
"""

PRELUDE = """
set -euo pipefail
deploy_service() {
    echo -n "$1" > wanted
    for _ in $(seq 600); do [ "$(cat running)" = "$1" ] && return; sleep 0.1; done
    exit 9
}
wait_for() { python wait.py "$1"; }
"""


@pytest.fixture
def shop(dsn: str, tmp_path: Path) -> dict[str, str]:
    """A folder with an application, and an environment that finds the command and the database."""
    for name, text in {"app/handlers.py": HANDLERS, "load.py": LOAD, "wait.py": WAIT}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "wanted").write_text("0")
    kept = {name: value for name, value in os.environ.items() if name != "HOLDFAST_GENERATION"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**kept, "PATH": path, "HOLDFAST_DSN": dsn, "PWD": str(tmp_path)}


@pytest.fixture
async def load(conn: asyncpg.Connection, shop: dict[str, str]) -> Any:
    """The producers; ended by `stop`."""
    await conn.execute(
        "CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY); CREATE TABLE ledger (order_id bigint)"
    )
    process = subprocess.Popen(
        [sys.executable, "load.py"], cwd=shop["PWD"], env=shop, stderr=subprocess.PIPE, text=True
    )
    try:
        await until(lambda: conn.fetchval("SELECT count(*) > 10 FROM orders"), what="orders are placed")
        yield process
    finally:
        process.kill()
        process.communicate()


def commands(page: str, meanwhile: dict[str, str]) -> str:
    """The commands of a page, with what its comments leave to other people in their place."""
    lines = "\n".join(block.text for block in blocks("sh", pages=[DOCS / page])).splitlines()
    script = []
    for line in lines:
        if line.startswith("# "):
            found = [(re.fullmatch(pattern, line[2:]), does) for pattern, does in meanwhile.items()]
            (line,) = [match.expand(does) for match, does in found if match]
        script.append(line)
    return "\n".join(script)


async def typed(script: str, shop: dict[str, str]) -> str:
    """Run a script in one shell that ends at the first command that fails; nothing that it started is left."""
    bash = ["/bin/bash", "-c", f"{PRELUDE}trap 'kill -KILL $(jobs -p) 2> /dev/null || true' EXIT\nset -x\n{script}"]
    with Path(shop["PWD"], "output").open("w+") as output:
        process = await asyncio.create_subprocess_exec(*bash, cwd=shop["PWD"], env=shop, stdout=output, stderr=output)
        code = await asyncio.wait_for(process.wait(), 420)
        output.seek(0)
        said = output.read()
    logs = "".join(f"\n{file.name}: {file.read_text()[-1500:]}" for file in Path(shop["PWD"]).glob("*.log"))
    assert code == 0, f"{said[-4000:]}{logs}"
    return said


async def nothing_is_lost(conn: asyncpg.Connection, load: subprocess.Popen[str]) -> None:
    """Every order is in the ledger, once, and nothing failed."""
    assert load.wait(20) == 0, load.stderr and load.stderr.read()
    orders = await conn.fetchval("SELECT count(*) FROM orders")
    assert orders > 100
    assert await conn.fetchval("SELECT count(*) FROM core.outbox WHERE status <> 'delivered'") == 0
    assert await conn.fetchval("SELECT count(*) FROM core.outbox") == orders
    assert await conn.fetchrow("SELECT count(*), count(DISTINCT order_id) FROM ledger") == (orders, orders)


@pytest.mark.nightly("page that is typed")
@pytest.mark.slow
@pytest.mark.timeout(500)
async def test_deploying(conn: asyncpg.Connection, shop: dict[str, str], load: subprocess.Popen[str]) -> None:
    """Begin, deploy, retire, roll back both ways: no event is lost, and none handled twice (GEN-3, OPS-6)."""
    open_ = "SELECT count(*) = 0 FROM core.outbox WHERE settled_at IS NULL AND generation ="
    meanwhile = {
        r"deploy the service with HOLDFAST_GENERATION=(\$\w+)": r'deploy_service "\1"',
        r"generation (\$\w+) has no open events": rf'wait_for "{open_} \1"',
        r"the deployment of v1\.4\.3 fails, .*": 'wait_for "SELECT count(*) > 5 FROM core.outbox WHERE generation = 4"',
    }
    page = commands("deploying.md", meanwhile)
    # Before the first deployment there were workers of generation 0, which finish what is theirs.
    first = "holdfast worker app.handlers:registry --name zero 2> zero.log & ZERO=$!\n"
    end = f'\ntouch stop\nwait_for "{open_.replace(" AND generation =", "")}"\nkill -TERM $ZERO $OLD; wait $ZERO $OLD'
    said = await typed(first + page + end, shop)
    await nothing_is_lost(conn, load)
    rows = await conn.fetch("SELECT generation, retired_at IS NOT NULL FROM core.deployments ORDER BY 1")
    assert [tuple(row) for row in rows] == [(1, True), (2, True), (3, False), (4, True)]
    assert "moved from generation 4 to 3" in said


@pytest.mark.nightly("page that is typed")
@pytest.mark.slow
@pytest.mark.timeout(500)
async def test_upgrading(
    conn: asyncpg.Connection,
    shop: dict[str, str],
    load: subprocess.Popen[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """To a next release and back, with the workers replaced each time (OPS-6)."""
    following = make_next(tmp_path_factory.mktemp("next")).environment["PYTHONPATH"]
    replace = """
replace_workers() {
    holdfast worker app.handlers:registry --name "$1" 2> "$1.log" & NEW=$!
    wait_for "SELECT EXISTS (SELECT FROM core.workers WHERE name = '$1' AND stopped_at IS NULL)"
    if [ -n "${OLD:-}" ]; then kill -TERM $OLD; wait $OLD; fi
    OLD=$NEW
}
"""
    page = commands("upgrading.md", {"replace the processes": "replace_workers $RELEASE"})
    # What stands under "Roll forward" is typed with the next release, the rest with this one.
    forward, back = page.split("replace_workers $RELEASE\nholdfast migrate apply")
    script = (
        f"{replace}RELEASE=this; replace_workers this; RELEASE=next; export PYTHONPATH={following}\n{forward}\n"
        f"unset PYTHONPATH; RELEASE=that\nreplace_workers $RELEASE\nholdfast migrate apply{back}\n"
        'touch stop; wait_for "SELECT count(*) = 0 FROM core.outbox WHERE settled_at IS NULL"\n'
        "kill -TERM $OLD; wait $OLD"
    )
    await typed(script, shop)
    await nothing_is_lost(conn, load)
    assert await conn.fetchval("SELECT name FROM core.migrations ORDER BY version DESC LIMIT 1") == "next"


# --- what service managers read ---


UNITS = blocks("ini", pages=[ROOT / "docs" / "deploying.md"])
MANIFESTS = blocks("yaml")


@parameters(UNITS)
def test_units_are_accepted_by_systemd(block: Block, tmp_path: Path) -> None:
    """Each line is known, and the command exists; without systemd, each line has the form of a setting (OPS-4)."""
    for line in block.text.splitlines():
        assert re.fullmatch(r"|\[\w+\]|[A-Z]\w+=\S.*", line), line
    options = dict(line.split("=", 1) for line in block.text.splitlines() if "=" in line)
    grace = int(re.findall(r"--grace (\d+)", options["ExecStart"])[0])
    assert int(options["TimeoutStopSec"]) > grace + 15
    if not (analyze := shutil.which("systemd-analyze")):
        return
    unit = tmp_path / "holdfast-worker@12.service"
    unit.write_text(
        block.text.replace("/srv/shop/.venv/bin/holdfast", sys.executable).replace("User=shop", "User=root")
    )
    run = subprocess.run([analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60)
    ours = [line for line in run.stderr.splitlines() if unit.name in line]
    assert ours == [], run.stderr


def parsed(text: str) -> Any:
    """The value of the part of YAML that the pages use: maps, lists of maps or in brackets, plain and quoted texts."""
    lines = [(len(line) - len(line.lstrip()), line.strip()) for line in text.splitlines() if line.strip()]
    value, rest = _value(lines, 0)
    assert rest == [], f"does not fit in: {rest[0]}"
    return value


def _value(lines: list[tuple[int, str]], indent: int) -> tuple[Any, list[tuple[int, str]]]:
    if lines[0][1].startswith("- "):
        entries = []
        while lines and lines[0][0] == indent and lines[0][1].startswith("- "):
            entry, lines = _value([(indent + 2, lines[0][1][2:]), *lines[1:]], indent + 2)
            entries.append(entry)
        return entries, lines
    found: dict[str, Any] = {}
    while lines and lines[0][0] == indent:
        key, colon, scalar = lines[0][1].partition(":")
        assert colon and re.fullmatch(r"\w+", key) and key not in found, lines[0][1]
        lines = lines[1:]
        if scalar:
            assert scalar.startswith(" "), scalar
            found[key] = _scalar(scalar.strip())
        else:
            assert lines and lines[0][0] > indent, f"{key} has no value"
            found[key], lines = _value(lines, lines[0][0])
    return found, lines


def _scalar(text: str) -> Any:
    if text[0] in '["':
        return json.loads(text)
    assert not re.search(r"[#{}&*!|>%@`]|: ", text), text
    return int(text) if text.isdigit() else text


def documents() -> Iterator[dict[str, Any]]:
    for block in MANIFESTS:
        for text in block.text.split("---\n"):
            yield parsed(text)


def test_manifests_are_whole(tmp_path: Path) -> None:
    """Labels agree, a pod has time to stop, the generation is given; kubectl reads them, where it is (OPS-4)."""
    compose, job, deployment, budget, probes, service = documents()
    assert [each.get("kind") for each in (job, deployment, budget)] == ["Job", "Deployment", "PodDisruptionBudget"]
    assert [list(each) for each in (compose, probes, service)] == [
        ["services"],
        ["livenessProbe", "readinessProbe"],
        ["lifecycle", "terminationGracePeriodSeconds"],
    ]
    spec = deployment["spec"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    assert spec["selector"] == budget["spec"]["selector"]
    (worker,) = spec["template"]["spec"]["containers"]
    grace = int(worker["command"][worker["command"].index("--grace") + 1])
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > grace + 15
    assert {each["name"]: each.get("value") for each in worker["env"]} == {
        "POD_NAME": None,
        "HOLDFAST_GENERATION": "GENERATION",
    }
    if kubectl := shutil.which("kubectl"):
        whole = [block.text for block in MANIFESTS if "apiVersion" in block.text]
        (tmp_path / "shop.yaml").write_text("---\n".join(whole))
        (tmp_path / "kustomization.yaml").write_text("resources: [shop.yaml]\n")
        run = subprocess.run([kubectl, "kustomize", str(tmp_path)], capture_output=True, text=True, timeout=60)
        assert run.returncode == 0, run.stderr
        assert run.stdout.count("kind: ") == 3


@pytest.mark.parametrize("wrong", ["a:\n  b: 1\n c: 2\n", "a: 1\na: 2\n", "a: {b: 1}\n", "a\n", "a:\n- b\n", "a:\n"])
def test_the_check_of_manifests_can_fail(wrong: str) -> None:
    with pytest.raises((AssertionError, IndexError, ValueError)):
        parsed(wrong)
