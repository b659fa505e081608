"""SQL from the package's `.sql` files, for any schema name and any driver.

A statement is found by its name. It is either written down in a file directly under `sql/`:

    -- name: publish_one
    -- Why it looks like this.
    INSERT INTO core.outbox (event_type) VALUES (:event_type)

or it is the call of a function in `sql/functions/`, under the function's name: the call of `outbox_extend(p_ids uuid[],
p_lease interval)` is `SELECT core.outbox_extend(:ids::uuid[], :lease::interval)`. Every other file is a script (a
migration, the functions themselves, the grants) that is read as one text.

In all of these files the word `core` is the schema and nothing else, so `render` can replace it wherever it stands.
Statements may run under any search_path; the casts in them are qualified here, the functions in the files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Literal

from holdfast.names import schema_name

_PLACEHOLDER = re.compile(r"\$(\d+)")


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement in asyncpg's form: `$1` stands for the first of `parameters`."""

    sql: str
    parameters: tuple[str, ...]
    lists: frozenset[str] = frozenset()  # parameters that are sent as lists of texts

    def bind(self, values: Mapping[str, object]) -> tuple[object, ...]:
        """The values in the order of the placeholders: `await c.fetch(s.sql, *s.bind({"id": 1}))`."""
        if self.lists:
            values = {name: _texts(value) if name in self.lists else value for name, value in values.items()}
        return tuple(map(values.__getitem__, self.parameters))

    def filled_in(self, values: Mapping[str, object]) -> str:
        """The statement with values in its text, for messages of several statements, which can have no parameters.

        Only for ids, numbers, and names of our own: nothing in them may end a quotation, or look like a placeholder.
        """
        template, order = _template(self.sql)
        texts = [_literal(values[name]) for name in self.parameters]
        return template % tuple([texts[number] for number in order])

    def partly_filled_in(self, values: Mapping[str, object]) -> str:
        """The statement as by `filled_in`, with `%(name)s` for each id that is not among the values.

        Made once for many calls, it spares each of them half of what filling in takes.
        """
        template, order = _template(self.sql)
        texts = [
            _literal(values[name]).replace("%", "%%") if name in values else f"'%({name})s'" for name in self.parameters
        ]
        return template.replace("%%", "%%%%") % tuple([texts[number] for number in order])


@cache
def _template(sql: str) -> tuple[str, tuple[int, ...]]:
    """The statement with `%s` for each placeholder, and which of the parameters stand there."""
    pieces = _PLACEHOLDER.split(sql)
    return "%s".join(piece.replace("%", "%%") for piece in pieces[::2]), tuple(int(each) - 1 for each in pieces[1::2])


def _literal(value: object) -> str:
    if isinstance(value, int):
        return str(value)
    text = str(value)
    if "'" in text or "\\" in text or "$" in text:
        raise ValueError(f"{text!r} cannot stand in the text of a statement")
    return f"'{text}'"


class Queries:
    """The statements and scripts of one installation, rendered for its schema and kept."""

    def __init__(self, schema: str = "core") -> None:
        self.schema = schema_name(schema)
        self._asyncpg: dict[str, Statement] = {}
        self._psycopg: dict[str, str] = {}
        self._sqlalchemy: dict[str, str] = {}

    def asyncpg(self, name: str) -> Statement:
        """The statement with `$n` placeholders, and the names in their order."""
        if name not in self._asyncpg:
            self._asyncpg[name] = _asyncpg_form(name, self.schema)
        return self._asyncpg[name]

    def psycopg(self, name: str) -> str:
        """The statement with `%(name)s`. Pass a mapping, even an empty one: `%` is doubled for it."""
        if name not in self._psycopg:
            self._psycopg[name] = for_psycopg(_statement(name, self.schema))
        return self._psycopg[name]

    def sqlalchemy(self, name: str) -> str:
        """The statement for `sqlalchemy.text()`."""
        if name not in self._sqlalchemy:
            self._sqlalchemy[name] = for_sqlalchemy(_statement(name, self.schema))
        return self._sqlalchemy[name]

    def script(self, path: str) -> str:
        """A whole file under `sql/`, for example `grants.sql`."""
        return render(sql_folder().joinpath(*path.split("/")).read_text(encoding="utf-8"), self.schema)

    def scripts(self, folder: str) -> list[str]:
        """Every script of a folder under `sql/`, in the order of the file names."""
        return [self.script(f"{folder}/{name}") for name in sql_files(sql_folder().joinpath(folder))]


# A scrape and a page of the console read with dozens of statements, each time: they are rendered once in a process.
@lru_cache(maxsize=2_000)
def _asyncpg_form(name: str, schema: str) -> Statement:
    return for_asyncpg(_statement(name, schema))


def _statement(name: str, schema: str) -> str:
    try:
        return render(qualify_casts(_by_name()[name]()), schema)
    except KeyError:
        raise LookupError(f"no file under sql/ has a statement or a function named {name!r}") from None


def sql_files(folder: Traversable) -> list[str]:
    """Names of the `.sql` files directly in a folder, sorted."""
    return sorted(entry.name for entry in folder.iterdir() if entry.is_file() and entry.name.endswith(".sql"))


