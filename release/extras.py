"""Tries the wheel with each extra alone, in an empty environment: ./dev release extras [EXTRA ...]

An environment gets what pip would install for one extra, and nothing else. There the first program of the page of the
extra runs, on an embedded server. Extras whose pages have only commands, for other servers, are imported. The installer
also finds another project called holdfast, in a higher version, and must not take it.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from release.wheel import build_wheel, write_decoy
from tests.docs.support import ROOT, blocks


@dataclass(frozen=True)
class First:
    """The first program of an extra: one of a page, or a module to import, and the packages that its page installs."""

    page: str | None = None
    naming: str = ""
    module: str | None = None
    beside: tuple[str, ...] = ()

    def program(self) -> str:
        """Return the text of the first program on the page that contains such a name."""
        if self.page is None:
            return f"import {self.module}"
        found = (block.text for block in blocks("python", pages=[ROOT / self.page]) if self.naming in block.text)
        return next(found)


FIRST = {
    "": First("docs/payloads.md"),
    "alembic": First("docs/alembic.md", "without_holdfast()"),
    "cli": First(module="holdfast.cli.app"),
    "console": First("docs/console.md", "create_console"),
    "django": First(module="holdfast.integrations.django"),
    "embedded": First("docs/installation.md", "EmbeddedPostgres"),
    "fastapi": First("docs/frameworks/fastapi.md", "FastAPI("),
    "faststream": First(module="holdfast.integrations.faststream"),
    "flask": First("docs/frameworks/flask.md", "Flask(", beside=("psycopg[binary]", "psycopg-pool")),
    "kafka": First(module="holdfast.brokers.kafka"),
    "mcp": First("docs/api.md", "holdfast.mcp"),
    "nats": First(module="holdfast.brokers.nats"),
    "oidc": First(module="holdfast.access.oidc"),
    "otel": First("docs/tracing.md", "OpenTelemetry()"),
    "prometheus": First("docs/metrics.md", "prometheus_client"),
    "psycopg": First("docs/transactions.md", "import psycopg", beside=("psycopg-pool",)),
    "rabbitmq": First(module="holdfast.brokers.rabbitmq"),
    "redis": First(module="holdfast.brokers.redis"),
    "schedules": First("docs/schedules.md", "cron="),
    "sentry": First("docs/dead-letters.md", "sentry"),
    "sqlalchemy": First("docs/transactions.md", "sqlalchemy"),
    "testing": First(module="holdfast.testing"),
    "uvloop": First(module="uvloop"),
}

# Runs a program of a page with the names that the page assumes: a connection, a publisher, a registry with a handler.
RUNNER = """
import ast, asyncio, inspect, os, sys
from importlib.metadata import packages_distributions
import asyncpg
from holdfast import HandlerRegistry, Publisher

async def main(text):
    dsn = os.environ["HOLDFAST_DSN"]
    registry = HandlerRegistry()
    registry.add("mail.confirm", ["order.placed"], lambda event: None)
    known = {"dsn": dsn, "connection": await asyncpg.connect(dsn), "registry": registry,
             "publisher": Publisher("shop"), "__name__": "__main__"}
    code = compile(text, "program", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, known)
    if inspect.iscoroutine(result):
        await asyncio.wait_for(result, 30)
    await known["connection"].close()

text = sys.stdin.read()
if "asyncio.run(" in text:
    exec(compile(text, "program", "exec"), {"__name__": "__main__"})
else:
    asyncio.run(main(text))
assert not any("src/holdfast" in (getattr(module, "__file__", None) or "") for module in list(sys.modules.values()))
owners = set(packages_distributions()["holdfast"])
assert owners == {"holdfast-outbox"}, f"the package holdfast is of {owners}"
print("ran")
"""


def run_first(python: Path, extra: str, dsn: str, folder: Path) -> str:
    """Run the first program of an extra with such a Python; return "ran", or the end of the error."""
    run = subprocess.run(
        [python, "-I", "-c", RUNNER],
        input=FIRST[extra].program(),
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOLDFAST_DSN": dsn},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return "ran" if run.stdout.rstrip().endswith("ran") else (run.stderr.strip().splitlines() or ["no output"])[-1]


def main(wanted: list[str]) -> int:
    """Try each extra, print the results, and return 1 if one has failed."""
    from holdfast.embedded import EmbeddedPostgres
    from holdfast.postgres import migrate

    failed = False
    with tempfile.TemporaryDirectory(prefix="holdfast-extras-") as temporary, EmbeddedPostgres() as server:
        folder = Path(temporary)
        wheel = build_wheel(folder)
        write_decoy(folder)
        for extra in wanted or FIRST:
            place, dsn = folder / (extra or "none"), server.create_database(f"extra_{extra or 'none'}")
            asyncio.run(migrate.apply(dsn))
            python = place / "bin" / "python"
            what = [f"{wheel}[{extra}]" if extra else str(wheel), *FIRST[extra].beside]
            subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, place], check=True)
            # Resolved on purpose: what an extra brings to a user's environment is what is tried here.
            install = ["uv", "pip", "install", "--quiet", "--python", python, "--find-links", folder]
            subprocess.run([*install, *what], check=True)
            result = run_first(python, extra, dsn, place)
            failed = failed or result != "ran"
            print(f"{extra or '(none)':<12} {result}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
