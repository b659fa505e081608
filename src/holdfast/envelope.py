"""The envelope that producers and handlers share, and the ids of events."""

import os
import time
from datetime import UTC, datetime, timedelta
from threading import Lock
from typing import Annotated, Any, Self
from uuid import UUID

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from holdfast.errors import FieldError

_Text = Annotated[str, Field(min_length=1)]


class EventEnvelope(BaseModel):
    """What a handler receives: ten fields, the same on every transport.

    Fields that a newer producer adds are ignored, so old consumers keep working.
    """

    # A refused payload must not surface in logs through the error that refuses it.
    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    event_id: UUID
    event_type: _Text
    event_version: Annotated[int, Field(ge=1)]
    occurred_at: AwareDatetime
    source: _Text
    target: str | None = None
    domain_id: UUID | None = None
    payload: dict[str, Any] = Field(repr=False)
    idempotency_key: _Text
    trace_context: str | None = None

    def __hash__(self) -> int:
        return hash(self.event_id)

    @classmethod
    def trusted(cls, values: dict[str, Any]) -> Self:
        """An envelope of values that were checked before: all ten, with the right types. For rows of the outbox.

        To validate them again would cost as much as everything else that brings an event to its handler.
        """
        envelope = cls.__new__(cls)
        # What model_construct does, without its loop over the fields.
        _set_dict(envelope, values)
        _set_fields(envelope, _ALL)
        _set_extra(envelope, None)
        _set_private(envelope, None)
        return envelope


_ALL = set(EventEnvelope.model_fields)
_set_dict, _set_fields, _set_extra, _set_private = (
    BaseModel.__dict__[name].__set__
    for name in ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
)


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_RANDOM_BITS = 74
_RANDOM = (1 << _RANDOM_BITS) - 1
_POOL_BYTES = 10 * 400
_VERSION_AND_VARIANT = 0x7 << 76 | 0b10 << 62
_LOW = (1 << 62) - 1
# A step this long keeps neighbouring ids unguessable and leaves room for 2^42 of them in one millisecond.
_STEP = (1 << 32) - 1


class _Clockwork:
    """Strictly increasing values of 48 bits of milliseconds and 74 random bits."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._last = 0
        self._pool = b""
        self._used = 0

    def next(self, milliseconds: int) -> int:
        with self._lock:
            used = self._used
            if used >= len(self._pool):
                # One system call for hundreds of ids: a call for each would cost more than the rest.
                self._pool = os.urandom(_POOL_BYTES)
                used = 0
            self._used = used + 10
            random = int.from_bytes(self._pool[used : used + 10], "big") & _RANDOM
            value = milliseconds << _RANDOM_BITS | random
            if value <= self._last:
                # The same millisecond, or the clock was set back: go on from the last id.
                value = self._last + 1 + (random & _STEP)
            self._last = value
            return value


_clockwork = _Clockwork()


def _renew() -> None:
    # A forked child would repeat its parent's random bytes, and may have inherited a held lock.
    global _clockwork
    _clockwork = _Clockwork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def uuid7() -> UUID:
    """A UUIDv7 (RFC 9562), greater than every one made before it in this process."""
    value = _clockwork.next(time.time_ns() // 1_000_000)
    high = value >> 62
    return UUID(int=(high >> 12) << 80 | (high & 0xFFF) << 64 | value & _LOW | _VERSION_AND_VARIANT)


def uuid7_time(uuid: UUID) -> datetime:
    """The moment, to the millisecond, at which a UUIDv7 was made."""
    if uuid.version != 7:
        raise FieldError("uuid", f"has version {uuid.version} and carries no time", "pass a UUIDv7")
    try:
        return _EPOCH + timedelta(milliseconds=uuid.int >> 80)
    except OverflowError:
        raise FieldError("uuid", "carries a time past the year 9999", "pass an id made by uuid7()") from None
