"""The program that plants faults: what it changes, that it finds places again, and which tests it runs first."""

from __future__ import annotations

import ast
import json
import textwrap
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.planted import faults, probe, python, sql
from tests.planted.__main__ import main
from tests.planted.copies import Copy, Ended
from tests.planted.faults import BadInput, Fault
from tests.planted.reach import Reach, _Clock, plant_probes
from tests.planted.trial import in_order, trial_of

ROOT = Path(__file__).parents[2]

PYTHON = '''\
class Settler:
    """A docstring with 1 < 2 and not 3."""

    async def settle(self, rows, most):
        """Settle some rows."""
        if rows and len(rows) < most:
            await self.flush()
        elif most == 0:
            return self.full
        log.debug("settled", count=len(rows) - 1)
        raise ValueError(f"{rows} < {most}")
'''

SQL = """\
-- outbox_fail: fails a row, and not 1 < 2.
CREATE OR REPLACE FUNCTION core.outbox_fail(p_id uuid, p_token uuid)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM core.require(p_id);
    UPDATE core.outbox o
    SET status = 'failed', failed_at = now()  -- and not later
    WHERE o.id = p_id AND o.lease_token = p_token;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no row % < 1', p_id;
    END IF;
    RETURN core.is_failed(p_id);
END
$$;

CREATE OR REPLACE FUNCTION core.is_failed(p_id uuid)
RETURNS boolean
LANGUAGE sql STABLE
AS $$
    SELECT o.status = 'failed' FROM core.outbox o WHERE o.id = p_id
$$;
"""


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / faults.PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def offered_python(code: str) -> set[tuple[str, str]]:
    source = f"def f():\n{textwrap.indent(code, '    ')}\n"
    return {(each.kind, each.lines(source)[2][0].strip()) for each in python.changes(source)}


def offered_sql(statement: str) -> set[tuple[str, str]]:
    source = f"CREATE OR REPLACE FUNCTION core.f()\nLANGUAGE plpgsql AS $$\nBEGIN\n{statement}\nEND\n$$;\n"
    return {(each.kind, "\n".join(each.lines(source)[2])) for each in sql.changes(source)}


@pytest.mark.parametrize(
    ("code", "kind", "changed"),
    [
        ("x = a <= b", "comparison turned round", "x = a > b"),
        ("x = a not in b", "comparison turned round", "x = a in b"),
        ("x = (a) is not (b)", "comparison turned round", "x = (a) is (b)"),
        ("x = a < b", "bound moved by one", "x = a <= b"),
        ("x = a == 3", "off by one", "x = a == 4"),
        ("x = a[0]", "off by one", "x = a[1]"),
        ("x = a and b and c", "and/or swapped", "x = a or b and c"),
        ("x = not (a or b)", "not left out", "x = (a or b)"),
        ("x = 1 if (a) else 2", "condition always true", "x = 1 if (True) else 2"),
        ("return a", "return value dropped", "return None"),
        ("x = 'é' and (a - b)", "minus to plus", "x = 'é' and (a + b)"),
        ("x = min(a, b)", "min/max, any/all swapped", "x = max(a, b)"),
        ("observe(a)", "call left out", "pass"),
    ],
)
def test_changes_of_python(code: str, kind: str, changed: str) -> None:
    assert (kind, changed) in offered_python(code)


@pytest.mark.parametrize(
    "code",
    [
        "logger.warning('gone', n=1)",
        "'''not 1 < 2'''",
        "raise E(a - b)",
        "assert a < b",
        "return None",
        "x: a[0] = b",
        "x = NameError(a[:300])",
    ],
)
def test_python_without_behaviour_is_left_alone(code: str) -> None:
    assert offered_python(code) == set()


def test_every_change_of_python_compiles_and_differs() -> None:
    """A fault that cannot be compiled would be found by any test."""
    source = (ROOT / faults.PACKAGE / "worker" / "lanes.py").read_text()
    found = list(python.changes(source))
    assert len(found) > 20
    for change in found:
        changed = source[: change.start] + change.text + source[change.end :]
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))


