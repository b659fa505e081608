"""A release has a bill of materials that names every pinned package, with its hashes (SEC-1, S21)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from release import sbom

pytestmark = pytest.mark.trust

ROOT = Path(__file__).parents[2]


def test_the_bill_names_every_pinned_package() -> None:
    """CycloneDX, the same for the same lock; what a plain install brings is told from what extras bring (S21)."""
    lock = (ROOT / "requirements.lock").read_text()
    run = subprocess.run([sys.executable, "-m", "release.sbom"], cwd=ROOT, capture_output=True, text=True, check=True)
    bill = json.loads(run.stdout)
    assert bill == json.loads(json.dumps(sbom.document(lock)))
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert re.fullmatch(r"urn:uuid:[0-9a-f-]{36}", bill["serialNumber"])
    assert bill["metadata"]["component"]["purl"].startswith("pkg:pypi/holdfast-outbox@")

    components = {each["purl"]: each for each in bill["components"]}
    assert len(components) == len(bill["components"]) == len(re.findall(r"^[A-Za-z0-9]\S*==", lock, re.MULTILINE))
    for each in components.values():
        assert each["purl"] == f"pkg:pypi/{each['name']}@{each['version']}"
        assert f"{each['name']}=={each['version']}" in lock
        assert each["hashes"] and all(found["content"] in lock for found in each["hashes"])
    required = {each["name"] for each in components.values() if each["scope"] == "required"}
    assert {"asyncpg", "pydantic", "pydantic-core", "structlog"} <= required
    assert not required & {"pytest", "django", "typer", "sqlalchemy"}


def test_dependencies_lead_to_components() -> None:
    """Each reference is one of the components, and holdfast depends on what pyproject.toml says (S21)."""
    bill = json.loads(json.dumps(sbom.document((ROOT / "requirements.lock").read_text())))
    root = bill["metadata"]["component"]["bom-ref"]
    known = {root, *(each["bom-ref"] for each in bill["components"])}
    edges = {each["ref"]: each["dependsOn"] for each in bill["dependencies"]}
    assert set(edges) == known
    assert {target for targets in edges.values() for target in targets} <= known
    assert [re.split("[/@]", target)[1] for target in edges[root]] == [
        "asyncpg",
        "pydantic",
        "structlog",
        "typing-extensions",
    ]
