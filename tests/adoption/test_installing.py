"""What the extras declare is enough: nothing is imported that only the lock of this repository brings."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from holdfast.installing import DISTRIBUTION

pytestmark = pytest.mark.newcomer

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# The modules that need an extra; all others do with what the package itself requires.
NEEDING = {
    "alembic": ("holdfast.integrations.alembic",),
    "cli": ("holdfast.cli",),
    "console": ("holdfast.api", "holdfast.console"),
    "django": ("holdfast.integrations.django",),
    "fastapi": ("holdfast.integrations.fastapi",),
    "faststream": ("holdfast.integrations.faststream",),
    "flask": ("holdfast.integrations.flask",),
    "kafka": ("holdfast.brokers.kafka",),
    "mcp": ("holdfast.mcp",),
    "nats": ("holdfast.brokers.nats",),
    "oidc": ("holdfast.access.oidc",),
    "otel": ("holdfast.observability.otel",),
    "rabbitmq": ("holdfast.brokers.rabbitmq",),
    "redis": ("holdfast.brokers.redis",),
    "sentry": ("holdfast.integrations.sentry",),
    "sqlalchemy": ("holdfast.integrations.sqlalchemy",),
    "testing": ("holdfast.testing",),
}
# Modules that need two.
BOTH = {"holdfast.testing.django", "holdfast.testing.django_transaction"}

# Import every module named on the command line, with every other distribution hidden.
PROGRAM = """
import importlib, sys

class Hidden:
    names = set(sys.argv[1].split(","))
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}: not declared", name=name)

sys.meta_path.insert(0, Hidden())
# importlib.util.find_spec finds nothing for these, as in an environment without them
sys.modules.update(dict.fromkeys(Hidden.names))
if "django" not in Hidden.names:
    import django
    from django.conf import settings
    contrib = ["admin", "auth", "contenttypes", "messages", "sessions"]
    applications = [*(f"django.contrib.{name}" for name in contrib), "holdfast.integrations.django"]
    settings.configure(INSTALLED_APPS=applications)
    django.setup()
for module in sys.argv[2:]:
    importlib.import_module(module)
"""


def modules() -> list[str]:
    files = (file.relative_to(SOURCE).with_suffix("") for file in sorted((SOURCE / "holdfast").rglob("*.py")))
    return [".".join(file.parts).removesuffix(".__init__") for file in files]


def declared(*extras: str, beside: Sequence[str] = ()) -> set[str]:
    """Every distribution that pip would install for the package with extras, itself included, and what is beside it."""
    found: set[str] = {DISTRIBUTION}
    waiting = [*PROJECT["dependencies"], *beside]
    for extra in extras:
        waiting += PROJECT["optional-dependencies"][extra]
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        wanted = [*requirement.extras, ""]
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        if name in found and not requirement.extras:
            continue
        found.add(name)
        try:
            inner = [Requirement(text) for text in requires(name) or ()]
        except PackageNotFoundError:  # not for this platform
            continue
        waiting += [
            str(each).partition(";")[0]
            for each in inner
            if each.marker is None or any(each.marker.evaluate({"extra": chosen}) for chosen in wanted)
        ]
    return found


def hidden_from(extra: str | None) -> str:
    """Top-level modules of what is installed here and would not be there."""
    known = declared(*filter(None, [extra]))
    owners = packages_distributions()
    names = [name for name, of in owners.items() if not known & {canonicalize_name(each) for each in of}]
    return ",".join(names)


@pytest.mark.nightly("extra alone")
@pytest.mark.parametrize("extra", [None, *NEEDING])
def test_every_module_is_importable_with_what_is_declared(extra: str | None) -> None:
    """As after `pip install '.[cli]'` in an empty environment."""
    if extra is None:
        chosen = [name for name in modules() if not name.startswith(tuple(chain.from_iterable(NEEDING.values())))]
    else:
        chosen = [name for name in modules() if name.startswith(NEEDING[extra]) and name not in BOTH]
    command = [sys.executable, "-c", PROGRAM, hidden_from(extra), *chosen]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


def test_the_check_hides_what_is_not_declared() -> None:
    """Otherwise it would prove nothing: pytest is installed, and no extra of a user's names it."""
    assert "pytest" in hidden_from("cli").split(",")
    assert not {"typer", "rich", "asyncpg", "pydantic_core"} & set(hidden_from("cli").split(","))


FROM_THE_INDEX = re.compile(r"(?:pip install|uv add) (?:-\S+ )*['\"]?holdfast(?:[-_.]outbox)?(?![-\w])")
TEXTS = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *SOURCE.rglob("*.py"), *(ROOT / "examples").rglob("*.*")]


def test_no_text_leads_to_the_project_of_the_same_name() -> None:
    """The package index has another holdfast, and none of ours: texts install from a checkout or a wheel."""
    for name in ("holdfast", "holdfast-outbox", "holdfast_outbox"):
        for wrong in ("pip install {}", "pip install '{}[cli]'", "pip install --upgrade {}", "uv add {}"):
            assert FROM_THE_INDEX.search(wrong.format(name))
        assert not FROM_THE_INDEX.search(f"pip install 'dist/{name}-0.1.0-py3-none-any.whl[cli]'")
        assert not FROM_THE_INDEX.search(f"pip install {name}-0.1.0-py3-none-any.whl")
    files = [file for file in TEXTS if file.suffix in (".md", ".py")]
    assert [str(file) for file in files if FROM_THE_INDEX.search(file.read_text())] == []


def test_every_extra_that_a_text_names_exists() -> None:
    """And the page about installing names all that are for users."""
    extras = set(PROJECT["optional-dependencies"])
    named = {
        extra for file in SOURCE.rglob("*.py") for extra in re.findall(r"extra_remedy\([\"'](\w+)", file.read_text())
    }
    assert named and named <= extras
    page = (ROOT / "docs" / "installation.md").read_text()
    assert extras - {"demo", "dev"} == set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    wheel = f"holdfast_outbox-{PROJECT['version']}-py3-none-any.whl"
    assert wheel in page
