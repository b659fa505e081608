"""What an error means for an idempotent request, by where it was raised."""

from __future__ import annotations

from enum import Enum

from holdfast.errors import HoldfastError
from holdfast.failure import describe
from holdfast.postgres.faults import is_from_driver, is_lock_timeout, is_unavailable, passes_in_new_transaction
from holdfast.retry import sqlstate_of

_LONGEST_TEXT = 500


class Fault(Enum):
    """What an error means for the request."""

    IN_PROGRESS = "in progress"  # another request with the same key is being carried out: 409
    PASSING = "passing"  # it may not occur when everything is run again
    UNAVAILABLE = "unavailable"  # the database cannot be reached: 503
    OWN = "own"  # the application's own error, which the application answers


def fault_of_taking(error: BaseException) -> Fault:
    """Judge an error of the statement that takes the key.

    It fails closed: a request that cannot be recorded is not carried out.
    """
    if is_lock_timeout(error):
        return Fault.IN_PROGRESS
    return Fault.PASSING if passes_in_new_transaction(error) else Fault.UNAVAILABLE


def fault_of_work(error: BaseException) -> Fault:
    """Judge an error of the endpoint, whose whole transaction is rolled back."""
    if passes_in_new_transaction(error):
        return Fault.PASSING
    return Fault.UNAVAILABLE if is_unavailable(error) else Fault.OWN


def fault_of_settling(error: BaseException) -> Fault:
    """Judge an error of storing the answer or of the commit.

    Without a SQLSTATE it is unknown whether the commit happened, so the answer must not be sent.
    """
    if sqlstate_of(error) is None and not isinstance(error, HoldfastError):
        return Fault.UNAVAILABLE
    return fault_of_work(error)


def log_fields(error: BaseException) -> dict[str, object]:
    """Return what logs may contain of an error: never a driver's message, which may quote rows and parameters."""
    kind, state = type(error), sqlstate_of(error)
    quotes = state is not None or is_from_driver(error)
    text = f"{kind.__module__}.{kind.__qualname__}" if quotes else describe(error).text[:_LONGEST_TEXT]
    return {"error": text, "sqlstate": state}
