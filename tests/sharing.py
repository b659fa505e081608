"""How the tests are shared out among several processes (./dev test, pytest -n)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# In these folders every test makes what it needs, so its tests are handed out one by one. The files of the others are
# kept whole, because their tests share a database or a server.
SINGLY = ("chaos", "contract", "handling", "operator", "publish", "reactions", "worker")
WHOLE = "tests/operator/test_doctor_health.py"
_SERVERS = re.compile(r"(?<=[\[-])(?:pg\d+|nats|redis|rabbitmq|kafka)(?=[\]-])")  # as fixtures name them


class Shares(LoadScopeScheduling):
    """Hands out shares in the order in which their tests were collected: see in_order_of_shares."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return share_of(nodeid)


def share_of(nodeid: str) -> str:
    """Name the tests that one process runs together with this one: a file's on the same servers, or the test alone."""
    file = nodeid.partition("::")[0]
    if file != WHOLE and file.split("/")[1] in SINGLY:
        return nodeid
    return " ".join([file, *sorted(_SERVERS.findall(nodeid))])


def in_order_of_shares(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Slow shares first, then large ones, then single tests, so that all processes end at about the same time."""
    shares = {item: share_of(item.nodeid) for item in items}
    sizes = Counter(shares.values())
    slow = {shares[item] for item in items if item.get_closest_marker("slow")}
    return sorted(items, key=lambda item: (shares[item] not in slow, -sizes[shares[item]]))
