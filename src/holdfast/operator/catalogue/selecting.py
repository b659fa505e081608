"""Arguments that select dead letters and events: with the names that the options of the commands have."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from pydantic import Field

from holdfast.errors import ConfigurationError
from holdfast.operator.catalogue.verb import Arguments, Counted, Id, Moment, Name, Text, Whole
from holdfast.operator.operator import Operator
from holdfast.operator.selection import Selection

Group = Annotated[Text, Field(min_length=3, max_length=600, description="A group, as handler/signature.")]
Ids = Annotated[list[Id], Field(min_length=1, max_length=10_000, description="Ids of events, or of deliveries.")]


class DeadLetters(Arguments):
    """A filter of dead letters; all that is given has to match."""

    group: Group | None = None
    handler: Name | None = None
    event_type: Name | None = None
    source: Name | None = None
    signature: Annotated[Text, Field(min_length=1, max_length=300)] | None = None
    failure_reason: Annotated[Text, Field(max_length=40)] | None = None
    of_generation: Whole | None = None
    since: Moment | None = Field(None, description="Failed at that time or later.")
    until: Moment | None = Field(None, description="Failed before that time.")

    def selection(self, *, everything: bool = False) -> Selection:
        """The selection that the arguments describe."""
        given: dict[str, Any] = {
            "handler": self.handler,
            "event_type": self.event_type,
            "source": self.source,
            "signature": self.signature,
            "reason": self.failure_reason,
            "generation": self.of_generation,
            "since": self.since,
            "until": self.until,
            "everything": everything,
        }
        if self.group is None:
            return Selection(**given)
        if self.handler is not None or self.signature is not None:
            raise ConfigurationError("group", "names a handler and a signature", "leave handler and signature out")
        return Selection.group(self.group, **given)


class Chosen(Counted, DeadLetters):
    """Ids, or a filter, or all: exactly one of them."""

    ids: Ids | None = None
    all: bool = Field(False, description="Every dead letter.")

    def chosen(self) -> Selection | None:
        """The selection; None: the ids."""
        selection = self.selection(everything=self.all)
        if self.ids is None:
            return selection.required()
        if selection.criteria or self.all:
            raise ConfigurationError("ids", "are given together with a filter", "give one of them")
        return None

    async def rows(self, operator: Operator, *, discarded: bool = False) -> tuple[list[UUID], Selection | None]:
        """The rows, and how they were chosen if they were not named one by one."""
        selection = self.chosen()
        if self._counted is not None:
            return list(self._counted), selection
        if selection is None:
            return list(self.ids or ()), None
        return await operator.failed.select(selection, discarded=discarded), selection
