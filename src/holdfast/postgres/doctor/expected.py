"""The schema as it should be: `schema.json`, which is the description of a freshly migrated database.

It is written by a test, from the migrations themselves, and the same on every supported Postgres:

    HOLDFAST_UPDATE_GOLDEN=1 ./dev test -- tests/operator/test_doctor_expected.py

It says `core`, as the SQL does, and is rendered for the schema's name in the same way. Functions are kept as
fingerprints: their text is in the release.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from holdfast.postgres.doctor.description import Description, fingerprint
from holdfast.postgres.queries import render, split
from holdfast.postgres.schema.release import Release, load

_BODY = re.compile(r"\bAS\s+(?P<tag>\$\w*\$)(?P<body>.*?)(?P=tag)", re.DOTALL)
_FUNCTION = re.compile(r"CREATE\s+(?:OR\s+REPLACE\s+)?FUNCTION\s+core\.(\w+)", re.IGNORECASE)
_MIXED = re.compile(r"\bNOT \(|\bAND\b.*\bOR\b|\bOR\b.*\bAND\b", re.DOTALL)
_QUALIFIER = re.compile(r'(?<![\w."])(?:"[^"]+"|[a-z_][\w$]*)\.(?=["a-z_])')


@cache
def shipped() -> Mapping[str, Any]:
    """The file: `release` is what it was made from, `objects` the description."""
    text = files("holdfast.postgres.doctor").joinpath("schema.json").read_text(encoding="utf-8")
    content: Mapping[str, Any] = json.loads(text)
    return content


def stamp(release: Release) -> str:
    """Tells one release's SQL from another's."""
    texts = [*(migration.checksum for migration in release.migrations), release.functions_checksum, release.grants]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


class Expected:
    """What this release expects in a schema of this name."""

    def __init__(self, schema: str) -> None:
        self.schema = schema
        self.release = load()
        self._bodies = _bodies(self.release, schema)
        self.objects: Description = {
            kind: {name: self._placed(attributes) for name, attributes in objects.items()}
            for kind, objects in shipped()["objects"].items()
        }

    def _placed(self, attributes: Mapping[str, Any]) -> Mapping[str, Any]:
        placed = {
            name: render(value, self.schema) if isinstance(value, str) else value for name, value in attributes.items()
        }
        if "body" in placed:
            # One that no text of the release has matches nothing, as it should.
            placed["body"] = self._bodies.get(attributes["body"], attributes["body"])
        return placed

    def same(self, kind: str, wanted: object, found: object) -> bool:
        """Whether two values of an attribute mean the same, however this server prints them."""
        return self._plain(kind, wanted) == self._plain(kind, found)

    def _plain(self, kind: str, value: object) -> object:
        if not isinstance(value, str):
            return value
        if kind == "view":
            # Before Postgres 16 a column of the only table in FROM was printed with the table's name.
            value = " ".join(_QUALIFIER.sub("", value).split())
        if not _MIXED.search(value):
            # Made again from what it printed, as by a restore, Postgres prints `a BETWEEN 1 AND 2 AND b` with other
            # parentheses. Where only AND joins, or only OR, they mean nothing.
            value = value.replace("(", "").replace(")", "")
        # Quoted where its name is a reserved word, and everywhere in what was rendered.
        return value.replace(f'"{self.schema}".', f"{self.schema}.")

    def is_replaced(self, function: str) -> bool:
        """Whether every `holdfast migrate apply` makes the function anew."""
        return function in _FUNCTION.findall("\n".join(self.release.functions))

    def function_text(self, function: str) -> str:
        """The statement of a migration that made the function, to be run again."""
        texts = [text for migration in self.release.migrations for text in split(migration.sql)]
        made = [text for text in texts if (match := _FUNCTION.match(text)) and match[1] == function]
        again = re.sub(r"\ACREATE\s+(?:OR\s+REPLACE\s+)?", "CREATE OR REPLACE ", made[-1], flags=re.IGNORECASE)
        return render(again, self.schema)


def _bodies(release: Release, schema: str) -> dict[str, str]:
    """The fingerprint of each function's text in this schema, by its fingerprint in the schema core."""
    texts = [*(migration.sql for migration in release.migrations), *release.functions]
    found = [match["body"] for text in texts for match in _BODY.finditer(text)]
    return {fingerprint(body): fingerprint(render(body, schema)) for body in found}
