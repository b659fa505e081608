"""docs/api.md has every public name, and the pages about observers and connections all that there is."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType

import pytest
from asyncpg import connect_utils

import holdfast
from holdfast import HandlerRegistry, Operator, Publisher, Reactions, Worker
from holdfast.embedded import EmbeddedPostgres
from holdfast.integrations.fastapi import Idempotency
from holdfast.integrations.sqlalchemy import DomainEvents
from holdfast.telemetry import Fact
from tests.docs.support import ROOT, blocks, names, read, sections, table

pytestmark = pytest.mark.newcomer

PAGE = read("docs/api.md")
SECTIONS = sections(PAGE)
CODE = "\n".join(block.text for block in blocks("python", pages=[ROOT / "docs" / "api.md"]))
OBSERVERS = sections(read("docs/observers.md"))


def exported(module: ModuleType) -> set[str]:
    """What `__all__` says, else the functions and classes that the module itself defines."""
    if hasattr(module, "__all__"):
        return set(module.__all__)
    own = {name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    return {name for name in own if name[0] != "_"}


def words(text: str) -> set[str]:
    """Every name that is written as code, outside of the examples."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return {word for code in re.findall(r"`([^`]+)`", prose) for word in re.findall(r"\w+", code)}


@pytest.mark.parametrize("module", sorted(name for name in SECTIONS if name.startswith("holdfast")))
def test_every_exported_name_is_in_its_section(module: str) -> None:
    """A name that users may import is found in the text of the page (RUN-1)."""
    found = exported(importlib.import_module(module))
    if module == "holdfast.telemetry":
        found |= {"Fact", "Observer"}
    assert found and sorted(found - words(SECTIONS[module])) == []


def test_every_module_that_exports_names_has_a_section() -> None:
    """Packages and contracts with `__all__`, and the integrations (RUN-1)."""
    package = ROOT / "src" / "holdfast"
    public = {f"holdfast.{file.parent.name}" for file in package.glob("*/__init__.py") if "__all__" in file.read_text()}
    public |= {f"holdfast.{file.stem}" for file in package.glob("[a-z]*.py") if "__all__" in file.read_text()}
    public |= {f"holdfast.integrations.{file.stem}" for file in (package / "integrations").glob("[a-z]*")}
    assert sorted(public - set(SECTIONS)) == []


@pytest.mark.parametrize("name", sorted(holdfast.__all__))
def test_every_name_of_the_package_is_in_an_example(name: str) -> None:
    """Which tests/docs/test_snippets.py runs (RUN-1)."""
    assert re.search(rf"\b{name}\b", CODE)


def imported() -> Iterator[tuple[str, str]]:
    """Every name that an example of any page imports from the library, after its module."""
    for block in blocks("python"):
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "holdfast":
                yield from ((str(node.module), each.name) for each in node.names)


def test_every_name_that_an_example_imports_is_named() -> None:
    """What is not on the page may change. Errors have a page of their own (RUN-1)."""
    pages = {module: PAGE for module, _ in imported()} | {"holdfast.errors": read("docs/errors.md")}
    missing = {(module, name) for module, name in imported() if name not in words(pages[module])}
    assert sorted(missing) == []
    assert [module for module, page in pages.items() if f"`{module}`" not in page and module not in SECTIONS] == []


# Used by other parts of the library.
INTERNAL = {"wanted", "require_open"}


ENTRIES = [
    Publisher, HandlerRegistry, Worker, Reactions, Operator, EmbeddedPostgres, DomainEvents, Idempotency,
]  # fmt: skip


@pytest.mark.parametrize("kind", ENTRIES)
def test_every_method_is_named(kind: type) -> None:
    """Also `Publisher.bind`, `registry.include` and their like (RUN-1)."""
    methods = {name for name, value in vars(kind).items() if name[0] != "_" and callable(value)} - INTERNAL
    assert sorted(methods - words(PAGE) - set(re.findall(r"\.(\w+)\(", CODE))) == []


# --- observers ---


def test_every_fact_is_listed() -> None:
    """With all of its fields (OBS-1)."""
    rows = {row[0].strip("`"): row[2] for row in table(OBSERVERS["The facts"])}
    assert set(rows) == {kind.__name__ for kind in Fact.__args__}
    for kind in Fact.__args__:
        assert set(kind.__dataclass_fields__) <= words(OBSERVERS["The facts"]), kind.__name__


def noticed() -> Iterator[str]:
    """The names in calls that report a notice, and in what a function assigns to a variable that such a call gets."""
    for file in (ROOT / "src").rglob("*.py"):
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                found = [text for given in reported(function) for text in texts(given, function)]
                yield from (text for text in found if re.fullmatch(r"[a-z]+(_[a-z]+)+", text))


def reported(function: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(function):
        called = getattr(node, "func", None)
        name = getattr(called, "id", None) or getattr(called, "attr", None)
        if isinstance(node, ast.Call) and name in ("Notice", "_notice", "report", "_report"):
            assert not any(isinstance(each, ast.JoinedStr) for each in node.args), "a name is written as a whole"
            yield from node.args


def texts(given: ast.expr, function: ast.AST) -> Iterator[str]:
    if isinstance(given, ast.Constant) and isinstance(given.value, str):
        yield given.value
    elif isinstance(given, ast.IfExp):
        yield from texts(given.body, function)
        yield from texts(given.orelse, function)
    elif isinstance(given, ast.Name):
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and any(getattr(each, "id", "") == given.id for each in node.targets):
                yield from texts(node.value, function)


@pytest.mark.slow
def test_every_notice_is_listed() -> None:
    """What a log says can be looked up (OBS-1)."""
    listed = names(table(OBSERVERS["The notices"]))
    assert listed == sorted(listed)
    assert set(listed) == set(noticed())


# --- connections ---


def test_the_parameters_of_an_address_are_those_of_the_driver() -> None:
    """Each is understood and not handed to the server as a setting; one that is not listed is handed on (SEC-1)."""
    code = inspect.getsource(connect_utils._parse_connect_dsn_and_args)
    understood = set(re.findall(r"query\.pop\(\s*'(\w+)'", code))
    rows = table(sections(read("docs/connections.md"))["Parameters"])
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row[0])} == understood
    for name in ("connect_timeout", "keepalives", "channel_binding"):
        assert name not in understood
