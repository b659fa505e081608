"""What an agent can do. Stand-ins: a real one asks a model and calls other services, and takes as long."""

import asyncio
from typing import Any


class ToolFault(Exception):
    """The tool was reached and says no; to ask again would not help."""


async def use(step: dict[str, Any], key: str) -> str:
    """One step of a task. An error other than ToolFault is the worker's to retry.

    `key` goes along with every call: a worker may die after the call and before it has written that down, and the next
    one calls again. Who moves money has to recognise it.
    """
    match step:
        case {"look_up": str(order)}:
            return f"order {order} was delivered twice"
        case {"refund": int(cents), "order": str(order)}:
            if cents > 10_000:
                raise ToolFault(f"the bank refuses a refund of {cents} cents")
            return f"refunded {cents} cents for order {order}"
        case {"wait": float(seconds)}:
            await asyncio.sleep(seconds)
            return f"waited {seconds:g} s"
    raise ToolFault(f"there is no tool for {sorted(step)}")
