"""SQL files, schema names and parameters (OBX-1, RELIABILITY S5)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.resources import files
from importlib.resources.abc import Traversable
from uuid import UUID

import psycopg
import pytest
import sqlalchemy
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.dialects import postgresql

from holdfast.errors import ConfigurationError
from holdfast.names import schema_name
from holdfast.postgres import queries
from holdfast.postgres.queries import (
    Queries,
    calls,
    for_asyncpg,
    for_psycopg,
    for_sqlalchemy,
    parse,
    render,
    split,
    statements,
)

FILE = """
-- What the publisher writes.

-- name: publish_one
-- One event. The reason stands here; it's not: sent.
INSERT INTO core.outbox (event_type) VALUES (:event_type)  -- inner
RETURNING id;

-- name: count
SELECT count(*) /* all /* of */ them */ FROM core.outbox
"""


def test_a_file_is_read_as_named_statements_without_comments() -> None:
    """STYLE: SQL lives in files, with a name and a why paragraph that only readers see."""
    assert parse(FILE) == {
        "publish_one": "INSERT INTO core.outbox (event_type) VALUES (:event_type)\nRETURNING id",
        "count": "SELECT count(*)   FROM core.outbox",
    }


@pytest.mark.parametrize("text", ["-- name: a\nSELECT 1\n-- name: a\nSELECT 2", "-- name: a\n-- only words\n"])
def test_a_file_with_a_mistake_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="'a'"):
        parse(text)


def test_every_packaged_statement_renders_in_every_dialect() -> None:
    """The schema name is a setting, for all of the SQL (OBX-1)."""
    other = Queries("acme")
    for name in (name for named in statements().values() for name in named):
        for text in (other.asyncpg(name).sql, other.psycopg(name), other.sqlalchemy(name)):
            assert not re.search(r"\bcore\b", text), (name, text)
        assert set(other.asyncpg(name).parameters) == set(re.findall(r"%\((\w+)\)s", other.psycopg(name)))


def test_an_unknown_statement_is_named_in_the_error() -> None:
    with pytest.raises(LookupError, match="'nonsense'"):
        Queries().asyncpg("nonsense")


def test_statements_are_kept() -> None:
    found = Queries()
    assert found.asyncpg("read_ledger") is found.asyncpg("read_ledger")


# --- the schema's name ---


@pytest.mark.parametrize("name", ["core", "_", "acme_events", "order", "a" * 48])
def test_plain_names_are_schemas(name: str) -> None:
    assert schema_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "Core",
        "9a",
        "a" * 49,
        "a-b",
        'a"b',
        "a.b",
        "a;b",
        "a\0",
        "é",
        "a\n",
        "public",
        "pg_x",
        "information_schema",
    ],
)
def test_other_names_are_refused_by_field(name: str) -> None:
    """No identifier that would have to be escaped, and none that belongs to others (S5)."""
    with pytest.raises(ConfigurationError) as refused:
        Queries(name)
    assert refused.value.field == "schema"
    assert refused.value.remedy


@given(st.text())
def test_only_plain_names_ever_pass(name: str) -> None:
    """Quotes, NUL and long names never reach SQL (S5)."""
    with contextlib.suppress(ConfigurationError):
        assert re.fullmatch(r"[a-z_][a-z0-9_]{0,47}", schema_name(name))


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT * FROM core.outbox", 'SELECT * FROM "acme".outbox'),
        ("CREATE SCHEMA IF NOT EXISTS core", 'CREATE SCHEMA IF NOT EXISTS "acme"'),
        ("GRANT USAGE ON SCHEMA core TO x", 'GRANT USAGE ON SCHEMA "acme" TO x'),
        (
            "DO $x$ BEGIN PERFORM core.f('core.' || c); END $x$",
            "DO $x$ BEGIN PERFORM \"acme\".f('acme.' || c); END $x$",
        ),
        ("hashtextextended('core.' || NEW.channel, 0)", "hashtextextended('acme.' || NEW.channel, 0)"),
        ("nspname = 'core'", "nspname = 'acme'"),
        ("'core.outbox'::regclass", "'\"acme\".outbox'::regclass"),
        ("EXECUTE format('SELECT core.%I()', f)", "EXECUTE format('SELECT \"acme\".%I()', f)"),
        ("core.outbox%ROWTYPE", '"acme".outbox%ROWTYPE'),
        ("-- see core.outbox", '-- see "acme".outbox'),
        # What only looks like the schema.
        ("SELECT score.x, hardcore.z, core_x", "SELECT score.x, hardcore.z, core_x"),
        ("'encore'", "'encore'"),
    ],
)
def test_render_writes_the_schema_where_core_names_it(sql: str, expected: str) -> None:
    """The schema name is a setting (OBX-1)."""
    assert render(sql, "acme") == expected
    assert render(sql, "core") == sql


FOLDER = files("holdfast.postgres").joinpath("sql")
# The places that the word may have: core.name, core.%I, SCHEMA core, 'core' and 'core.' as texts, 'core.name' as SQL.
PLACES = re.compile(r"(?:\bSCHEMA )core\b(?!\.)|(?<![\w.\"])core(?=\.(?:[a-z_]|%I))|'core(?=\.?')")


def sql_texts(folder: Traversable, path: str = "") -> Iterator[tuple[str, str]]:
    """Path and text of every .sql file under a folder."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from sql_texts(entry, f"{path}{entry.name}/")
        elif entry.name.endswith(".sql"):
            yield f"{path}{entry.name}", entry.read_text(encoding="utf-8")


