"""Starting the command: `--help` and `version` import nothing that they do not need, and missing extras are named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import holdfast
import holdfast.operator
from holdfast.cli import app
from holdfast.cli.command_group import first_sentence
from tests.adoption.test_installing import PROGRAM, hidden_from

pytestmark = pytest.mark.newcomer

ROOT = Path(__file__).parents[2]

IMPORTED = """
import json, sys
from holdfast.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    print(json.dumps([end.code, sorted(sys.modules)]), file=sys.stderr)
"""
# Each of them takes longer to import than the command may take.
SLOW = {"asyncio", "asyncpg", "pydantic", "pydantic_core", "rich", "structlog", "ssl", "uvloop", "sqlalchemy"}


def python(*arguments: str, timeout: float = 110) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout)


@pytest.mark.parametrize("arguments", [["version"], ["--version"], ["--help"], ["-h"]])
def test_what_is_imported(arguments: list[str]) -> None:
    """holdfast --help in 0.4 s and holdfast version in 0.25 s, which is a matter of imports (OPS-1)."""
    done = python("-c", IMPORTED, *arguments)
    code, imported = json.loads(done.stderr)
    assert (code, SLOW & set(imported)) == (0, set())
    assert not {name for name in imported if name.startswith("holdfast.worker")}
    assert done.stdout


def test_a_command_does_not_import_the_others() -> None:
    _, imported = json.loads(python("-c", IMPORTED, "handlers", "--help").stderr)
    assert {f"holdfast.cli.{name}" for name in app.COMMANDS} & set(imported) == {"holdfast.cli.handlers"}


def test_the_listed_commands_are_those_that_exist() -> None:
    """The help of the command is that of its modules, although it does not import them."""
    whole = app.command_tree(*app.COMMANDS)
    for name, help in app.COMMANDS.items():
        assert first_sentence(whole.commands[name].help) == help, name
    assert set(whole.commands) == set(app.command_tree().commands)


def every(command: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    inner = getattr(command, "commands", {})
    return [path, *(each for name, found in inner.items() for each in every(found, (*path, name)))]


@pytest.mark.parametrize("path", every(app.command_tree(*app.COMMANDS)), ids=" ".join)
def test_help_reads_as_text(path: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """At 80 columns, without the names of Python's types, frames or colours (OPS-1)."""
    assert app.run([*path, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    for wrong in ("<bool>", "<str>", "<int>", "<float>", "<list", "\x1b", "│"):
        assert wrong not in "\n".join(lines)


def test_a_mistyped_command_is_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["statsu"]) == 2
    assert "status" in capsys.readouterr().err
    assert app.run(["failed", "replya"]) == 2
    assert "replay" in capsys.readouterr().err


def test_python_m_holdfast() -> None:
    """The same command, also where the script is not on the PATH (RUN-1)."""
    done = python("-m", "holdfast", "version")
    assert (done.returncode, done.stdout.split()[0]) == (0, "holdfast")
    assert "Usage: holdfast [OPTIONS] COMMAND" in python("-m", "holdfast", "--help").stdout


MISSING = {
    "cli": "import runpy; sys.argv = ['holdfast', 'status']; runpy.run_module('holdfast', run_name='__main__')",
    "django": "import holdfast.integrations.django",
    "embedded": "import os; os.environ['PATH'] = ''; from holdfast.embedded import binaries; "
    "binaries.available_servers = lambda: []; binaries.find_binaries()",
    "fastapi": "import holdfast.integrations.fastapi",
    "prometheus": "sys.meta_path.pop(0); sys.modules['prometheus_client'] = None; "
    "from holdfast.observability import prometheus; prometheus.require()",
    "schedules": "from holdfast import HandlerRegistry; "
    "HandlerRegistry().schedule('a.b', name='nightly', cron='0 3 * * *')",
    "sentry": "import holdfast.integrations.sentry",
    "sqlalchemy": "import holdfast.integrations.sqlalchemy",
}


@pytest.mark.parametrize("extra", MISSING)
def test_a_missing_extra_is_one_line_with_the_command_that_installs_it(extra: str) -> None:
    """The last line of what is printed; the command line prints no other (RUN-1)."""
    done = python("-c", f"{PROGRAM}\n{MISSING[extra]}", hidden_from(None))
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert f"pip install '.[{extra}]' in a checkout of Holdfast, or 'PATH/TO/HOLDFAST.whl[{extra}]'" in last
    if extra == "cli":
        assert done.stderr.strip().splitlines() == [last]
        assert done.returncode == 2


@pytest.mark.parametrize("package", [holdfast, holdfast.operator])
def test_every_public_name_is_found(package: Any) -> None:
    """Names are imported when they are used; a list of them and what is found agree."""
    for name in package.__all__:
        assert getattr(package, name) is not None
        assert name in dir(package)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = package.nonsense


def test_modules_are_found_as_attributes() -> None:
    done = python("-c", "import holdfast; print(holdfast.errors.ConfigurationError.__name__)")
    assert done.stdout.strip() == "ConfigurationError", done.stderr