@pytest.mark.parametrize(
    ("code", "kind", "changed"),
    [
        ("WHERE a.x = b.x AND a.y <= 3;", "comparison turned round", "WHERE a.x <> b.x AND a.y <= 3;"),
        ("WHERE a.x = b.x AND a.y <= 3;", "comparison turned round", "WHERE a.x = b.x AND a.y > 3;"),
        ("WHERE a.x = b.x AND a.y <= 3;", "condition dropped", "WHERE a.x = b.x;"),
        ("WHERE a AND f(b)\nORDER BY c;", "condition dropped", "WHERE a"),
        ("WHERE a OR b;", "and/or swapped", "WHERE a AND b;"),
        ("FOR UPDATE SKIP LOCKED;", "SKIP LOCKED dropped", "FOR UPDATE;"),
        ("FROM a FOR NO KEY UPDATE SKIP LOCKED;", "row lock dropped", "FROM a;"),
        ("WHERE NOT EXISTS (a);", "condition negated", "WHERE EXISTS (a);"),
        ("(SELECT a ORDER BY b, c LIMIT 1);", "ORDER BY dropped", "(SELECT a LIMIT 1);"),
        ("IF a < 'x;' THEN", "branch never taken", "IF false THEN"),
        ("PERFORM core.f(a,\n b);", "call left out", "NULL;"),
        ("RETURN a;", "return value dropped", "RETURN NULL;"),
        ("a := interval '5 minutes';", "interval halved", "a := (interval '5 minutes' / 2);"),
        ("UPDATE core.t SET a = f(1, 2), b = 'x' WHERE c;", "column not set", "UPDATE core.t SET b = 'x' WHERE c;"),
        ("UPDATE core.t SET a = f(1, 2), b = 'x' WHERE c;", "column not set", "UPDATE core.t SET a = f(1, 2) WHERE c;"),
        ("VALUES (a) ON CONFLICT DO NOTHING;", "conflict not expected", "VALUES (a);"),
        ("a := greatest(b, c);", "greatest/least swapped", "a := least(b, c);"),
    ],
)
def test_changes_of_sql(code: str, kind: str, changed: str) -> None:
    found = {text for of_kind, text in offered_sql(code) if of_kind == kind}
    assert changed in {"\n".join(line for line in text.splitlines() if line.strip()) for text in found} | found


@pytest.mark.parametrize(
    "code",
    [
        "-- WHERE a < b AND c",
        "RAISE EXCEPTION 'a < b' USING HINT = 'NOT IN';",
        "UPDATE core.t SET a = 'x AND y' WHERE c;",
        "UPDATE core.t o SET a = 'b';",
        "x BETWEEN 1 AND 2;",
        "UPDATE core.t SET version = version + 1;",
        "RETURN;",
    ],
)
def test_sql_without_behaviour_is_left_alone(code: str) -> None:
    assert offered_sql(code) == set()


def test_a_column_that_is_set_to_itself_is_no_fault() -> None:
    found = {text for kind, text in offered_sql("UPDATE core.t o SET a = 1, b = o.b;") if kind == "column not set"}
    assert found == {"UPDATE core.t o SET b = o.b;"}


def test_the_same_seed_chooses_the_same_faults(tmp_path: Path) -> None:
    """Half of them are in SQL, no function has two, and fewer faults are the first of more."""
    functions = SQL + SQL.replace("outbox_fail", "outbox_retry").replace("is_failed", "is_retried")
    methods = PYTHON + PYTHON.replace("Settler", "Claimer")
    root = tree(tmp_path, {"worker/settler.py": methods, "postgres/sql/functions/settle.sql": functions})
    places = ["worker", "postgres/sql/functions"]
    chosen = faults.choose(root, places, 4)
    assert chosen == faults.choose(root, places, 4)
    assert [fault.language for fault in chosen] == [".py", ".py", ".sql", ".sql"]
    assert len({fault.function for fault in chosen}) == 4
    fewer = faults.choose(root, places, 2)
    assert [fault.place for fault in fewer] == [chosen[0].place, chosen[2].place]
    for fault in chosen:
        source = (root / fault.path).read_text()
        assert fault.planted(source) != source


def test_more_faults_than_there_are(tmp_path: Path) -> None:
    root = tree(tmp_path, {"worker/settler.py": PYTHON})
    with pytest.raises(BadInput, match="--faults 30: worker offer only 1"):
        faults.choose(root, ["worker"], 30)


def test_faults_are_found_again_where_their_code_has_moved(tmp_path: Path) -> None:
    [fault, in_sql] = faults.choose(
        tree(tmp_path / "old", {"worker/settler.py": PYTHON, "postgres/sql/functions/settle.sql": SQL}),
        ["worker", "postgres/sql/functions"],
        2,
    )
    moved = "if True:\n" + textwrap.indent(PYTHON, "    ")
    new = tree(tmp_path / "new", {"engine/ends.py": moved, "engine/functions/ends.sql": "-- Ends.\n" + SQL})
    here, gone = faults.found_again(new, [fault, in_sql])
    assert gone == []
    assert [each.path for each in here] == ["src/holdfast/engine/ends.py", "src/holdfast/engine/functions/ends.sql"]
    assert [each.line for each in here] == [fault.line + 1, in_sql.line + 1]
    planted = here[0].planted(moved)
    ast.parse(planted)
    assert textwrap.dedent(planted.partition("\n")[2]) == fault.planted(PYTHON)


def test_faults_whose_lines_are_gone_are_told(tmp_path: Path) -> None:
    root = tree(tmp_path, {"worker/settler.py": PYTHON})
    gone = Fault(1, "off by one", "src/holdfast/worker/settler.py", "Settler.settle", 6, ["x = 1"], ["x = 2"])
    flush = "            await self.flush()"
    renamed = Fault(2, "call left out", "src/holdfast/worker/settler.py", "Claimer.settle", 7, [flush], ["pass"])
    assert faults.found_again(root, [gone, renamed]) == ([], [gone, renamed])


