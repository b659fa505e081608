"""What puts a difference right: SQL for the schema's owner, or a command. Written to be read, and then run."""

from __future__ import annotations

import re
from typing import Final

from holdfast.postgres.doctor.description import Attributes
from holdfast.postgres.doctor.expected import Expected

# Behind an idle transaction such a statement would wait, and every claim and every producer behind it. Not what is
# built CONCURRENTLY: that blocks no delivery, and has to wait for long transactions.
_LOCKING: Final = re.compile(
    r"^(ALTER|DROP|CREATE) (TABLE|VIEW|MATERIALIZED VIEW|SEQUENCE|TRIGGER|CONSTRAINT TRIGGER|RULE)\b", re.MULTILINE
)
_LOCK_TIMEOUT: Final = "SET lock_timeout = '5s';"
_ADMINISTRATOR: Final = "-- as an administrator, without SET ROLE:"
_SHELL: Final = "-- then, in a shell:"


class Remedies:
    """For one schema. A remedy takes what was wanted and what was found; one of them may be missing."""

    def __init__(self, expected: Expected, owner: str, apply_command: str) -> None:
        self._expected = expected
        self._owner = owner
        self._apply = apply_command
        # As `render` writes it.
        self._schema = "core" if expected.schema == "core" else f'"{expected.schema}"'

    def of(self, kind: str, flaw: str, wanted: Attributes | None, found: Attributes | None) -> str:
        """`flaw` is missing, extra, or the attribute that differs."""
        remedy: str = getattr(self, f"_{kind}")(flaw, wanted or {}, found or {})
        return _impatient(remedy)

    def _in_schema(self, name: str) -> str:
        return f"{self._schema}.{name}" if name else self._schema

    def _own(self, kind: str, name: str) -> str:
        """Also after what makes something: an administrator may run it without becoming the owner first."""
        return f"ALTER {kind} {self._in_schema(name)} OWNER TO {self._owner}"

    # --- tables and what belongs to them ---

    def _table(self, flaw: str, wanted: Attributes, found: Attributes) -> str:
        table = self._in_schema((wanted or found)["name"])
        if flaw == "missing":
            return self._create_table(wanted["name"])
        if flaw == "extra":
            return f"DROP TABLE {table};"
        if flaw == "persistence":
            return f"ALTER TABLE {table} SET LOGGED;"
        if flaw == "row_security":
            return f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY;"
        if flaw == "options":
            return _options(f"ALTER TABLE {table}", wanted["options"], found["options"])
        return f"make {table} an ordinary table again, from a backup"

    def _create_table(self, name: str) -> str:
        if name == "migrations":
            return f"restore {self._in_schema(name)} from a backup; its lines are also in: holdfast migrate print"
        of = {
            kind: [each for each in self._expected.objects[kind].values() if each["relation"] == name]
            for kind in ("column", "constraint", "index", "trigger")
        }
        lines = [_column(column) + (" NOT NULL" if column["not_null"] else "") for column in of["column"]]
        lines += [f"CONSTRAINT {each['name']} {each['definition']}" for each in of["constraint"]]
        options = self._expected.objects["table"][name]["options"]
        body = ",\n".join(f"    {line}" for line in lines)
        made = f"CREATE TABLE {self._in_schema(name)} (\n{body}\n)"
        statements = [made + (f" WITH ({', '.join(options)})" if options else ""), self._own("TABLE", name)]
        statements += [each["definition"] for each in (*of["index"], *of["trigger"])]
        return _script(*statements)

    def _column(self, flaw: str, wanted: Attributes, found: Attributes) -> str:
        table = f"ALTER TABLE {self._in_schema((wanted or found)['relation'])}"
        name = (wanted or found)["name"]
        column = f"{table} ALTER COLUMN {name}"
        again = [f"{table} DROP COLUMN {name}", f"{table} ADD COLUMN {_column(wanted)}" if wanted else ""]
        not_null = [f"{column} SET NOT NULL"] if wanted and wanted["not_null"] else []
        if flaw == "extra":
            return _script(again[0])
        if flaw == "missing":
            return _script(again[1], *not_null)
        if flaw == "generated":
            return _script(*again, *not_null)
        if flaw == "not_null":
            return _script(f"{column} {'SET' if wanted['not_null'] else 'DROP'} NOT NULL")
        if flaw == "default":
            value = wanted["default"]
            return _script(f"{column} DROP DEFAULT" if value is None else f"{column} SET DEFAULT {value}")
        if flaw == "identity":
            return _script(*_identity(column, wanted["identity"], found["identity"]))
        # Type and collation. A view that shows the column has to be dropped before, and made again after.
        collation = f" COLLATE {wanted['collation']}" if wanted["collation"] else ""
        return _script(f"{column} TYPE {wanted['type']}{collation} USING {name}::{wanted['type']}")

    def _constraint(self, flaw: str, wanted: Attributes, found: Attributes) -> str:
        table = f"ALTER TABLE {self._in_schema((wanted or found)['relation'])}"
        name = (wanted or found)["name"]
        drop, validate = f"{table} DROP CONSTRAINT {name}", f"{table} VALIDATE CONSTRAINT {name}"
        if flaw == "extra":
            return _script(drop)
        if flaw == "invalid":
            return _script(validate)
        if wanted["definition"].startswith(("CHECK", "FOREIGN KEY")):
            # Without a look at every row under a lock that stops everybody.
            add = [f"{table} ADD CONSTRAINT {name} {wanted['definition']} NOT VALID", validate]
        else:
            add = [f"{table} ADD CONSTRAINT {name} {wanted['definition']}"]
        return _script(*([] if flaw == "missing" else [drop]), *add)

    def _index(self, flaw: str, wanted: Attributes, found: Attributes) -> str:
        name = self._in_schema((wanted or found)["name"])
        drop = f"DROP INDEX CONCURRENTLY {name}"
        if flaw == "extra":
            return _script(drop)
        if flaw == "invalid":
            return _script(f"REINDEX INDEX CONCURRENTLY {name}")
        create = wanted["definition"].replace("INDEX", "INDEX CONCURRENTLY", 1)
        return _script(*([] if flaw == "missing" else [drop]), create)

    def _trigger(self, flaw: str, wanted: Attributes, found: Attributes) -> str:
        name, table = (wanted or found)["name"], self._in_schema((wanted or found)["relation"])
        drop = f"DROP TRIGGER {name} ON {table}"
        if flaw == "extra":
            return _script(drop)
        if flaw == "disabled":
            return _script(f"ALTER TABLE {table} ENABLE TRIGGER {name}")
        return _script(*([] if flaw == "missing" else [drop]), wanted["definition"])

    def _rule(self, flaw: str, wanted: Attributes, found: Attributes) -> str:
        return f"DROP RULE {found['name']} ON {self._in_schema(found['relation'])};"

    # --- views, sequences, functions ---

    def _view(self, flaw: str, wanted: Attributes, found: Attributes) -> str:
        name = self._in_schema((wanted or found)["name"])
        drop = f"DROP {'MATERIALIZED VIEW' if found.get('kind') == 'm' else 'VIEW'} {name}"
        if flaw == "extra":
            return _script(drop)
        if flaw == "options":
            return _options(f"ALTER VIEW {name}", wanted["options"], found["options"])
        options = f" WITH ({', '.join(wanted['options'])})" if wanted["options"] else ""
        create = f"CREATE VIEW {name}{options} AS\n{wanted['definition'].rstrip(';')}"
        # Its grants go with it.
        return (
            _script(*([] if flaw == "missing" else [drop]), create, self._own("VIEW", wanted["name"]))
            + f"\n{_SHELL}\n{self._apply}"
        )

    def _sequence(self, flaw: str, wanted: Attributes, found: Attributes) -> str:
        name = self._in_schema((wanted or found)["name"])
        if flaw == "extra":
            return f"DROP SEQUENCE {name};"
        if flaw == "missing":
            return _script(f"CREATE SEQUENCE {name} {wanted['counting']}", self._own("SEQUENCE", wanted["name"]))
        return f"ALTER SEQUENCE {name} {wanted['counting']};"

    def _function(self, flaw: str, wanted: Attributes, found: Attributes) -> str:
        name = (wanted or found)["name"]
        drop = f"DROP ROUTINE {self._in_schema(name)}"
        if flaw == "extra":
            return _script(drop)
        plain = name.partition("(")[0]
        again = self._apply
        if not self._expected.is_replaced(plain):
            text = _script(self._expected.function_text(plain), self._own("ROUTINE", name))
            again = f"{text}\n{_SHELL}\n{self._apply}"
        # CREATE OR REPLACE cannot change these; and only it can keep what depends on the function.
        if flaw not in ("result", "arguments", "kind"):
            return again
        return f"{_script(drop)}\n{_SHELL}\n{again}" if again == self._apply else f"{_script(drop)}\n{again}"

    # --- rights ---

    def _grant(self, flaw: str, wanted: Attributes, found: Attributes) -> str:
        one = wanted or found
        on = f"{one['kind']} {self._in_schema(one['object'])}"
        role = one["grantee"]

        def privilege(columns: list[str]) -> str:
            return str(one["privilege"]) + (f" ({', '.join(columns)})" if columns else "")

        if flaw == "missing":
            return f"GRANT {privilege(wanted['columns'])} ON {on} TO {role};"
        if flaw == "extra":
            return f"REVOKE {privilege(found['columns'])} ON {on} FROM {role};"
        if flaw == "grantable":
            return f"REVOKE GRANT OPTION FOR {privilege(found['columns'])} ON {on} FROM {role};"
        lacking = [column for column in wanted["columns"] if column not in found["columns"]]
        beyond = [column for column in found["columns"] if column not in wanted["columns"]]
        return _script(
            *([f"GRANT {privilege(lacking)} ON {on} TO {role}"] if lacking else []),
            *([f"REVOKE {privilege(beyond)} ON {on} FROM {role}"] if beyond else []),
        )

    def _default(self, flaw: str, wanted: Attributes, found: Attributes) -> str:
        statements = []
        for grant in found["grants"]:
            privilege, _, to = grant.partition(" ")
            scope = f" IN SCHEMA {self._schema}" if to.startswith("in the schema") else ""
            start = f"ALTER DEFAULT PRIVILEGES FOR ROLE {self._owner}{scope}"
            statements.append(f"{start} REVOKE {privilege} ON {found['name']} FROM {to.rpartition('to ')[2]}")
        return _script(*statements)

    def _role(self, flaw: str, wanted: Attributes, found: Attributes) -> str:
        if flaw == "missing":
            return self._apply
        if flaw == "attributes":
            beyond = [name for name in found["attributes"] if name not in wanted["attributes"]]
            return f"{_ADMINISTRATOR}\nALTER ROLE {found['name']} {' '.join(f'NO{name}' for name in beyond)};"
        revokes = (f"REVOKE {other} FROM {found['name']}" for other in found["member_of"])
        return f"{_ADMINISTRATOR}\n{_script(*revokes)}"

    def owner(self, kind: str, name: str) -> str:
        """The remedy for an object that belongs to another role."""
        return f"{_ADMINISTRATOR}\n" + _impatient(
            _script(self._own("ROUTINE" if kind == "function" else kind.upper(), name))
        )

    def lost_right(self, kind: str, name: str, privileges: list[str]) -> str:
        """For an owner that may no longer use what it owns."""
        return f"GRANT {', '.join(privileges)} ON {kind} {self._in_schema(name)} TO {self._owner};"