SCRIPTS = dict(sql_texts(FOLDER))


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_the_word_core_is_always_the_schema(name: str) -> None:
    """What `render` relies on is true of every file, also of its comments (OBX-1)."""
    text = SCRIPTS[name]
    found = {match.start() for match in re.finditer(r"\bcore\b", text)}
    known = {match.end() - len("core") for match in PLACES.finditer(text)}
    assert not [text[start - 30 : start + 20] for start in sorted(found - known)]


@pytest.mark.parametrize("schema", ["hf_other", "order"])
@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_rendering_leaves_no_core_behind_and_changes_nothing_else(name: str, schema: str) -> None:
    """The text for the schema core is the file itself, and another schema's differs only in the name (OBX-1)."""
    text = SCRIPTS[name]
    assert render(text, "core") == text
    rendered = render(text, schema)
    assert not re.search(r"\bcore\b", rendered)
    name_as_text = re.compile(rf"'{schema}(?=\.?')")
    assert name_as_text.sub("'core", rendered.replace(f'"{schema}"', "core")) == text


def test_render_refuses_a_bad_name() -> None:
    with pytest.raises(ConfigurationError):
        render("SELECT 1", 'x"; DROP TABLE y; --')


# --- calls of functions ---

FUNCTIONS = """
-- outbox_extend: extends the leases.
CREATE OR REPLACE FUNCTION core.outbox_extend(p_ids uuid[], p_lease interval DEFAULT '0')
RETURNS SETOF uuid
LANGUAGE plpgsql AS $$ BEGIN END $$;

CREATE OR REPLACE FUNCTION core.reaction_settle(
    p_event jsonb, p_alone boolean)
RETURNS TABLE (id uuid)
LANGUAGE plpgsql AS $$ BEGIN END $$;

CREATE OR REPLACE FUNCTION core.now_and_then() RETURNS int LANGUAGE sql AS $$ SELECT 1 $$;

CREATE OR REPLACE FUNCTION core.only_of_a_trigger()
RETURNS trigger
LANGUAGE plpgsql AS $$ BEGIN END $$;
"""


def test_a_function_is_called_by_its_name_and_its_parameters() -> None:
    """STYLE: one name from SQL to Python, and no file of calls in front of the functions."""
    assert calls(FUNCTIONS) == {
        "outbox_extend": "SELECT core.outbox_extend(:ids::uuid[], :lease::interval)",
        "reaction_settle": "SELECT * FROM core.reaction_settle(:event::text::jsonb, :alone::boolean)",
        "now_and_then": "SELECT core.now_and_then()",
    }


def test_a_parameter_that_cannot_be_called_is_named() -> None:
    with pytest.raises(ValueError, match="OUT p_id uuid"):
        calls("CREATE OR REPLACE FUNCTION core.f(OUT p_id uuid) RETURNS uuid")


def test_values_in_the_text_of_a_statement() -> None:
    statement = for_asyncpg("SELECT :id, :n, :id")
    assert statement.filled_in({"id": UUID(int=1), "n": 7}) == f"SELECT '{UUID(int=1)}', 7, '{UUID(int=1)}'"
    for text in ("it's", "a\\", "$2"):
        with pytest.raises(ValueError, match="cannot stand in the text"):
            statement.filled_in({"id": text, "n": 7})


def test_values_in_the_text_of_a_statement_that_is_made_for_many_calls() -> None:
    """What is filled in for each call comes to stand where the whole statement would have it (LSN-5)."""
    statement = for_asyncpg("SELECT :id, :name, :n, '100 %s', :token, :id")
    common: dict[str, object] = {"name": "50 %d", "n": 7}
    id, token = UUID(int=1), UUID(int=2)
    made = statement.partly_filled_in(common)
    assert made % {"id": id, "token": token} == statement.filled_in({"id": id, "token": token, **common})
    with pytest.raises(ValueError, match="cannot stand in the text"):
        statement.partly_filled_in({"name": "it's"})


@pytest.mark.parametrize("name", sorted(name for name in SCRIPTS if name.startswith("functions/")))
def test_every_function_has_a_call(name: str) -> None:
    made = re.findall(
        r"CREATE OR REPLACE FUNCTION core\.(\w+)\((?!p_array anyarray|p_row record|\)\nRETURNS trigger)", SCRIPTS[name]
    )
    assert list(statements()[name]) == made != []


# --- parameters ---

TRICKY = (
    "SELECT :id::uuid, a[1:2], ':text' || E'\\':text', $$:body$$, \"a:b\", x % 2, '100%' "
    "FROM t WHERE b = :name AND c = :id"
)


