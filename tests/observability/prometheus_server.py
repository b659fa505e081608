"""A real Prometheus beside a test, which scrapes every second."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

from tests.worker.support import until


@asynccontextmanager
async def prometheus(folder: Path, targets: Mapping[str, int], rules: str) -> AsyncIterator[str]:
    """Yields its address. The targets are ports, by the name of their job; its files are in the folder."""
    jobs = [
        {"job_name": name, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]} for name, port in targets.items()
    ]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": jobs,
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    (folder / "rules.yml").write_text(rules)
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        "prometheus",
        "--config.file=prometheus.yml",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        cwd=folder,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        await until(lambda: asyncio.to_thread(answers, f"{address}/-/ready"), what="Prometheus is ready")
        yield address
    finally:
        process.terminate()
        await process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=2) as response:  # noqa: S310 - an address of our own
            return bool(response.status == 200)
    except OSError:
        return False


def ask(address: str, path: str, **parameters: object) -> list[dict[str, Any]]:
    """The results of a query, or the alerts."""
    with urlopen(f"{address}/api/v1/{path}?{urlencode(parameters)}", timeout=30) as response:  # noqa: S310
        answer = json.load(response)
    assert answer["status"] == "success", answer
    data = answer["data"]
    return list(data["alerts"] if "alerts" in data else data["result"])
