"""One command line for several databases (SCL-4): which commands read all of them, and which want one."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncpg
import httpx
import psycopg
import pytest

from holdfast.cli import doctor, main
from holdfast.cli.databases import named, one
from holdfast.cli.next_commands import TYPED_AS, as_typed, remember
from holdfast.cli.output import wrapped
from holdfast.errors import ConfigurationError
from holdfast.operator import Finding, Report
from tests.observability.scraping import command, scraped
from tests.worker.support import drained, publish, until

NOWHERE = "postgresql://postgres@127.0.0.1:1/nowhere"
APP = """
from holdfast import HandlerRegistry, Reject

registry = HandlerRegistry()

@registry.handler("order.placed", name="billing.charge")
async def charge(event, context):
    print(context.database, flush=True)
    return Reject("no card") if event.payload.get("bad") else None
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory for sockets, whose paths have a bound that pytest's own directories pass."""
    with tempfile.TemporaryDirectory(prefix="hf-") as folder:
        yield Path(folder)


@pytest.fixture
def holdfast(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("HOLDFAST_ACTOR", "ada@example.com")
    monkeypatch.setattr(sys, "stdin", io.StringIO())

    def run(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert isinstance(end.value.code, int)
        return end.value.code, out, err

    return run


@pytest.mark.slow
async def test_a_worker_command_serves_them_and_operators_see_each(
    dsn: str,
    conn: asyncpg.Connection,
    other_dsn: str,
    other: asyncpg.Connection,
    tmp_path: Path,
    short_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    holdfast: Run,
) -> None:
    """Two processes serve two databases beside one that is away; health, metrics and logs name each (SCL-4)."""
    (tmp_path / "app.py").write_text(APP)
    several = f"orders={dsn} billing={other_dsn} gone={NOWHERE}"
    words = ("worker", "app:registry", "--processes", "2", "--metrics", "0", "--health", "0", "--poll-interval", "0.3")
    async with command(several, tmp_path, *words, HOLDFAST_RUNTIME_DIR=str(short_path / "run")) as worker:
        port = await worker.port()
        await publish(conn, "order.placed", {"bad": True})
        for _ in range(3):
            await publish(other, "order.placed")
        await drained(conn)
        await drained(other)

        async def counted() -> bool:
            found = await scraped(port)
            return found.by("database", "holdfast_deliveries_total") == {"orders": 1, "billing": 3}

        await until(counted, what="both processes have reported")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/health") as client:
            pages = ("live", "ready", "ready/orders", "ready/billing", "ready/gone", "ready/other")

            async def ready() -> bool:
                return (await client.get("ready/orders")).is_success and (await client.get("ready/billing")).is_success

            await until(ready, what="both processes have started")
            answers = {page: (await client.get(page)).status_code for page in pages}
            told = (await client.get("ready/gone")).json()
        assert answers == dict(zip(pages, (200, 200, 200, 200, 503, 404), strict=True))
        assert "process 1: the database has been away" in str(told["problems"])

        monkeypatch.setenv("HOLDFAST_DSN", several)
        run = asyncio.to_thread
        code, out, err = await run(holdfast, "status")
        assert code == 1 and "error: " in err and "database gone:" in err
        lines = {words[0]: words for line in out.splitlines() if (words := line.split())}
        assert lines["orders"][4] == "1" and lines["billing"][4] == "0" and lines["orders"][-1] == "2"
        assert "NOT" in lines["gone"]
        code, out, _ = await run(holdfast, "status", "--json")
        assert (
            code == 1 and json.loads(out)["databases"]["orders"]["failed"] == 1 and "gone" in json.loads(out)["errors"]
        )
    assert '"database": "gone"' in worker.said or "database=gone" in worker.said

    monkeypatch.setenv("HOLDFAST_DSN", f"orders={dsn} billing={other_dsn}")
    code, out, _ = await run(holdfast, "failed", "list", "--json")
    (failed,) = json.loads(out)
    assert (code, failed["database"]) == (0, "orders")
    code, out, _ = await run(holdfast, "doctor", "--only", "drift")
    assert code == 0 and out.count("checks passed") == 2 and "database billing" in out
    # A change is for one database, which has to be named.
    discard = ("failed", "discard", failed["id"], "--yes", "--reason", "no card")
    code, _, err = await run(holdfast, *discard)
    assert code == 2 and "--database is missing" in err and "billing, orders" in err
    assert (await run(holdfast, *discard, "--database", "billing"))[0] == 2
    assert (await run(holdfast, *discard, "--database", "orders"))[0] == 0
    # What is printed as a remedy can be typed as it is.
    handler = await conn.fetchval("SELECT min(handler_name) FROM core.subscriptions")
    assert (await run(holdfast, "handlers", "pause", handler, "--yes", "--database", "orders"))[0] == 0
    for words in (("status",), ("status", "--database", "orders")):
        assert f": holdfast handlers resume {handler} --database orders\n" in (await run(holdfast, *words))[1]
    async with command(f"orders={dsn} gone={NOWHERE}", tmp_path, "metrics", "--listen", "0") as serving:
        state = await scraped(await serving.port())
    assert state.by("database", "holdfast_database_up") == {"orders": 1}
    assert state.of("holdfast_outbox_pending", database="orders") == 0


def test_databases_that_are_away_have_remedies_of_their_own(holdfast: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of none would be taken for good news (SCL-4, OPS-1)."""
    monkeypatch.setenv("HOLDFAST_DSN", f"orders={NOWHERE} billing={NOWHERE}")
    code, out, err = holdfast("failed", "list")
    assert (code, out) == (1, "")
    for name in ("orders", "billing"):
        assert f"try: check that Postgres runs, and the host and port in HOLDFAST_DSN of {name}\n" in err
    _, _, err = holdfast("events", "list", "--database", "orders")
    assert err.endswith("in HOLDFAST_DSN of orders\n")


def test_a_list_does_not_answer_for_a_database_that_is_away(
    dsn: str, other_dsn: str, holdfast: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "none" is said of those that were read; a hint about a name is said of each, with its command (SCL-4, OPS-1)."""
    monkeypatch.setenv("HOLDFAST_DSN", f"orders={dsn} gone={NOWHERE}")
    code, out, err = holdfast("failed", "list")
    assert (code, out) == (1, "none in orders\n") and "database gone:" in err
    monkeypatch.setenv("HOLDFAST_DSN", f"orders={dsn} billing={other_dsn}")
    code, out, err = holdfast("failed", "list", "--handler", "x.y")
    assert (code, out) == (0, "none\n")
    said = "no handler x.y was ever registered; all names: holdfast handlers list --database"
    assert err == f"orders: {said} orders\nbilling: {said} billing\n"
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SELECT core.subscribe('x', 'x.y', ARRAY['order.placed'])")
    assert holdfast("failed", "list", "--handler", "x.y") == (0, "none\n", ""), "databases may have different handlers"


async def test_a_remedy_names_the_database_and_the_schema(
    dsn: str, other_dsn: str, holdfast: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Typed as it is printed it is for the database that it was printed for (SCL-4, OPS-1)."""
    run = asyncio.to_thread
    monkeypatch.setenv("HOLDFAST_DSN", f"orders={dsn} billing={other_dsn}")
    code, _, err = await run(holdfast, "handlers", "show", "x.y", "--database", "billing")
    assert (code, err.splitlines()[1]) == (2, "try: holdfast handlers list --database billing")
    code, _, err = await run(holdfast, "plans", "show", "7", "--schema=core", "--database", "orders")
    assert (code, err.splitlines()[1]) == (2, "try: holdfast plans list --database orders --schema core")
    code, _, err = await run(holdfast, "failed", "list", "--schema", "other")
    assert code == 1
    for name in ("orders", "billing"):
        assert f"to install it there: holdfast migrate apply --schema other --database {name}\n" in err
    (command,) = {line.partition("there: ")[2] for line in err.splitlines() if line.endswith("billing")} - {""}
    assert (await run(holdfast, *command.split()[1:]))[0] == 0


def test_a_broker_is_for_one_database(holdfast: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one outbox has sent to a broker must not be taken for another's (SCL-4)."""
    (tmp_path / "app.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    words = ("worker", "app:registry", "--dsn", f"a={NOWHERE}", "--dsn", f"b={NOWHERE}", "--substrate", "nats://x")
    code, _, err = holdfast(*words)
    assert code == 2 and "--substrate is given with several databases" in err


def test_addresses_have_names() -> None:
    """One address needs no name; of several each has one, and a command says which (SCL-4)."""
    assert named("x", [NOWHERE]) == {"": NOWHERE}
    assert named("x", [f"a={NOWHERE}", f"b-1.eu={NOWHERE}?options=-c%20a=b"]) == {
        "a": NOWHERE,
        "b-1.eu": f"{NOWHERE}?options=-c%20a=b",
    }
    assert named("x", [f"  a={NOWHERE}\n b={NOWHERE} "]) == {"a": NOWHERE, "b": NOWHERE}
    for wrong in ([NOWHERE, NOWHERE], [f"a={NOWHERE} {NOWHERE}"], [f"a={NOWHERE}", f"a={NOWHERE}"], [f"A={NOWHERE}"]):
        with pytest.raises(ConfigurationError):
            named("x", wrong)
    assert one({"a": "1"}, None) == "1" and one({"a": "1", "b": "2"}, "b") == "2"
    with pytest.raises(ConfigurationError, match="name one of: a, b"):
        one({"a": "1", "b": "2"}, None)
    with pytest.raises(ConfigurationError, match="named are"):
        one({"": "1"}, "a")


@pytest.mark.parametrize(
    ("value", "problem", "remedy"),
    [
        ("a=postgresql://u:s3cret@h/a,b=postgresql://h/b", "a comma between two addresses", "put a space there"),
        ("a=postgresql://u:s3cret@h/a b=s3cret", "b= without an address", "write b=postgresql://"),
    ],
)
def test_what_is_wrong_with_a_list_of_addresses_is_said(value: str, problem: str, remedy: str) -> None:
    """And not that a password may need other characters; no password is shown (SCL-4, OPS-1)."""
    with pytest.raises(ConfigurationError, match=problem) as refused:
        named("HOLDFAST_DSN", [value])
    assert remedy in str(refused.value) and "s3cret" not in str(refused.value)


def test_remedies_name_the_database() -> None:
    """Each command that is printed to be typed, and no prose (SCL-4, OPS-1)."""
    remember([])  # what a command before this test was given
    for text, said in (
        ("holdfast failed groups", "holdfast failed groups --database orders"),
        ("at once: holdfast workers release 7", "at once: holdfast workers release 7 --database orders"),
        ("holdfast workers list\n-- or start one", "holdfast workers list --database orders\n-- or start one"),
        ("holdfast notify when_idle, if it is not set", "holdfast notify when_idle, if it is not set"),
        ("REINDEX INDEX core.outbox_dlq;", "REINDEX INDEX core.outbox_dlq;"),
    ):
        assert as_typed(text, "orders") == said and as_typed(text) == text


def test_remedies_are_commands_of_the_program_that_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `manage.py holdfast` says to type next can be typed in that project (S20)."""
    assert remember([]) == {}  # as with no argument at all
    text = "no worker serves it: holdfast workers list --json"
    assert as_typed(text) == text
    monkeypatch.setenv(TYPED_AS, "python manage.py holdfast")
    typed = "python manage.py holdfast workers list --json"
    assert as_typed(text) == f"no worker serves it: {typed}"
    assert wrapped(as_typed(text), 40) == ["no worker serves it:", f"  {typed}"]  # one line, to be copied


def test_findings_say_what_to_type_where_they_are_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the name, the schema and the database of the command, as every other remedy (S20, OPS-1)."""
    monkeypatch.setenv(TYPED_AS, "python manage.py holdfast")
    finding = Finding("problem", "worker-silent", "w1", "a worker is silent", "for 90 s", "holdfast workers list")
    remember(["doctor", "--schema", "shop"])
    try:
        doctor._show(Report("shop", "18.6", None, ("workers",), (), (finding,)), "orders")
    finally:
        remember([])
    typed = "python manage.py holdfast workers list --database orders --schema shop"
    assert f"try: {typed}\n" in capsys.readouterr().out
