"""The reference pages name everything there is, and nothing else: settings, errors, commands, links."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from typing import Any

import pytest
import typer.core
import typer.main

import holdfast
from holdfast import (
    HandlerRegistry,
    HoldfastError,
    NewEvent,
    Publisher,
    Reactions,
    RetryPolicy,
    WorkerSettings,
    generation,
    outcome,
)
from holdfast.cli import environment
from holdfast.cli.app import make_app
from holdfast.idempotency import IdempotencySettings
from holdfast.operator import Operators
from holdfast.postgres.doctor import CHECKS
from holdfast.postgres.operations import status
from holdfast.testing import plugin
from tests.docs.support import PAGES, ROOT, names, read, sections, table

SETTINGS = sections(read("docs/settings.md"))


# --- settings ---


def default(field: Field[Any]) -> str:
    if field.default_factory is not MISSING:
        return f"`{field.default_factory()!r}`"
    return "" if field.default is MISSING else f"`{field.default!r}`"


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ("WorkerSettings", WorkerSettings),
        ("RetryPolicy", RetryPolicy),
        ("Options of publish", NewEvent),
        ("IdempotencySettings", IdempotencySettings),
    ],
)
def test_every_field_is_documented_with_its_default(section: str, kind: type[Any]) -> None:
    documented = {row[0].strip("`"): row[1] for row in table(SETTINGS[section])}
    assert documented == {field.name: default(field) for field in fields(kind) if field.init and field.name != "_"}


@pytest.mark.parametrize(
    ("section", "call", "also"),
    [
        ("Publisher", Publisher, {"observers": "(log_notice,)"}),
        ("Handlers", HandlerRegistry.handler, {"retry": "RetryPolicy()"}),
        ("HandlerRegistry", HandlerRegistry, {}),
        ("Reactions", Reactions, {"observers": "(log_fact,)"}),
        ("Schedules", HandlerRegistry.schedule, {}),
        ("Operators", Operators, {}),
    ],
)
def test_every_argument_is_documented_with_its_default(section: str, call: Any, also: dict[str, str]) -> None:
    parameters = [p for p in inspect.signature(call).parameters.values() if p.name != "self"]
    expected = {p.name: "" if p.default is p.empty else f"`{also.get(p.name, repr(p.default))}`" for p in parameters}
    assert {row[0].strip("`"): row[1] for row in table(SETTINGS[section])} == expected
    assert "retry" not in also or RetryPolicy() == inspect.signature(call).parameters["retry"].default


def test_every_variable_of_the_environment_is_documented() -> None:
    of_tests = set(re.findall(r"environ\S*\(\"(HOLDFAST_\w+)\"", inspect.getsource(plugin)))
    used = set(re.findall(r"environ\S*\(\"(\w+)\"", inspect.getsource(environment))) | {generation.VARIABLE} | of_tests
    assert set(names(table(SETTINGS["The environment"]))) == used
    assert {"HOLDFAST_DSN", "HOLDFAST_LISTEN_DSN"} <= used


def test_the_arguments_of_a_worker_are_documented() -> None:
    arguments = set(inspect.signature(holdfast.Worker).parameters) - {"dsn", "registry", "settings"}
    assert all(f"`{argument}`" in SETTINGS["WorkerSettings"] for argument in arguments)


def test_connections_are_as_documented() -> None:
    """The table is the formula (OBX-7)."""
    rows = table(sections(read("docs/managed-postgres.md"))["Connections"])
    settings = [WorkerSettings(), WorkerSettings(listen=False)]
    assert [[int(cell) for cell in row[1:]] for row in rows] == [
        [each.connections_needed(transactional) for transactional in (0, 1, 2)] for each in settings
    ]
    assert WorkerSettings().connections_needed(0, scheduled=True) == WorkerSettings().connections_needed(0) + 1


def test_the_limits_of_status_are_as_documented() -> None:
    text = sections(read("docs/commands.md"))["holdfast status"]
    for limit in (status.MOST, status.MOST_IN_ROUTE, status.MOST_ROUTES):
        assert f"{limit:,}" in text


def test_the_fillfactor_is_as_documented() -> None:
    found = re.search(r"fillfactor = (\d+)", read("src/holdfast/postgres/sql/migrations/0001_baseline.sql"))
    assert found and f"fillfactor of {found[1]} " in read("docs/architecture/claiming.md").replace("\n", " ")


# --- errors ---


# What a program alone, or a project of Django, can import. They have no errors.
NOT_IMPORTABLE = ("__main__", "integrations.django.admin", "integrations.django.models")


def errors() -> set[str]:
    for module in pkgutil.walk_packages(holdfast.__path__, "holdfast."):
        if not module.name.endswith(NOT_IMPORTABLE):
            importlib.import_module(module.name)
    found, classes = set(), [HoldfastError]
    while classes:
        kind = classes.pop()
        classes.extend(kind.__subclasses__())
        if not kind.__name__.startswith("_") and kind.__module__.startswith("holdfast"):
            found.add(kind.__name__)
    return found


def test_every_error_is_documented() -> None:
    page = sections(read("docs/errors.md"))
    documented = names(table(page["Raised to you"])) + names(table(page["Raised by your handlers"]))
    assert sorted(documented) == sorted(errors())


def test_every_error_is_where_the_page_says() -> None:
    page = sections(read("docs/errors.md"))
    elsewhere = {
        name: module.strip("`")
        for module, found in table(read("docs/errors.md").partition("\n## ")[0])
        for name in re.findall(r"`(\w+)`", found)
    }
    documented = {*names(table(page["Raised to you"])), *names(table(page["Raised by your handlers"]))}
    for name in documented | set(elsewhere):
        module = importlib.import_module(elsewhere.get(name, "holdfast.errors"))
        assert issubclass(getattr(module, name), HoldfastError) is (name != "MissingExtra"), name


def test_every_outcome_is_documented() -> None:
    rows = table(sections(read("docs/errors.md"))["Returned by your handlers"])
    documented = {name.partition("(")[0] for name in names(rows)}
    assert documented == {kind.__name__ for kind in outcome.Outcome.__args__}


# --- commands ---


def commands(group: Any, path: tuple[str, ...] = ("holdfast",)) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


COMMANDS = dict(commands(typer.main.get_command(make_app())))
EVERYWHERE = {"--dsn", "--database", "--schema", "--debug", "--help"}


def options(command: Any) -> set[str]:
    shown = [p for p in command.params if not getattr(p, "hidden", False)]
    return {option for p in shown for option in (*p.opts, *p.secondary_opts) if option.startswith("--")} - EVERYWHERE


def test_every_command_has_a_section() -> None:
    """In docs/commands.md, and no section is about a command that is gone (OPS-1)."""
    assert set(sections(read("docs/commands.md"))) == set(COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_option_stands_in_its_command_s_section(name: str) -> None:
    """Each option, and none that does not exist (OPS-1)."""
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", sections(read("docs/commands.md"))[name])) - EVERYWHERE
    assert mentioned == options(COMMANDS[name])


def test_what_every_command_takes_is_said_once() -> None:
    introduction = read("docs/commands.md").partition("\n## ")[0]
    assert all(option in introduction for option in EVERYWHERE - {"--help"})


# --- doctor ---


def test_every_check_stands_in_its_table_with_its_own_words() -> None:
    """docs/doctor.md and `holdfast doctor --list` say the same of each check, and name the same codes (OPS-5)."""
    rows = re.findall(r"^\| `([a-z-]+)` \| (.+) \| (`.+`) \|$", read("docs/doctor.md"), re.MULTILINE)
    documented = {name: (about.replace("`", ""), set(re.findall(r"[a-z-]+", codes))) for name, about, codes in rows}
    assert documented == {check.name: (check.about, set(check.codes)) for check in CHECKS}


# --- pages ---


LINKED = [*PAGES, *ROOT.glob("*.md"), *ROOT.glob("examples/*/README.md")]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    """Each link leads to a file of the repository and, if it names one, to a heading in it."""
    for page in LINKED:
        for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                found = (page.parent / target).resolve() if target else page
                assert found.exists(), f"{page.relative_to(ROOT)} links to {target}"
                known = not anchor or anchor in anchors(found.read_text(encoding="utf-8"))
                assert known, f"{page.relative_to(ROOT)} links to #{anchor} in {target}"


def test_the_glossary_is_linked_from_every_guide() -> None:
    """A special word links to its entry at first use."""
    guides = [page for page in PAGES if page.name != "glossary.md"]
    assert [
        str(page.relative_to(ROOT)) for page in guides if "glossary.md" not in page.read_text(encoding="utf-8")
    ] == []


def test_every_page_can_be_found_from_the_index() -> None:
    index = read("docs/index.md")
    pages = [page.relative_to(ROOT / "docs") for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert [str(page) for page in pages if str(page) != "index.md" and f"({page})" not in index] == []


def test_pages_that_the_code_names_exist() -> None:
    for file in (ROOT / "src").rglob("*"):
        if file.suffix in (".py", ".sql"):
            for page in re.findall(r"docs/[\w/-]+\.md", file.read_text(encoding="utf-8")):
                assert (ROOT / page).exists(), f"{file.relative_to(ROOT)} names {page}"
