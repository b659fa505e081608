"""The software bill of materials of a release, as CycloneDX JSON: ./dev release sbom > sbom.cdx.json

It is made of requirements.lock, which pins every package that any extra needs, and of the metadata of the packages in
.venv. What `pip install .` brings is `required`; what only an extra brings is `optional`. The same lock gives
the same document.
"""

from __future__ import annotations

import json
import re
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from holdfast.installing import DISTRIBUTION, package_version

ROOT = Path(__file__).parents[1]
_PINNED = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;\\]+)")


@dataclass(frozen=True)
class Pinned:
    """A package of the lock."""

    name: str
    version: str
    hashes: tuple[str, ...]

    @property
    def reference(self) -> str:
        return f"pkg:pypi/{self.name}@{self.version}"


def pinned(lock: str) -> list[Pinned]:
    """Return the packages that a lock pins, some in several versions for different Pythons or platforms."""
    found: list[Pinned] = []
    for block in re.split(r"\n(?=[A-Za-z0-9])", lock):
        if match := _PINNED.match(block):
            name = canonicalize_name(match["name"])
            hashes = tuple(sorted(re.findall(r"--hash=sha256:([0-9a-f]{64})", block)))
            found.append(Pinned(name, match["version"], hashes))
    return sorted(found, key=lambda each: each.reference)


def needs(name: str, extras: frozenset[str] = frozenset()) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the packages that an installed package requires on this platform, with the extras of each."""
    try:
        lines = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return  # for another platform
    for line in lines:
        requirement = Requirement(line)
        markers = [{"extra": extra} for extra in (*extras, "")]
        if requirement.marker is None or any(requirement.marker.evaluate(each) for each in markers):
            yield canonicalize_name(requirement.name), frozenset(requirement.extras)


def closure(name: str) -> set[str]:
    """Return everything that a package without extras brings with it."""
    pending, seen = [(name, frozenset[str]())], set[tuple[str, frozenset[str]]]()
    while pending:
        each = pending.pop()
        if each not in seen:
            seen.add(each)
            pending += needs(*each)
    return {found for found, _ in seen} - {name}


def document(lock: str) -> dict[str, object]:
    """Return the bill of materials for a lock."""
    packages = pinned(lock)
    required = closure(DISTRIBUTION)
    version = package_version()
    root = f"pkg:pypi/{DISTRIBUTION}@{version}"
    components = [
        {
            "type": "library",
            "bom-ref": each.reference,
            "name": each.name,
            "version": each.version,
            "purl": each.reference,
            "scope": "required" if each.name in required else "optional",
            "hashes": [{"alg": "SHA-256", "content": content} for content in each.hashes],
            **_licenses(each.name),
        }
        for each in packages
    ]
    dependencies = []
    for reference, name in sorted({root: DISTRIBUTION, **{each.reference: each.name for each in packages}}.items()):
        wanted = {need for need, _ in needs(name)}
        depends_on = [each.reference for each in packages if each.name in wanted]
        dependencies.append({"ref": reference, "dependsOn": depends_on})
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, root + json.dumps(components))}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library", "bom-ref": root, "name": DISTRIBUTION, "version": version, "purl": root,
                **_licenses(DISTRIBUTION),
            }
        },
        "components": components,
        "dependencies": dependencies,
    }  # fmt: skip


def _licenses(name: str) -> dict[str, object]:
    try:
        found = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return {}
    if expression := found.get("License-Expression"):
        return {"licenses": [{"expression": expression}]}
    label = found.get("License") or ""
    return {"licenses": [{"license": {"name": label}}]} if label and "\n" not in label else {}


def main() -> None:
    """Write the document to standard output."""
    json.dump(document((ROOT / "requirements.lock").read_text()), sys.stdout, indent=2, sort_keys=True)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
