"""An endpoint with a key."""

import argparse
from typing import Any

from benchmarks.systems import requests


async def http(options: argparse.Namespace) -> dict[str, Any]:
    return await requests.measure(options, idempotent=True)
