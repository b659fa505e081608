"""Where a schema is no longer what its migrations made of it. Every such difference is a problem."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import asyncpg

from holdfast.installing import release_remedy
from holdfast.postgres.doctor.description import Attributes, Live, Objects
from holdfast.postgres.doctor.examination import Examination
from holdfast.postgres.doctor.expected import Expected
from holdfast.postgres.doctor.findings import CannotLook, Check, Finding, Severity
from holdfast.postgres.doctor.remedies import Remedies
from holdfast.postgres.schema.contract import Contract, baseline_remedy
from holdfast.postgres.schema.ownership import OWNER, ROLES

_MOST_EVIDENCE = 300

# What can be wrong with each kind of object: missing, extra, or an attribute of it. A code is made of both words.
FLAWS: Mapping[str, Mapping[str, str]] = {
    "table": {
        "missing": "is missing",
        "extra": "is not part of this release",
        "kind": "is not an ordinary table",
        "persistence": "is not kept over a crash of the server",
        "row_security": "hides rows by row-level security",
        "options": "has other storage options, which decide about heap-only updates and vacuuming",
    },
    "column": {
        "missing": "is missing",
        "extra": "is not part of this release",
        "type": "has another type",
        "not_null": "differs in whether it may be NULL",
        "default": "has another default",
        "generated": "is computed otherwise",
        "identity": "differs in whether it numbers rows by itself",
        "collation": "has another collation",
    },
    "constraint": {
        "missing": "is missing",
        "extra": "is not part of this release",
        "definition": "demands something else",
        "invalid": "was never checked against the rows that were there before it",
    },
    "index": {
        "missing": "is missing",
        "extra": "is not part of this release; claims may no longer be heap-only updates",
        "definition": "is on something else",
        "invalid": "is invalid: it costs as much as ever, and no query uses it",
    },
    "trigger": {
        "missing": "is missing",
        "extra": "is not part of this release",
        "definition": "does something else",
        "disabled": "does not fire as it should",
    },
    "rule": {"extra": "is not part of this release, and rewrites statements"},
    "view": {
        "missing": "is missing",
        "extra": "is not part of this release",
        "kind": "is not an ordinary view",
        "definition": "shows something else",
        "options": "has other options",
    },
    "sequence": {
        "missing": "is missing",
        "extra": "is not part of this release",
        "counting": "counts otherwise",
    },
    "function": {
        "missing": "is missing",
        "extra": "is not part of this release",
        "kind": "is of another kind",
        "arguments": "has other arguments",
        "result": "returns something else",
        "language": "is in another language",
        "volatility": "has another volatility",
        "parallel": "has another parallel safety",
        "security": "runs with another role's rights",
        "strict": "treats NULL otherwise",
        "settings": "runs under other settings, search_path among them",
        "body": "has another text",
    },
    "grant": {
        "missing": "is missing",
        "extra": "is not given by this release",
        "columns": "is on other columns",
        "grantable": "may be passed on",
    },
    "default": {"grants": "opens to others what the owner makes next"},
    "role": {
        "missing": "is missing",
        "attributes": "may do something by itself",
        "member_of": "has the rights of another role",
    },
}
_WORDS = {"default": "default privilege on"}


def code_of(kind: str, flaw: str) -> str:
    """As programs know it: column-not-null, index-invalid."""
    return f"{kind}-{flaw}".replace("_", "-")


# --- which release ---


async def _release(examination: Examination) -> list[Finding]:
    def problem(code: str, what: str, evidence: str, remedy: str = examination.apply_command) -> Finding:
        return Finding("problem", code, examination.schema, what, evidence, remedy)

    try:
        await examination.require_installed()
    except CannotLook as nothing:
        evidence = "it has no table outbox and no table migrations"
        return [problem("schema-missing", nothing.reason, evidence, nothing.remedy)]
    release = examination.expected.release
    ledger = await examination.ledger()
    applied = sorted(number for number in ledger if number > 0)
    if not applied or applied != list(range(1, len(applied) + 1)):
        what = f"{examination.schema}.migrations does not list every migration that was applied"
        remedy = f"restore {examination.schema}.migrations from a backup; its lines are also in: holdfast migrate print"
        return [problem("ledger-damaged", what, f"it lists {_shown(applied)}", remedy)]
    if altered := [
        problem(
            "migration-altered",
            f"the migration {migration} is not the text that was applied",
            f"expected {migration.checksum[:12]}; found {ledger[migration.version][:12]}",
            baseline_remedy(examination.schema)
            if migration.version == 1
            else "install the release that migrated this database, or a later one",
        )
        for migration in release.migrations[: len(applied)]
        if ledger[migration.version] != migration.checksum
    ]:
        return altered
    if (outdated := _outdated(examination, len(applied), await examination.contract())) is not None:
        return [outdated]
    if ledger.get(0) != release.functions_checksum:
        evidence = f"expected {release.functions_checksum[:12]}; found {str(ledger.get(0))[:12]}"
        return [problem("functions-outdated", "the functions are those of another release", evidence)]
    return []


def _outdated(examination: Examination, applied: int, contract: Contract | None) -> Finding | None:
    """A schema of an earlier or a later release: a problem, or a warning where code and schema still work together."""
    release, schema = examination.expected.release, examination.schema
    terms = release.terms
    if contract is None:
        what, evidence = f"{schema} records no contract", f"{schema}.contract has no row"
        return Finding("problem", "schema-behind", schema, what, evidence, examination.apply_command)
    evidence = (
        f"the schema has version {applied} and {contract}, which serves {contract.served}; "
        f"this release has version {release.version} and {terms.schema}"
    )
    severity: Severity = "warning" if terms.served_by(contract) and terms.sufficed_by(contract) else "problem"
    if applied < release.version or contract.provides < terms.schema.provides:
        what = f"migrations of {schema} are pending"
        return Finding(severity, "schema-behind", schema, what, evidence, examination.apply_command)
    if applied > release.version or contract.provides > terms.schema.provides:
        what = f"a later release has migrated {schema}"
        return Finding(severity, "schema-ahead", schema, what, evidence, release_remedy(contract.release))
    return None


async def other_release(examination: Examination) -> tuple[str, str] | None:
    """Why this release may not find what it looks for: the schema is of another one; and what would help."""
    release, ledger = examination.expected.release, await _ledger_if_readable(examination)
    version, applied = release.version, max(ledger, default=0)
    if ledger.get(1, release.terms.schema.baseline) != release.terms.schema.baseline:
        return "another migration 0001 has made the schema", baseline_remedy(examination.schema)
    if applied in (0, version):
        return None
    reason = f"the schema has version {applied}, and this release describes version {version}"
    contract = await examination.contract() if applied > version else None
    return reason, examination.apply_command if contract is None else release_remedy(contract.release)


async def _comparable(examination: Examination) -> tuple[Expected, Live]:
    """Both sides, if this release knows what the other should look like."""
    await examination.require_installed()
    if (other := await other_release(examination)) is not None:
        raise CannotLook(*other)
    return examination.expected, await examination.live()


async def _ledger_if_readable(examination: Examination) -> dict[int, str]:
    # The catalogs can be compared without it.
    try:
        return await examination.ledger()
    except asyncpg.PostgresError:
        return {}


# --- the objects ---


async def _compare(examination: Examination, kind: str) -> list[Finding]:
    expected, live = await _comparable(examination)
    ledger = await _ledger_if_readable(examination)
    if kind == "function" and ledger and ledger.get(0) != expected.release.functions_checksum:
        raise CannotLook("the functions are those of another release", examination.apply_command)
    return _differences(expected, live, await _remedies(examination), kind, expected.objects[kind], live.objects[kind])


async def _remedies(examination: Examination) -> Remedies:
    return Remedies(examination.expected, await examination.owner(), examination.apply_command)


def _differences(
    expected: Expected, live: Live, remedies: Remedies, kind: str, wanted: Objects, found: Objects
) -> list[Finding]:
    wanted, found = (_without_orphans(expected, live, kind, objects) for objects in (wanted, found))
    findings = []
    for name, flaw in _flaws(expected, kind, wanted, found):
        label = name if kind in ("grant", "default", "role") else f"{expected.schema}.{name}"
        what = f"the {_WORDS.get(kind, kind)} {label} {FLAWS[kind][flaw]}"
        evidence = _evidence(flaw, wanted.get(name), found.get(name))
        remedy = remedies.of(kind, flaw, wanted.get(name), found.get(name))
        findings.append(Finding("problem", code_of(kind, flaw), label, what, evidence, remedy))
    return findings


def _flaws(expected: Expected, kind: str, wanted: Objects, found: Objects) -> Iterator[tuple[str, str]]:
    """Names, and what is wrong with each."""
    for name, attributes in wanted.items():
        if name not in found:
            yield name, "missing"
            continue
        other = [
            attribute
            for attribute, value in attributes.items()
            if attribute in FLAWS[kind] and not expected.same(kind, value, found[name].get(attribute))
        ]
        # Where a procedure stands in for a function, nothing else of it need be compared.
        yield from ((name, attribute) for attribute in (["kind"] if "kind" in other else other))
    yield from ((name, "extra") for name in found if name not in wanted)


def _without_orphans(expected: Expected, live: Live, kind: str, objects: Objects) -> Objects:
    """Leaves out what belongs to something that is missing, or extra: it comes and goes with that."""
    sides = (expected.objects, live.objects)
    relations = set.intersection(*({*side["table"], *side["view"]} for side in sides))
    others = set.intersection(*({*side["function"], *side["sequence"], ""} for side in sides))

    def stands(attributes: Attributes) -> bool:
        if kind == "sequence":
            return attributes["identity"] is None or attributes["name"] in others
        if kind == "grant":
            return attributes["object"] in relations | others
        return attributes.get("relation") is None or attributes["relation"] in relations

    return {name: attributes for name, attributes in objects.items() if stands(attributes)}


def _evidence(flaw: str, wanted: Attributes | None, found: Attributes | None) -> str:
    if wanted is not None and found is not None:
        expected, other = wanted[flaw], found[flaw]
        if isinstance(expected, list) and isinstance(other, list):
            expected, other = sorted(set(expected) - set(other)), sorted(set(other) - set(expected))
        return f"{flaw.replace('_', ' ')}: expected {_shown(expected)}; found {_shown(other)}"
    there = found or wanted or {}
    words = [there.get(attribute) for attribute in ("definition", "type", "result", "columns")]
    shown = next((f" {_shown(word)}" for word in words if word), "")
    return f"found{shown or ' it'}" if found else f"expected{shown or ' it'}"


def _shown(value: object) -> str:
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        value = ", ".join(str(each) for each in value)
    text = " ".join(str(value).split())
    return text if len(text) <= _MOST_EVIDENCE else f"{text[:_MOST_EVIDENCE]}…"


# --- owners and rights ---


async def _owners(examination: Examination) -> list[Finding]:
    expected, live = await _comparable(examination)
    owner, remedies, place = await examination.owner(), await _remedies(examination), await examination.place()
    owners = {("schema", ""): str(place.owner)}
    owners |= {(kind, name): found for (kind, name), found in live.owners.items() if name in expected.objects[kind]}
    findings = []
    granted = [grant for grant in live.objects["grant"].values() if grant["grantee"] in ROLES]
    if owner != OWNER and granted:
        # A restore without owners gives everything to its login, and leaves the rights of the roles.
        functions = sum(kind == "function" for kind, _ in owners)
        what = (
            f"the schema {examination.schema} belongs to {owner}, and Holdfast's roles have rights in it: {functions} "
        )
        what += f"functions run with the rights of {owner}" + ", a superuser" * place.owner_is_superuser
        evidence = f"expected {OWNER}; found {owner}; {len(granted)} grants to Holdfast's roles"
        remedy = f"{examination.apply_command} --roles always"
        findings.append(Finding("problem", "owner-lost", examination.schema, what, evidence, remedy))
    for (kind, name), found in owners.items():
        if found != owner:
            label = f"{examination.schema}.{name}" if name else examination.schema
            what = f"the {kind} {label} belongs to {found}, and everything else to {owner}"
            evidence = f"expected {owner}; found {found}"
            findings.append(Finding("problem", "owner-other", label, what, evidence, remedies.owner(kind, name)))
    return findings


async def _grants(examination: Examination) -> list[Finding]:
    expected, live = await _comparable(examination)
    owner, remedies = await examination.owner(), await _remedies(examination)
    # Without roles everything belongs to one login, and no other role is given anything.
    ours = {*ROLES, "PUBLIC"} if owner == OWNER else {"PUBLIC"}
    wanted = expected.objects["grant"] if owner == OWNER else {}
    held = {name: grant for name, grant in live.objects["grant"].items() if grant["grantee"] in ours}
    findings = _differences(expected, live, remedies, "grant", wanted, held)
    for kind, name, privileges in live.lost_rights:
        label = f"{examination.schema}.{name}"
        what = f"the owner may no longer use its own {kind.lower()} {label}, nor may the functions"
        evidence = f"{owner} lacks {', '.join(privileges)}"
        remedy = remedies.lost_right(kind, name, privileges)
        findings.append(Finding("problem", "owner-right-lost", label, what, evidence, remedy))
    for name, grant in live.objects["grant"].items():
        # What is granted to a role of ours is never to be revoked: see owner-lost.
        if grant["grantee"] not in ours | {*ROLES}:
            what = f"the grant {name} was made by hand; no migration revokes it"
            evidence = f"{grant['grantee']} is not one of Holdfast's roles"
            remedy = remedies.of("grant", "extra", None, grant)
            findings.append(Finding("warning", "grant-foreign", name, what, evidence, remedy))
    return findings


async def _roles(examination: Examination, kind: str) -> list[Finding]:
    """Nothing to be seen where one login owns everything."""
    return await _compare(examination, kind) if await examination.owner() == OWNER else []


# --- the list ---


def _codes(kind: str) -> tuple[str, ...]:
    return tuple(code_of(kind, flaw) for flaw in FLAWS[kind])


def _check(name: str, kind: str, about: str) -> Check:
    return Check(name, "drift", about, _codes(kind), partial(_compare, kind=kind))


_RELEASE = (
    "schema-missing", "schema-behind", "schema-ahead", "ledger-damaged", "migration-altered", "functions-outdated",
)  # fmt: skip

CHECKS = (
    Check("release", "drift", "the migrations and functions that were applied are this release's", _RELEASE, _release),
    _check("tables", "table", "every table, with its storage options (fillfactor, autovacuum)"),
    _check("columns", "column", "every column: type, NULL, default, generation, identity, collation"),
    _check("constraints", "constraint", "every CHECK, primary key and foreign key"),
    _check("indexes", "index", "every index: columns, predicate, validity"),
    _check("triggers", "trigger", "every trigger, and whether it fires"),
    _check("rules", "rule", "no rule rewrites statements"),
    _check("views", "view", "every view"),
    _check("sequences", "sequence", "every sequence"),
    _check("functions", "function", "every function: text, arguments, rights, settings"),
    Check("owners", "drift", "everything belongs to one owner", ("owner-other", "owner-lost"), _owners),
    Check(
        "grants",
        "drift",
        "each role has the privileges of this release, and no other role has any",
        (*_codes("grant"), "owner-right-lost", "grant-foreign"),
        _grants,
    ),
    Check(
        "default-grants",
        "drift",
        "objects that the owner creates later are private",
        _codes("default"),
        partial(_roles, kind="default"),
    ),
    Check(
        "roles",
        "drift",
        "the roles have no attributes or memberships of their own",
        _codes("role"),
        partial(_roles, kind="role"),
    ),
)