def test_faults_are_read_from_the_file_of_another_run(tmp_path: Path) -> None:
    fault = Fault(3, "off by one", "src/holdfast/a.py", "f", 1, ["a"], ["b"])
    file = tmp_path / "found.json"
    file.write_text(json.dumps({"faults": [asdict(fault) | {"result": "found", "ran": 3}]}))
    assert faults.read(file) == ([fault], {3})
    file.write_text("{}")
    with pytest.raises(BadInput, match="holds no faults"):
        faults.read(file)


@pytest.mark.parametrize(("line", "before"), [(6, 6), (7, 7), (8, 6), (9, 9), (11, 11)])
def test_a_probe_stands_before_the_statement(line: int, before: int) -> None:
    """Nothing can stand before an elif, so that the probe stands before the if."""
    probed = python.with_probe(PYTHON, line, "probe()")
    ast.parse(probed)
    assert probed.splitlines()[before - 1].strip() == "probe()"


class FakeCopy:
    """Files, where a whole copy of the tree would take seconds."""

    read = Copy.read

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        (self.root / path).write_text(text)


def test_a_function_in_plain_sql_is_probed_in_its_callers(tmp_path: Path) -> None:
    root = tree(tmp_path, {"postgres/sql/functions/settle.sql": SQL})
    path = "src/holdfast/postgres/sql/functions/settle.sql"
    assert plant_probes(FakeCopy(root), [Fault(7, "", path, "is_failed", 23, [], [])], tmp_path / "notes") == {}
    probed = (root / path).read_text()
    assert probed.count("RAISE LOG 'planted 7';") == 1
    assert probed.index("BEGIN") < probed.index("RAISE LOG 'planted 7';") < probed.index("PERFORM core.require")


def test_a_probe_notes_the_test_once_in_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "NOTES", str(tmp_path / "notes"))
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "tests/a.py::test_b[x (y)] (call)")
    monkeypatch.setenv("PLANTED_PROCESS", "gw1")
    probe.reached(4)
    probe.reached(4)
    [line] = (tmp_path / "notes").read_text().splitlines()
    number, process, at, test = line.split("\t")
    assert (number, process, test) == ("4", "gw1", "tests/a.py::test_b[x (y)]")
    assert abs(float(at) - time.time()) < 60


def test_a_time_belongs_to_the_test_that_ran_then() -> None:
    clock = _Clock([Ended("b", 20.0, 30.0, ""), Ended("a", 10.0, 20.0, "")])
    assert [clock.test_at(at) for at in (9.0, 10.0, 19.9, 20.1, 31.0)] == [None, "a", "a", "b", None]


def test_tests_that_name_the_function_run_first_and_files_take_turns(tmp_path: Path) -> None:
    files = {
        "tests/test_a.py": "def test_far_1():\n    pass\n\n\ndef test_far_2():\n    pass\n",
        "tests/test_b.py": "def test_named():\n    settle()\n\n\ndef test_beside():\n    pass\n",
        "tests/test_c.py": "from worker import Settler\n\n\ndef test_class():\n    pass\n",
        "tests/test_d.py": "def test_other():\n    unsettled()\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    fault = Fault(1, "", "src/holdfast/worker/ends.py", "Settler.settle", 1, [], [])
    seconds = {
        "tests/test_a.py::test_far_1": 1.0,
        "tests/test_a.py::test_far_2": 2.0,
        "tests/test_b.py::test_named": 9.0,
        "tests/test_b.py::test_beside": 0.1,
        "tests/test_c.py::test_class": 0.1,
        "tests/test_d.py::test_other": 3.0,
    }
    ordered = in_order(fault, seconds, seconds, tmp_path)
    expected = ["named", "beside", "class", "far_1", "other", "far_2"]
    assert [test.partition("::test_")[2] for test in ordered] == expected
    trial = trial_of(fault, Reach({1: set(seconds)}, seconds | {"tests/test_d.py::test_other": 26.0}), tmp_path)
    assert "tests/test_d.py::test_other" not in trial.left, "shorter tests reach the fault as well"
    assert trial.reached == len(seconds)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--in", "nowhere"), "--in nowhere: src/holdfast has no such folder"),
        (("--in", "idempotency/asgi", "--faults", "5000"), "--faults 5000: idempotency/asgi offer only"),
        (("--faults", "0"), "--faults 0"),
        (("--from", "README.md"), "--from README.md: holds no faults"),
        (("--json", "nowhere/found.json"), "--json nowhere/found.json"),
        (("tests/nowhere",), "tests/nowhere: is not there"),
    ],
)
def test_bad_input(
    arguments: tuple[str, ...], error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["tests.planted", *arguments])
    assert main() == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {error}")
