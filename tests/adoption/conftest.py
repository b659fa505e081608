"""The wheel, and environments that have what a page installs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import holdfast
from tests.adoption.bare import Installed, environment_of
from tests.docs.support import ROOT


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    from release.wheel import build_wheel

    return build_wheel(tmp_path_factory.mktemp("dist"))


@pytest.fixture
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The variables of a shell in an environment that has what a page says to install, and nothing else.

    `./dev release matrix` runs tests with a wheel that is installed already, in the environment that it tries.
    """

    def variables(page: Path, **in_place_of: str) -> dict[str, str]:
        if Path(holdfast.__file__).is_relative_to(ROOT / "src"):
            folder = tmp_path_factory.mktemp(page.stem)
            return environment_of(page, request.getfixturevalue("wheel"), folder, in_place_of)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST", "PYTHONPATH"))}
        return {**kept, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}

    return variables