def sql_folder() -> Traversable:
    """The package's own `sql/`."""
    return files("holdfast.postgres").joinpath("sql")


@cache
def statements() -> Mapping[str, Mapping[str, str]]:
    """The statements of each file under `sql/`, by the file's path and their names, before they are rendered."""
    return {file: {name: sql() for name, sql in named.items()} for file, named in _files()}


def _files() -> Iterator[tuple[str, Mapping[str, Callable[[], str]]]]:
    """What makes the statements of each file. Their texts are only made for those that somebody asks for."""
    folder, functions = sql_folder(), sql_folder().joinpath("functions")
    for name in sql_files(folder):
        yield name, _parsed(folder.joinpath(name).read_text(encoding="utf-8"))
    for name in sql_files(functions):
        yield f"functions/{name}", _called(functions.joinpath(name).read_text(encoding="utf-8"))


@cache
def _by_name() -> Mapping[str, Callable[[], str]]:
    found: dict[str, Callable[[], str]] = {}
    for file, named in _files():
        for name, sql in named.items():
            if name in found:
                raise ValueError(f"{file}: a statement named {name!r} stands in another file too")
            found[name] = sql
    return found


# Both are looked for by the text they begin with, in half a megabyte at every start: a ^ takes several times as long.
_NAME_LINE = re.compile(r"\n-- name:[ \t]*([a-z_][a-z0-9_]*)[ \t]*\r?$", re.MULTILINE)
_FUNCTION = re.compile(
    r"\nCREATE OR REPLACE FUNCTION core\.(?P<name>\w+)\((?P<parameters>[^()]*)\)\s+RETURNS (?P<result>\w+)"
)


def parse(text: str) -> dict[str, str]:
    """The named statements of one file. Comments are for its readers, and are not sent to the server."""
    return {name: sql() for name, sql in _parsed(text).items()}


def _parsed(text: str) -> dict[str, Callable[[], str]]:
    statements: dict[str, Callable[[], str]] = {}
    _header, *parts = _NAME_LINE.split(f"\n{text}")
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        if name in statements:
            raise ValueError(f"the statement {name!r} stands in the file twice")
        statements[name] = partial(_bare, name, body)
    return statements


def _bare(name: str, body: str) -> str:
    """Return a statement without its comments."""
    bare = "".join(" " if kind == "comment" else part for kind, part in _tokens(body))
    lines = (line.rstrip() for line in bare.splitlines())
    sql = "\n".join(line for line in lines if line).strip().rstrip(";").rstrip()
    if not sql:
        raise ValueError(f"the statement {name!r} is empty")
    return sql


# --- reading SQL ------------------------------------------------------------------------------------

_Kind = Literal["code", "comment", "string", "quoted", "dollar"]

_TOKEN = re.compile(
    r"""
      (?P<comment> --[^\n]* | /\* )
    | (?P<string> (?<![\w$])[eE]'(?:[^'\\]|\\.|'')*' | '[^']*(?:''[^']*)*' )
    | (?P<quoted> "[^"]*(?:""[^"]*)*" )
    | (?<![\w$]) (?P<dollar> (?P<tag>\$(?:[A-Za-z_]\w*)?\$) .*? (?P=tag) )
    """,
    re.VERBOSE | re.DOTALL,
)
_COMMENT_EDGE = re.compile(r"/\*|\*/")


def _tokens(sql: str) -> Iterator[tuple[_Kind, str]]:
    """Cut SQL where the rules for names and parameters change. The pieces joined are the text again."""
    position = 0
    while match := _TOKEN.search(sql, position):
        if match.start() > position:
            yield "code", sql[position : match.start()]
        end = match.end()
        if match["comment"] == "/*":
            end = _end_of_block_comment(sql, match.start())
        for kind in ("comment", "string", "quoted", "dollar"):
            if match[kind] is not None:
                yield kind, sql[match.start() : end]
        position = end
    if position < len(sql):
        yield "code", sql[position:]


def _end_of_block_comment(sql: str, start: int) -> int:
    depth = 0
    for edge in _COMMENT_EDGE.finditer(sql, start):
        depth += 1 if edge[0] == "/*" else -1
        if depth == 0:
            return edge.end()
    return len(sql)


def split(script: str) -> list[str]:
    """The single statements of a script, for what cannot run as one command."""
    statements, current = [], ""
    for kind, part in _tokens(script):
        if kind != "code":
            current += part if kind != "comment" else " "
            continue
        *ended, rest = part.split(";")
        for piece in ended:
            statements.append(current + piece)
            current = ""
        current += rest
    statements.append(current)
    return [statement.strip() for statement in statements if statement.strip()]


# --- the schema's name ------------------------------------------------------------------------------

_NAME_AS_TEXT = re.compile(r"'core(?=\.?')")  # nspname = 'core', 'core.' || channel
_NAME = re.compile(r"\bcore\b")  # core.outbox, SCHEMA core, 'core.outbox'::regclass


