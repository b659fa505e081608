"""What `./dev release matrix` says of a combination: only what this machine does not have is no failure."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from release import matrix, wheel
from release.matrix import EXTRAS, TESTS, Combination, NotMade, requirements
from tests.adoption.test_installing import PROJECT

HERE = Combination("3.11", "locked", 18)


def test_an_environment_that_cannot_be_made_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where the command that fails prints nothing."""
    monkeypatch.setattr(matrix.shutil, "which", lambda name: "/bin/true")
    monkeypatch.setattr(matrix, "requirements", lambda wheel, dependencies: [])
    monkeypatch.setattr(matrix, "run_quietly", lambda *command: fail())

    def fail() -> None:
        raise NotMade("uv pip install failed: it printed nothing")

    *_, result, good = matrix.tried(tmp_path, tmp_path / "a.whl", HERE, [])
    assert (result, good) == ("failed: uv pip install failed: it printed nothing", False)


def test_a_command_that_prints_nothing_is_named() -> None:
    with pytest.raises(NotMade, match="false failed: it printed nothing"):
        matrix.run_quietly("false")
    assert matrix.outcome("") == "did not run"


def test_a_python_that_is_missing_is_not_tried(tmp_path: Path) -> None:
    *_, result, good = matrix.tried(tmp_path, tmp_path / "a.whl", Combination("3.99", "locked", 18), [])
    assert (result, good) == ("not tried: python3.99 is not on PATH", True)


def test_servers_are_known_by_their_major_version(tmp_path: Path) -> None:
    """Also a candidate of a release; the first server of a major version is the one that tests would use."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 18.6 19rc1 15.18 15.17\n")
    python.chmod(0o755)
    assert matrix.servers(python) == {18: "18.6", 19: "19rc1", 15: "15.18"}


def test_an_empty_selection_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        matrix.main(["--python", "3.12", "--postgres", "15"])
    assert ended.value.code == 2 and "no combination has --python 3.12, --postgres 15" in capsys.readouterr().err


def test_every_extra_is_tried_and_every_test_is_there() -> None:
    assert set(EXTRAS) == set(PROJECT["optional-dependencies"]) - {"demo", "dev"}
    assert [each for each in TESTS if not (matrix.ROOT / each).exists()] == []


def test_the_lowest_versions_are_those_of_the_package_itself() -> None:
    """uv takes the lowest of what is named to it, and not of what a wheel wants."""
    assert {"asyncpg>=0.30", "fastapi>=0.121", "flask>=3"} <= set(requirements(Path("a.whl"), "lowest"))


def test_a_wheel_of_another_version_may_lie_beside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def build(command: list[str], **options: object) -> None:
        (Path(command[-1]) / "holdfast_outbox-9.9.9-py3-none-any.whl").touch()

    monkeypatch.setattr(subprocess, "run", build)
    (tmp_path / "holdfast_outbox-0.1.0-py3-none-any.whl").touch()
    assert wheel.build_wheel(tmp_path) == tmp_path / "holdfast_outbox-9.9.9-py3-none-any.whl"
