"""The sums: what workers have counted against itself, and against the rows that they have left.

Every delivery that was begun is open, or was closed by exactly one outcome, whatever was killed; and the rows say the
same: a delivery is a row that is not the published row of an event that was split.
"""

import asyncpg

from holdfast.operator import Balance
from holdfast.postgres.queries import Queries

DELIVERIES = """
    SELECT (SELECT count(*) FROM core.outbox WHERE handler_name IS DISTINCT FROM '*')
           + (SELECT count(*) FROM core.archive) AS published,
           (SELECT count(*) FROM core.outbox WHERE settled_at IS NULL AND attempts = 0) AS waiting
"""


async def read(connection: asyncpg.Connection) -> tuple[Balance, int]:
    """The sums of all counts, and how many of the rows that are deliveries were ever claimed."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        balance = Balance(**await connection.fetchrow(Queries("core").asyncpg("read_balance").sql))
        published, waiting = await connection.fetchrow(DELIVERIES)
    return balance, published - waiting


def problems(balance: Balance, begun: int) -> list[str]:
    """What does not add up."""
    found = []
    if balance.difference:
        found.append(f"the counts do not add up: {balance.difference:+d} in {balance}")
    if balance.begun != begun:
        found.append(f"{balance.begun} deliveries are counted as begun, and {begun} rows are")
    return found
