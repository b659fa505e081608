"""The envelope that producers and handlers share."""

from typing import Annotated, Any, Generic, Self
from uuid import UUID

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field
from typing_extensions import TypeVar  # typing has no defaults of type variables before Python 3.13

Payload = TypeVar("Payload", default=dict[str, Any])

_Text = Annotated[str, Field(min_length=1)]


class EventEnvelope(BaseModel, Generic[Payload]):
    """What a handler receives: ten fields, the same on every transport.

    `EventEnvelope[OrderPlaced]` is the envelope whose payload was validated and is an `OrderPlaced`.

    Fields that a newer producer adds are ignored, so old consumers keep working.
    """

    # hide_input: the error that refuses a payload must not show it in logs. defer_build: building the validator takes
    # as long as importing pydantic, and workers never need it.
    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True, defer_build=True)

    event_id: UUID
    event_type: _Text
    event_version: Annotated[int, Field(ge=1)]
    occurred_at: AwareDatetime
    source: _Text
    target: str | None = None
    domain_id: UUID | None = None
    payload: Payload = Field(repr=False)
    idempotency_key: _Text
    trace_context: str | None = None

    def __hash__(self) -> int:
        return hash(self.event_id)

    @classmethod
    def trusted(cls, values: dict[str, Any]) -> Self:
        """Make an envelope of values that were checked before, as in rows of the outbox: all ten, with the right types.

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
