"""holdfast retention and holdfast archive: what is printed, what is asked, how they exit (OPS-1, OBX-5, DLQ-2)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from holdfast.cli import main
from tests.operator.kept import archived, rows
from tests.servers import run_coroutine

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def holdfast(dsn: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """holdfast("retention", "show") -> (exit code, standard output, standard error)."""
    monkeypatch.setenv("HOLDFAST_DSN", dsn)
    monkeypatch.setenv("HOLDFAST_ACTOR", "ann@example.org")

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(arguments)
        out, err = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return end.value.code, out, err

    return run


@pytest.fixture
def database(dsn: str) -> Callable[..., Any]:
    """database(rows, "delivered", 46): one call with a connection of its own."""

    def run(function: Callable[..., Any], *values: Any, **options: Any) -> Any:
        async def connected() -> Any:
            connection = await asyncpg.connect(dsn)
            try:
                return await function(connection, *values, **options)
            finally:
                await connection.close()

        return run_coroutine(connected)

    return run


async def value(connection: asyncpg.Connection, sql: str) -> Any:
    return await connection.fetchval(sql)


def test_show(holdfast: Run, database: Callable[..., Any]) -> None:
    """The policies, what is due, the last sweep; as a table and as one document (OBX-5)."""
    database(rows, "delivered", 46, 12)
    code, out, err = holdfast("retention", "show")
    assert (code, err) == (0, "")
    assert "outbox_row" in out and "HARD_DELETE" in out
    assert any("delivered, to be tombstoned" in line and line.split()[-1] == "12" for line in out.splitlines())
    code, out, _ = holdfast("retention", "show", "--json")
    found = json.loads(out)
    assert found["due"] == [{"step": "delivered", "content_class": "operations", "count": 12, "more": False}]
    assert found["policies"][0] == {
        "entity": "event_handled", "content_class": "*", "active_ttl_days": 60, "tombstoned_grace_days": 7,
        "disposal": "HARD_DELETE",
    }  # fmt: skip
    assert found["last_sweep"]["swept"] == {}


def test_sweep_asks_with_the_number(holdfast: Run, database: Callable[..., Any]) -> None:
    """Where nobody can answer it needs --yes, and changes nothing without it (OPS-1)."""
    database(rows, "delivered", 46, 12)
    code, out, err = holdfast("retention", "sweep")
    assert code == 2
    assert "Sweep 12 rows?" in err and "--yes" in err
    code, out, _ = holdfast("retention", "sweep", "--dry-run", "--json")
    assert (code, json.loads(out)["due"][0]["count"]) == (0, 12)
    assert database(value, "SELECT count(*) FROM core.outbox WHERE deleted_at IS NOT NULL") == 0
    assert database(value, "SELECT count(*) FROM core.audit") == 0


def test_sweep(holdfast: Run, database: Callable[..., Any]) -> None:
    """What was done, in how many batches; a second sweep finds nothing (OBX-5)."""
    database(rows, "delivered", 46, 12)
    database(rows, "tombstone", 60, 3, deleted=8)
    code, out, _ = holdfast("retention", "sweep", "--yes", "--json", "--reason", "the disk is full")
    done = json.loads(out)
    assert (code, done["swept"]["delivered"], done["swept"]["tombstones"]) == (0, 12, 3)
    assert done["longest"] > 0
    assert database(value, "SELECT string_agg(DISTINCT actor || ': ' || reason, '') FROM core.audit") == (
        "ann@example.org: the disk is full"
    )
    code, out, _ = holdfast("retention", "sweep", "--yes")
    assert (code, out.strip()) == (0, "nothing is due")


def test_set(holdfast: Run, database: Callable[..., Any]) -> None:
    """Adds, changes, removes; a wrong one is refused with the remedy and exit code 2 (OBX-5)."""
    code, out, _ = holdfast(
        "retention", "set", "outbox_row", "--class", "billing", "--active-days", "30", "--grace-days", "3",
        "--disposal", "STRIP_PAYLOAD", "--yes", "--json",
    )  # fmt: skip
    assert code == 0
    assert {
        "entity": "outbox_row", "content_class": "billing", "active_ttl_days": 30, "tombstoned_grace_days": 3,
        "disposal": "STRIP_PAYLOAD",
    } in json.loads(out)["policies"]  # fmt: skip
    code, _, err = holdfast("retention", "set", "outbox_row", "--active-days", "60", "--yes")
    assert code == 2
    assert "retention.event_handled.active_ttl_days is 60" in err and "68 or more" in err
    code, out, _ = holdfast("retention", "set", "outbox_row", "--class", "billing", "--remove", "--dry-run")
    now, _, then = out.partition("would be:\n")
    assert code == 0 and now.startswith("now:\n") and "billing" in now and "billing" not in then
    billing = "SELECT count(*) FROM core.retention_policies WHERE content_class = 'billing'"
    assert database(value, billing) == 1
    code, _, _ = holdfast("retention", "set", "outbox_row", "--class", "billing", "--remove", "--yes")
    assert (code, database(value, billing)) == (0, 0)
    code, _, err = holdfast("retention", "set", "outbox_row", "--yes")
    assert (code, "--remove" in err) == (2, True)


def test_erase(holdfast: Run, database: Callable[..., Any]) -> None:
    """Previewed, asked with the number, done; 1 while something of the domain is open (OBX-5)."""
    domain = uuid4()
    database(rows, "delivered", 10, 4, domain=domain)
    database(archived, 10, 2, domain=domain)
    code, out, _ = holdfast("retention", "erase", str(domain), "--dry-run")
    assert (code, out.splitlines()[0]) == (0, "4 rows of the outbox and 2 of the archive would be erased")
    code, _, err = holdfast("retention", "erase", str(domain))
    assert (code, "Erase the data of 6 rows" in err) == (2, True)
    assert database(value, "SELECT count(*) FROM core.outbox WHERE payload IS NULL") == 0
    database(rows, "pending", 1, domain=domain)
    code, out, _ = holdfast("retention", "erase", str(domain), "--yes", "--json", "--reason", "request 17")
    done = json.loads(out)
    assert (code, done["outbox"], done["archive"], done["open"]) == (1, 4, 2, 1)
    assert UUID(done["domain_id"]) == domain
    code, out, _ = holdfast("retention", "erase", str(domain), "--yes", "--cancel-open")
    assert (code, out.splitlines()[0]) == (0, "1 row of the outbox and 0 of the archive erased")
    code, _, err = holdfast("retention", "erase", "alice", "--yes")
    assert (code, "domain_id" in err) == (2, True)


def test_an_erasure_counts_dead_letters_before_it(holdfast: Run, database: Callable[..., Any]) -> None:
    """They cannot be replayed once they are erased (S6, DLQ-4)."""
    domain = uuid4()
    database(rows, "failed", 1, 2, domain=domain)
    database(rows, "discarded", 1, domain=domain)
    database(rows, "delivered", 1, domain=domain)
    _, out, _ = holdfast("retention", "erase", str(domain), "--dry-run")
    assert "4 rows of the outbox" in out and "2 of them are dead letters" in out


def test_a_policy_that_cannot_be_is_refused_before_the_question(holdfast: Run) -> None:
    """OBX-5, OPS-1."""
    code, _, err = holdfast("retention", "set", "bogus", "--active-days", "3")
    assert (code, "bogus" in err, "Go on?" in err) == (2, True, False), err


def test_what_a_sweep_had_to_leave(holdfast: Run, database: Callable[..., Any]) -> None:
    """It is named, the rest is swept, and the command fails (OBX-5, OPS-1)."""
    (stuck,) = database(rows, "tombstone", 60, content_class="billing", deleted=8)
    database(rows, "discarded", 60, deleted=8)
    database(value, "CREATE TABLE public.invoices (event uuid REFERENCES core.outbox)")
    try:
        database(value, f"INSERT INTO public.invoices VALUES ('{stuck}')")
        code, out, _ = holdfast("retention", "sweep", "--yes")
        assert (code, "! left tombstones" in out, "billing" in out, "invoices" in out) == (1, True, True, True)
        assert database(value, "SELECT count(*) FROM core.outbox") == 1
        code, out, _ = holdfast("retention", "sweep", "--yes", "--json")
        assert (code, [each["sqlstate"] for each in json.loads(out)["refused"]]) == (1, ["23503"])
    finally:
        database(value, "DROP TABLE public.invoices")


def test_archive(holdfast: Run, database: Callable[..., Any]) -> None:
    """List, show, replay, discard and restore (DLQ-2, OPS-1)."""
    first, second = database(archived, 2, 2)
    code, out, _ = holdfast("archive", "list", "--json")
    assert (code, [each["id"] for each in json.loads(out)]) == (0, [second, first])
    code, out, _ = holdfast("archive", "list", "--handler", "billing.charge_card")
    assert (code, "card x411 declined" in out) == (0, True)
    code, out, _ = holdfast("archive", "show", str(first))
    assert (code, "last_exception    card x411 declined" in out, '"card"' in out) == (0, True, False)
    code, out, _ = holdfast("archive", "show", str(first), "--payload", "--json")
    assert (code, json.loads(out)["payload"]) == (0, {"card": "x411"})
    original = str(database(value, f"SELECT original_id FROM core.archive WHERE id = {first}"))
    code, out, _ = holdfast("events", "show", original)
    assert (code, "archived  billing.charge_card" in out) == (0, True)
    code, out, err = holdfast("archive", "replay", str(first))
    assert (code, "--yes" in err) == (2, True)
    one_event = "(SELECT min(original_id::text)::uuid FROM core.archive)"
    event = str(database(value, f"UPDATE core.archive SET origin_id = {one_event} RETURNING origin_id"))
    code, out, err = holdfast("archive", "discard", event)
    assert (code, "Discard 2 of the archive" in err) == (2, True), "rows, and not what they were named by"
    code, out, err = holdfast("archive", "replay", event, str(first))
    assert (code, "Replay 2 from the archive" in err) == (2, True)
    code, out, _ = holdfast("archive", "replay", str(first), "--yes", "--dry-run", "--generation", "7")
    assert (code, "generation 7 is not a known deployment" in " ".join(out.split())) == (0, True)
    code, out, _ = holdfast("archive", "replay", str(first), "--yes", "--json", "--generation", "0")
    assert (code, json.loads(out)["left"]) == (0, {})
    assert database(value, "SELECT status FROM core.outbox") == "pending"
    code, out, _ = holdfast("archive", "replay", str(first), "--yes")
    assert (code, "replayed or never there" in " ".join(out.split())) == (1, True)
    assert holdfast("archive", "discard", str(second), "--yes")[0] == 0
    assert json.loads(holdfast("archive", "list", "--discarded", "--json")[1])[0]["id"] == second
    code, out, _ = holdfast("archive", "restore", str(second))
    assert (code, out.strip()) == (0, "1 event restored")


def test_archived_dead_letters_by_cause(holdfast: Run, database: Callable[..., Any]) -> None:
    """Grouped, replayed and discarded as those of the outbox are (DLQ-2, DLQ-5)."""
    database(archived, 2, 5)
    database(value, "UPDATE core.archive SET error_signature = 'b' WHERE id % 2 = 0")
    database(value, "UPDATE core.archive SET error_signature = 'a' WHERE error_signature <> 'b'")
    code, out, _ = holdfast("archive", "groups", "--json")
    groups = {each["group"]: each["count"] for each in json.loads(out)["groups"]}
    assert (code, sum(groups.values()), sorted(groups)) == (0, 5, ["billing.charge_card/a", "billing.charge_card/b"])
    code, out, _ = holdfast("archive", "groups")
    assert (code, "5 failed in 2 groups" in out, "card x411 declined" in out) == (0, True, True)
    group = "billing.charge_card/b"
    code, _, err = holdfast("archive", "replay", "--group", group)
    assert (code, f"Replay {groups[group]} from the archive" in err) == (2, True)
    assert holdfast("archive", "replay", "--group", group, "--yes", "--generation", "0")[0] == 0
    assert database(value, "SELECT count(*) FROM core.outbox") == groups[group]
    assert holdfast("archive", "replay", "--group", group, "--yes")[0] == 2, "nothing is left of it"
    assert holdfast("archive", "discard", "1", "--group", group, "--yes")[0] == 2, "either, or"
    assert holdfast("archive", "discard", "--group", "nonsense", "--yes")[0] == 2
    code, out, _ = holdfast("archive", "discard", "--group", "billing.charge_card/a", "--yes")
    assert (code, out.strip()) == (0, f"{groups['billing.charge_card/a']} events discarded")
