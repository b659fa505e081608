"""Environments with the wheel, what a page says to install, and nothing else.

They are made of links into this one, so that nothing is downloaded.
"""

from __future__ import annotations

import os
import re
import shlex
import venv
import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, distribution
from pathlib import Path
from typing import Protocol

from holdfast.installing import DISTRIBUTION
from tests.adoption.test_installing import declared
from tests.docs.support import blocks

_WHEEL = re.compile(r"\./(holdfast_outbox-\S+?\.whl)(?:\[([\w,]+)\])?")
# As pip writes them: a path may be too long for the first line of a script.
_SCRIPT = """#!/bin/sh
'exec' "{python}" "$0" "$@"
import sys
from {module} import {attribute}
sys.exit({attribute}())
"""


def make_environment(folder: Path, wheel: Path, *extras: str, beside: Sequence[str] = ()) -> Path:
    """Make an environment with the wheel and what pip would install for extras and beside; return its Python."""
    venv.create(folder / "env", symlinks=True, with_pip=False)
    python = folder / "env" / "bin" / "python"
    [site] = (folder / "env" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    commands = list(scripts(distribution(DISTRIBUTION)))
    for name in declared(*extras, beside=beside) - {DISTRIBUTION}:
        try:
            installed = distribution(name)
        except PackageNotFoundError:  # not for this platform
            continue
        commands += scripts(installed)
        for file in installed.files or ():
            if not file.parts[0].startswith("..") and "__pycache__" not in file.parts:
                link(Path(str(installed.locate_file(file))), site / file)
    for command in commands:
        path = python.with_name(command.name)
        path.write_text(_SCRIPT.format(python=python, module=command.module, attribute=command.attr))
        path.chmod(0o755)
    return python


def link(file: Path, place: Path) -> None:
    """Link a file, and what Python has compiled of it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists():
        return
    place.symlink_to(file)
    if file.suffix == ".py":
        for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
            (place.parent / "__pycache__").mkdir(exist_ok=True)
            (place.parent / "__pycache__" / compiled.name).symlink_to(compiled)


def scripts(installed: Distribution) -> Iterator[EntryPoint]:
    """The commands of a distribution."""
    yield from installed.entry_points.select(group="console_scripts")


class Installed(Protocol):
    """Returns the variables of a shell in which a page was followed; extras may take the place of others."""

    def __call__(self, page: Path, **in_place_of: str) -> dict[str, str]: ...


def environment_of(page: Path, wheel: Path, folder: Path, in_place_of: dict[str, str]) -> dict[str, str]:
    """Make the environment that a page says to install, and return the variables of a shell in it."""
    [line] = [
        line for block in blocks("text", pages=[page]) for line in block.text.splitlines() if "pip install" in line
    ]
    named, *beside = shlex.split(line.partition("pip install ")[2])
    found = _WHEEL.fullmatch(named)
    assert found and found[1] == wheel.name, f"{page}: {line}"
    extras = [in_place_of.get(extra, extra) for extra in (found[2] or "").split(",")]
    python = make_environment(folder, wheel, *extras, beside=beside)
    ours = ("HOLDFAST", "PYTHON", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "PATH": f"{python.parent}{os.pathsep}/usr/bin{os.pathsep}/bin"}
