"""Every verb of the people who look after the events, once: for the command line, and for whatever else they use.

    from holdfast.operator import Operator, actions, failures

    async with Operator(dsn, actor="ada@example.com") as operator:
        for group in (await failures.groups(operator)).groups:
            print(group.name, group.count, group.last_seen)

Reads end at limits and never count what is settled. Changes check their arguments before anything else, write their
line in `core.audit` in the same transaction, and have a dry run that keeps nothing.
"""

from holdfast.operator.selection import Selection
from holdfast.operator.session import Operator, Refused

__all__ = ["Operator", "Refused", "Selection"]
