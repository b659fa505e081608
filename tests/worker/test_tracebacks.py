"""Where a failure was raised: what is kept of tracebacks, and that it is short, safe and cheap."""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.event_data import EventData
from holdfast.failure import MAX_TRACEBACK_BYTES, ErrorReport, describe

pytestmark = pytest.mark.newcomer

HERE = "worker/test_tracebacks.py"
CANARY = "canary-2718281828"


def raised(function: Callable[[], object], **options: Any) -> ErrorReport:
    try:
        function()
    except BaseException as error:
        return describe(error, **options)
    raise AssertionError("nothing was raised")


def place(report: ErrorReport) -> str:
    assert report.traceback is not None
    first = report.traceback.partition("\n")[0]
    assert first.startswith("raised at ")
    return first.removeprefix("raised at ")


def missing_key() -> None:
    {}["amount"]


def test_the_line_and_its_text() -> None:
    """File, line and function, and the text of the line; the path is the one that is imported (DLQ-7)."""
    report = raised(missing_key)
    line = missing_key.__code__.co_firstlineno + 1
    assert place(report).endswith(f"{HERE}:{line} in missing_key")
    assert "/".join(Path(__file__).parts[:3]) not in str(report.traceback)
    assert report.traceback and report.traceback.splitlines()[-1] == '    {}["amount"]'


def test_what_is_not_raised_has_no_traceback() -> None:
    """Nor what a handler states as its reason (DLQ-7)."""
    assert describe(ValueError("no")).traceback is None
    assert describe(ValueError("no")).stored == "ValueError: no"


def test_neither_locals_nor_messages_nor_secrets() -> None:
    """Values of variables are nowhere; the text has no values of the payload, the code no passwords (DLQ-7)."""

    def fail() -> None:
        card = CANARY
        dict(dsn="postgres://u:hunter2@h/db")[f"no card {card}"]

    report = raised(fail, event=EventData({"card": CANARY}))
    assert CANARY not in report.stored and "hunter2" not in report.stored
    assert "<payload.card>" in report.text and "fail" in place(report)


def test_a_redactor_sees_the_traceback_too() -> None:
    """One that raises costs the traceback, not the row (DLQ-7)."""
    report = raised(missing_key, redact=lambda text: text.replace("missing_key", "[function]"))
    assert place(report).endswith("in [function]")

    def broken(text: str) -> str:
        raise LookupError

    assert raised(missing_key, redact=broken).traceback is None


def test_causes_and_groups_are_shown_shortly() -> None:
    """Each with its own frames; a group's place is that of its first member (DLQ-7)."""

    def wrapped() -> None:
        try:
            missing_key()
        except KeyError as error:
            raise RuntimeError("no amount") from error

    report = raised(wrapped)
    assert place(report).endswith("in test_causes_and_groups_are_shown_shortly.<locals>.wrapped")
    assert "\ncaused by KeyError\n" in str(report.traceback) and "in missing_key" in str(report.traceback)

    async def member() -> None:
        missing_key()

    async def group() -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(100):
                tasks.create_task(member())

    report = raised(lambda: asyncio.run(group()))
    assert place(report).endswith("in missing_key")
    assert str(report.traceback).count("\nwith KeyError\n") == 3


class Hostile(Exception):
    def __str__(self) -> str:
        raise SystemExit("no")

    @property
    def __traceback__(self) -> Any:  # type: ignore[override]
        raise SystemExit("no")

    @property
    def status(self) -> Any:
        raise SystemExit("no")


def recursion(n: int = 0) -> int:
    return recursion(n + 1)


def even(n: int = 0) -> int:
    return odd(n + 1)


def odd(n: int = 0) -> int:
    return even(n + 1)


def broken_code() -> None:
    compile("def f(:", "broken_module.py", "exec")


def generated() -> None:
    exec(compile("def f():\n    raise ValueError('x')\nf()", "<template \x1b[31m\u202e>", "exec"), {})  # noqa: S102


def giant() -> None:
    raise ValueError("x" * 50_000_000)


def chained() -> None:
    error: Exception = ValueError("0")
    for n in range(200):
        try:
            raise ValueError(str(n)) from error
        except ValueError as caught:
            error = caught
    raise error


def cycle() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    raise one


@pytest.mark.parametrize("fail", [recursion, even, broken_code, generated, giant, chained, cycle])
def test_strange_errors_have_a_short_and_safe_traceback(fail: Callable[[], object]) -> None:
    """Recursion, syntax errors, generated code, 50 MB of message, endless causes (DLQ-7)."""
    started = time.monotonic()
    report = raised(fail)
    assert time.monotonic() - started < 2
    assert report.traceback is not None and len(report.traceback.encode()) <= MAX_TRACEBACK_BYTES
    assert not set(report.traceback) & set("\x1b\x1e\x00\r")
    assert len(report.stored.encode()) <= 8192 + MAX_TRACEBACK_BYTES + 1


def test_an_error_that_cannot_be_read_is_still_described() -> None:
    """Whatever its attributes do (DLQ-7)."""

    def fail() -> None:
        raise Hostile

    assert "fail" in place(raised(fail))


def test_the_place_of_a_recursion_does_not_depend_on_the_stack() -> None:
    """One signature, however deep the stack was before (DLQ-7)."""

    def deeper(depth: int, function: Callable[[], object]) -> object:
        return deeper(depth - 1, function) if depth else function()

    for function in (recursion, even):
        assert len({raised(lambda f=function, d=d: deeper(d, f)).signature for d in range(4)}) == 1  # type: ignore[misc]


def test_a_syntax_error_names_its_own_file() -> None:
    """And not the import of it (DLQ-7)."""
    report = raised(broken_code)
    assert "broken_module.py:1 in <module>" in str(report.traceback)


def test_an_application_that_is_installed_is_still_the_users_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container the application is often one more package in site-packages (DLQ-7)."""
    root = tmp_path / "site-packages"
    for package, code in (
        ("shopapp", "import libapp\ndef charge():\n    libapp.call()\n"),
        ("libapp", "def call():\n    raise ValueError('no')\n"),
    ):
        (root / package).mkdir(parents=True)
        (root / package / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(root)
    shopapp = importlib.import_module("shopapp")
    try:
        shopapp.charge()
    except ValueError as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # this test is no library
        installed, unknown = describe(error, home="shopapp"), describe(error)
    assert place(installed) == "shopapp/__init__.py:3 in charge"
    assert str(installed.traceback).splitlines()[1:] == [
        "  shopapp/__init__.py:3 in charge",
        "    libapp.call()",
        "  libapp/__init__.py:2 in call",
    ]
    assert place(unknown) == "libapp/__init__.py:2 in call"
    del sys.modules["shopapp"], sys.modules["libapp"]


def test_huge_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DLQ-7."""
    (tmp_path / "huge_module.py").write_text("def fail():\n    raise ValueError('no')\n" + "# x\n" * 300_000)
    monkeypatch.syspath_prepend(tmp_path)
    report = raised(importlib.import_module("huge_module").fail)
    assert str(report.traceback).splitlines()[-1] == "  huge_module.py:2 in fail"


def test_a_failure_costs_little() -> None:
    """A storm of retries must not be slowed down by what is kept of each; about 0.1 ms on an idle machine (DLQ-7)."""

    def deep(n: int) -> None:
        if n:
            deep(n - 1)
        raise ValueError("order 17 has no price")

    try:
        deep(200)
    except ValueError as error:
        kept = error
    describe(kept)
    started = time.process_time()
    for _ in range(1_000):
        describe(kept)
    assert time.process_time() - started < 2