def _script(*statements: str) -> str:
    return "\n".join(f"{statement};" for statement in statements)


def _impatient(remedy: str) -> str:
    """Have a script that locks a table give up rather than wait in front of all others."""
    return f"{_LOCK_TIMEOUT}\n{remedy}" if _LOCKING.search(remedy) else remedy


def _column(column: Attributes) -> str:
    words = [column["name"], column["type"]]
    if column["collation"]:
        words.append(f"COLLATE {column['collation']}")
    if column["generated"] is not None:
        words.append(f"GENERATED ALWAYS AS {column['generated']}")
    elif column["identity"]:
        words.append(f"GENERATED {column['identity']} AS IDENTITY")
    elif column["default"] is not None:
        words.append(f"DEFAULT {column['default']}")
    return " ".join(words)


def _identity(column: str, wanted: str | None, found: str | None) -> list[str]:
    if wanted is None:
        return [f"{column} DROP IDENTITY"]
    if found is None:
        return [f"{column} ADD GENERATED {wanted} AS IDENTITY"]
    return [f"{column} SET GENERATED {wanted}"]


def _options(alter: str, wanted: list[str], found: list[str]) -> str:
    names = [option.partition("=")[0] for option in wanted]
    beyond = [option.partition("=")[0] for option in found if option.partition("=")[0] not in names]
    lacking = [option for option in wanted if option not in found]
    return _script(
        *([f"{alter} SET ({', '.join(lacking)})"] if lacking else []),
        *([f"{alter} RESET ({', '.join(beyond)})"] if beyond else []),
    )