def render(sql: str, schema: str) -> str:
    """Write `schema` for the word `core`: quoted, because a plain name may be a reserved word, but plain as a text."""
    if schema_name(schema) == "core":
        return sql
    return _NAME.sub(f'"{schema}"', _NAME_AS_TEXT.sub(f"'{schema}", sql))


# --- calls of functions -----------------------------------------------------------------------------

_INTERNAL = re.compile(r" (?:anyarray|record)\b")
_FUNCTION_PARAMETER = re.compile(r"(?:p_)?(?P<name>\w+) (?P<type>\w+(?:\[\])?)(?: DEFAULT .+)?")


def calls(script: str) -> dict[str, str]:
    """The call of each function that a script makes, by the function's name. A parameter is named without its `p_`."""
    return {name: sql() for name, sql in _called(script).items()}


def _called(script: str) -> dict[str, Callable[[], str]]:
    return {
        match["name"]: partial(_call, match["name"], match["parameters"], match["result"])
        for match in _FUNCTION.finditer(f"\n{script}")
        # Only other functions can call those of any array or of a row, and only triggers their own.
        if not _INTERNAL.search(match["parameters"]) and match["result"] != "trigger"
    }


def _call(function: str, parameters: str, result: str) -> str:
    arguments = []
    for parameter in filter(None, map(str.strip, parameters.split(","))):
        match = _FUNCTION_PARAMETER.fullmatch(parameter)
        if match is None:
            raise ValueError(f"{function}: the parameter {parameter!r} is not a name, a plain type and a default")
        # As text: a connection of the application may have a codec of its own for jsonb.
        cast = "text::jsonb" if match["type"] == "jsonb" else match["type"]
        arguments.append(f":{match['name']}::{cast}")
    call = f"core.{function}({', '.join(arguments)})"
    # Made of names in our own files, never of values.
    return f"SELECT * FROM {call}" if result == "TABLE" else f"SELECT {call}"  # noqa: S608


# A cast to a type by its bare name; those that SQL has words of its own for can be shadowed by no schema.
_CAST = re.compile(r"::(?!(?:int|smallint|bigint|boolean|interval)\b)(?=[a-z_]\w*(?![\w.]))")


def qualify_casts(sql: str) -> str:
    """Write `::text` as `::pg_catalog.text`, which means the same under every search_path."""
    return "".join(_CAST.sub("::pg_catalog.", part) if kind == "code" else part for kind, part in _tokens(sql))


# --- parameters -------------------------------------------------------------------------------------

_PARAMETER = re.compile(r"(?<![:\w\])]):([A-Za-z_]\w*)")
# What sqlalchemy.text() takes for a parameter, or for an escaped colon, wherever it stands.
_SQLALCHEMY_SPECIAL = re.compile(r"(?<![:\w\\]):(?=\w+(?![:\w]))|\\(?=:\w*(?![:\w]))")


# Of arrays asyncpg knows only those of texts: for others it looks into the catalogue, once for each connection, which
# takes longer than to claim hundreds of rows. Lists of rows are sent as they are: to read so many would take longer.
_LIST = re.compile(r"\$(\d+)(?=::(?:pg_catalog\.)?(?:smallint|int|bigint|boolean|float8|timestamptz|uuid)\[\])")
_OF_ROWS = frozenset(("ids", "tokens", "events"))


def for_asyncpg(sql: str) -> Statement:
    """`:name` as `$n`, one number for each name."""
    names: dict[str, int] = {}
    text = _substitute(sql, lambda name: f"${names.setdefault(name, len(names) + 1)}", lambda other: other)
    parameters = tuple(names)
    lists = {parameters[int(number) - 1] for number in _LIST.findall(text)} - _OF_ROWS
    if lists:
        text = _LIST.sub(
            lambda match: f"{match[0]}::pg_catalog.text[]" if parameters[int(match[1]) - 1] in lists else match[0], text
        )
    return Statement(text, parameters, frozenset(lists))


def _texts(values: Any) -> list[str | None] | None:
    """Return a list as texts that Postgres reads as the same values."""
    return None if values is None else [None if each is None else str(each) for each in values]


def for_psycopg(sql: str) -> str:
    """`:name` as `%(name)s`, every other `%` doubled."""
    return _substitute(sql, lambda name: f"%({name})s", lambda other: other.replace("%", "%%"))


def for_sqlalchemy(sql: str) -> str:
    """`:name` stays; a colon that text() would misread is escaped, and `:name::type` gets a space."""
    text = _substitute(
        sql,
        lambda name: f":{name}",
        lambda other: _SQLALCHEMY_SPECIAL.sub(lambda match: "\\" + match[0], other),
    )
    return re.sub(r"(?<![:\w\\])(:[A-Za-z_]\w*)(?=::)", r"\1 ", text)


def _substitute(sql: str, parameter: Callable[[str], str], other: Callable[[str], str]) -> str:
    out = []
    for kind, part in _tokens(sql):
        if kind != "code":
            out.append(other(part))
            continue
        for index, piece in enumerate(_PARAMETER.split(part)):
            out.append(parameter(piece) if index % 2 else other(piece))
    return "".join(out)