def test_asyncpg_gets_numbers_and_the_names_in_their_order() -> None:
    statement = for_asyncpg(TRICKY)
    assert statement.parameters == ("id", "name")
    assert statement.sql == TRICKY.replace(":id", "$1").replace(":name", "$2")
    assert statement.bind({"name": "n", "id": 1, "more": None}) == (1, "n")


def test_asyncpg_gets_lists_as_texts() -> None:
    """The driver looks up no types for them; ids of rows, of which there are many, stay what they are (OBX-1)."""
    statement = for_asyncpg("SELECT f(:ids::uuid[], :marks::uuid[], :limits::int[], :at::pg_catalog.timestamptz[])")
    texts = (
        "$2::pg_catalog.text[]::uuid[], $3::pg_catalog.text[]::int[], $4::pg_catalog.text[]::pg_catalog.timestamptz[]"
    )
    assert statement.sql == f"SELECT f($1::uuid[], {texts})"
    one, at = UUID(int=1), datetime(1, 1, 2, tzinfo=UTC)
    bound = statement.bind({"ids": [one], "marks": [one], "limits": (5, None), "at": [at]})
    assert bound == ([one], [str(one)], ["5", None], ["0001-01-02 00:00:00+00:00"])


@pytest.mark.parametrize("name", ["outbox_claim", "outbox_split", "outbox_due_in", "flow_declare", "worker_beat"])
def test_what_a_start_needs_has_no_types_to_look_up(name: str) -> None:
    """A look-up takes the driver longer than a claim, on every new connection (LSN-2)."""
    assert set(re.findall(r"\$\d+::(?:pg_catalog\.)?(\w+)\[\]", Queries().asyncpg(name).sql)) <= {"text"}


def test_psycopg_gets_names_and_doubled_percent_signs() -> None:
    text = for_psycopg(TRICKY)
    assert text == TRICKY.replace("%", "%%").replace(":id", "%(id)s").replace(":name", "%(name)s")
    query = psycopg._queries.PostgresQuery(psycopg.adapt.Transformer())
    query.convert(text, {"id": 1, "name": "n"})
    assert query.query.decode() == TRICKY.replace(":id", "$1").replace(":name", "$2")


def _compiled(text: str) -> tuple[str, set[str]]:
    compiled = sqlalchemy.text(text).compile(dialect=postgresql.dialect(paramstyle="named"))
    return str(compiled), set(compiled.params)


def test_sqlalchemy_sees_the_same_parameters_and_the_same_text() -> None:
    """text() looks into strings and casts, so they are escaped for it (PUB-1)."""
    text, parameters = _compiled(for_sqlalchemy(TRICKY))
    assert parameters == {"id", "name"}
    assert text == TRICKY.replace(":id::uuid", ":id ::uuid")


@pytest.mark.parametrize("sql", ["SELECT '\\:a'", "SELECT 'x :a:b'", "SELECT ' :a '", "SELECT x := 1", "SELECT '::a'"])
def test_sqlalchemy_leaves_other_colons_as_they_are(sql: str) -> None:
    assert _compiled(for_sqlalchemy(sql)) == (sql, set())


_PIECES = st.lists(
    st.sampled_from(
        [
            "'",
            "''",
            '"',
            "$$",
            "$t$",
            "--",
            "\n",
            "/*",
            "*/",
            ":a",
            "::b",
            "%",
            "core.",
            "x",
            " ",
            ";",
            "E'",
            "\\",
            "é",
        ]
    ),
    max_size=30,
).map("".join)


@given(_PIECES)
def test_cutting_sql_into_tokens_loses_nothing(sql: str) -> None:
    assert "".join(part for _, part in queries._tokens(sql)) == sql


@given(_PIECES)
def test_psycopg_undoes_what_was_doubled(sql: str) -> None:
    text = for_psycopg(sql)
    assert text.replace("%%", "").count("%") == len(re.findall(r"%\(\w+\)s", text))


@pytest.mark.parametrize("convert", [for_psycopg, for_sqlalchemy, lambda sql: for_asyncpg(sql).sql])
def test_a_statement_without_parameters_is_unchanged(convert: Callable[[str], str]) -> None:
    assert convert("SELECT now()") == "SELECT now()"


def test_split_cuts_at_statements_and_nowhere_else() -> None:
    """A migration outside a transaction runs statement by statement (OBX-3)."""
    script = "-- a; b\nSELECT ';' ; DO $$ BEGIN; END $$;\n/* ; */ SELECT \"x;y\"\n;"
    assert split(script) == ["SELECT ';'", "DO $$ BEGIN; END $$", 'SELECT "x;y"']


def test_a_statement_is_rendered_once_for_a_schema() -> None:
    """A scrape reads with dozens of them, and must not cut each of them into pieces again (OBS-4)."""
    name = "count_open"
    assert Queries("core").asyncpg(name) is Queries("core").asyncpg(name)
    assert '"shop".open_rows' in Queries("shop").asyncpg(name).sql
