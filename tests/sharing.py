"""How the tests are shared out among several processes (./dev test, pytest -n)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
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
    """Spread slow shares over the first part of the run, as they mostly wait; of each sort the large ones come first.

    So nobody waits for a slow one at the end, and the quick ones have the cores meanwhile.
    """
    shares: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        shares[share_of(item.nodeid)].append(item)
    slow: list[list[pytest.Item]] = []
    quick: list[list[pytest.Item]] = []
    for share in sorted(shares.values(), key=len, reverse=True):
        (slow if any(item.get_closest_marker("slow") for item in share) else quick).append(share)
    ordered: list[pytest.Item] = []
    begun, passed, first_part = 0, 0, 0.6 * sum(map(len, quick))
    for share in quick:
        while begun < len(slow) and begun * first_part <= passed * len(slow):
            ordered += slow[begun]
            begun += 1
        ordered += share
        passed += len(share)
    return [*ordered, *chain.from_iterable(slow[begun:])]
