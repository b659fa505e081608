r"""Changes of SQL functions, by rules over their text without comments and strings, and probes in them.

A rule sees `WHERE o.status = '_________'` for `WHERE o.status = 'in_flight' -- why`. Error texts never change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.planted.changes import Change

_FUNCTION = re.compile(
    r"^CREATE OR REPLACE FUNCTION core\.(?P<name>\w+)\((?P<head>.*?)\bAS (?P<tag>\$\w*\$)\n(?P<body>.*?)(?P=tag);",
    re.MULTILINE | re.DOTALL,
)
_UNSEEN = re.compile(r"--[^\n]*|'(?:[^']|'')*'")
_COMMENT_OR_STRING = re.compile(r"(?P<comment>--[^\n]*)|'(?:[^']|'')*'")
_ERROR = re.compile(r"\bRAISE\b[^;]*;")

_NEGATED = {
    "NOT EXISTS": "EXISTS", "IS NOT NULL": "IS NULL", "IS NULL": "IS NOT NULL", "IS NOT TRUE": "IS TRUE",
    "NOT IN": "IN", "IS DISTINCT FROM": "IS NOT DISTINCT FROM", "IS NOT DISTINCT FROM": "IS DISTINCT FROM",
    "IF NOT FOUND": "IF FOUND", "IF FOUND": "IF NOT FOUND",
}  # fmt: skip
_TURNED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "<>": "="}
_MOVED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
_INEQUALITY = r"(?<= )(<=|>=|<>|<|>)(?= )"
# What can stand after the last condition of a WHERE clause.
_CLAUSE = r"(?:\)|AND\b|ORDER BY|GROUP BY|LIMIT|FOR\b|RETURNING|UNION|ON CONFLICT|LOOP|\Z)"


@dataclass(frozen=True)
class SqlFunction:
    """A function of the database and its place in a file."""

    name: str
    language: str
    start: int
    body: int
    end: int


def functions_of(source: str) -> Iterator[SqlFunction]:
    """Yield the functions that a file makes."""
    for match in _FUNCTION.finditer(source):
        language = re.search(r"\bLANGUAGE (\w+)", match["head"])
        yield SqlFunction(
            match["name"], language[1] if language else "sql", match.start(), match.start("body"), match.end("body")
        )


def bodies(source: str) -> list[str]:
    """Return the texts of the functions as the database keeps them."""
    return [source[each.body - 1 : each.end] for each in functions_of(source)]


def functions(source: str) -> Iterator[tuple[str, int, int]]:
    """Yield the name, the first and the last line of every function."""
    for each in functions_of(source):
        yield each.name, source.count("\n", 0, each.start) + 1, source.count("\n", 0, each.end) + 1


def changes(source: str) -> Iterator[Change]:
    """Yield every change that the functions of a file offer, in the order of the functions and of the kinds."""
    for function in functions_of(source):
        body = source[function.body : function.end]
        for kind, start, end, text in _of_body(body):
            yield Change(kind, function.name, function.body + start, function.body + end, text)


def with_probe(source: str, name: str, number: int) -> str | None:
    """Return the code with a line in the server's log at the first call of a function in a transaction.

    Return None for a function in plain SQL.
    """
    # As a condition: a PERFORM would change what FOUND is.
    said, now = f"'planted.p{number}'", "pg_catalog.now()::text"
    probe = f"""
    IF current_setting({said}, true) IS DISTINCT FROM {now} AND set_config({said}, {now}, true) IS NOT NULL THEN
        RAISE LOG 'planted {number}';
    END IF;"""
    for function in functions_of(source):
        begin = re.compile(r"^BEGIN\b", re.MULTILINE).search(masked(source), function.body, function.end)
        if function.name == name and function.language == "plpgsql" and begin:
            return source[: begin.end()] + probe + source[begin.end() :]
    return None


def called_in(source: str, names: set[str]) -> set[str]:
    """Return the functions of a file that call one of these."""
    wanted = re.compile(rf"\bcore\.(?:{'|'.join(sorted(names))})\(")
    return {each.name for each in functions_of(source) if wanted.search(masked(source), each.body, each.end)} - names


def masked(sql: str) -> str:
    """Return SQL of the same length with blanks for comments, and lines for what is quoted."""

    def hide(match: re.Match[str]) -> str:
        length = len(match[0])
        return " " * length if match[0].startswith("--") else "'" + "_" * (length - 2) + "'"

    return _UNSEEN.sub(lambda match: re.sub(r"[^\n]", "_", match[0]) if "\n" in match[0] else hide(match), sql)


def _of_body(body: str) -> Iterator[tuple[str, int, int, str]]:
    code = _ERROR.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), masked(body))
    for kind, pattern, replacement in _RULES:
        for match in pattern.finditer(code):
            text = replacement(match)
            if text is not None:
                yield kind, match.start(), match.end(), text
    yield from _dropped_columns(code)
    for match in _INTERVAL.finditer(_COMMENT_OR_STRING.sub(lambda m: " " * len(m[0]) if m["comment"] else m[0], body)):
        yield "interval halved", match.start(), match.end(), f"({match[0]} / 2)"


def _equality(match: re.Match[str]) -> str | None:
    """Turn an equation round, and leave assignments and arguments as they are."""
    line = match.string[match.string.rfind("\n", 0, match.start()) + 1 : match.start()]
    return " <> " if re.search(r"\b(?:WHERE|AND|OR|ON|IF|ELSIF|WHEN)\b(?:(?!,|\bSET\b|\bTHEN\b).)*$", line) else None


def _other_operator(match: re.Match[str]) -> str | None:
    if re.search(r"\bBETWEEN\b(?:(?!\bAND\b).)*\Z", match.string[: match.start()], re.DOTALL):
        return None
    return {"AND": "OR", "OR": "AND"}[match[0]]


def _without(match: re.Match[str]) -> str | None:
    if re.search(r"\bBETWEEN\b(?:(?!\bAND\b).)*\Z", match.string[: match.start()], re.DOTALL):
        return None
    return None if re.search(r"\b(?:THEN|BETWEEN)\b", match[0]) else ""


def _dropped_columns(code: str) -> Iterator[tuple[str, int, int, str]]:
    """Yield each column that an UPDATE sets beside others, unless it is set to itself."""
    for match in re.finditer(r"\bUPDATE (?:core\.\w+ )?(?:\w+\s+)?SET\s+", code):
        parts, begin, depth = [], match.end(), 0
        for token in re.compile(r"[(),;]|\b(?:WHERE|FROM|RETURNING)\b|\Z").finditer(code, match.end()):
            depth += {"(": 1, ")": -1}.get(token[0], 0)
            if depth < 0 or (depth == 0 and token[0] not in "),"):
                parts.append((begin, token.start()))
                break
            if depth == 0 and token[0] == ",":
                parts.append((begin, token.start()))
                begin = token.end()
        for number, (start, end) in enumerate(parts if len(parts) > 1 else []):
            assignment = code[start:end].strip()
            if not re.fullmatch(r"(\w+)\s*=\s*\w+\.\1", assignment) and not assignment.startswith("("):
                # With the comma after the first column, and before any other.
                following = re.compile(r",\s*").match(code, end) if number == 0 else None
                span = (start, following.end()) if following else (start - 1, start + len(code[start:end].rstrip()))
                yield "column not set", *span, ""


_INTERVAL = re.compile(r"\binterval '[^'0][^']*'")
_SIMPLE = r"(?:[^()\n;]|\([^()\n]*\))"


def _rule(
    kind: str, pattern: str, replacement: str | Callable[[re.Match[str]], str | None]
) -> tuple[str, re.Pattern[str], Callable[[re.Match[str]], str | None]]:
    found = (lambda match: match.expand(replacement)) if isinstance(replacement, str) else replacement
    return kind, re.compile(pattern, re.MULTILINE), found


_RULES = (
    _rule("comparison turned round", _INEQUALITY, lambda match: _TURNED[match[1]]),
    _rule("comparison turned round", r"(?<=[\w)\]']) = ", _equality),
    _rule("bound moved by one", _INEQUALITY, lambda match: _MOVED.get(match[1])),
    # A version only has to be another one.
    _rule("off by one", r"(?<=[+-] )(?<!\bversion \+ )1\b", "2"),
    _rule("and/or swapped", r"\b(?:AND|OR)\b", _other_operator),
    _rule("condition dropped", rf" *\bAND {_SIMPLE}+?(?= AND | OR |\)|;|\s*\n\s*{_CLAUSE})", _without),
    _rule("SKIP LOCKED dropped", r" SKIP LOCKED\b", ""),
    _rule("row lock dropped", r" *\bFOR (?:NO KEY )?UPDATE(?: OF \w+)?(?: SKIP LOCKED)?", ""),
    _rule("condition negated", r"\b(?:" + "|".join(_NEGATED) + r")\b", lambda match: _NEGATED[match[0]]),
    _rule("ORDER BY dropped", rf" *\bORDER BY {_SIMPLE}+?(?=\)|;| LIMIT| FOR| OFFSET|\s*\n\s*{_CLAUSE})", ""),
    _rule("branch never taken", r"(?<=\bIF )[^;\n]+?(?= THEN\b)", "false"),
    _rule("branch always taken", r"(?<=\bIF )[^;\n]+?(?= THEN\b)", "true"),
    _rule("call left out", r"\bPERFORM [^;]*(?=;)", "NULL"),
    _rule("return value dropped", r"(?<=\bRETURN )(?!QUERY|NEXT|NULL)[^;]+(?=;)", "NULL"),
    _rule("conflict not expected", r"\s*\bON CONFLICT(?: \([^)]*\))? DO NOTHING", ""),
    _rule(
        "greatest/least swapped", r"\b(?:greatest|least)(?=\()", lambda m: {"greatest": "least"}.get(m[0], "greatest")
    ),
)
