"""What breaks when events of one release meet the handlers of another.

Producers only add: a consumer ignores fields that it does not know, and must find those that it knows as they were; and
a field that is added is optional, because events that wait in the outbox lack it. A change that breaks this is a new
event type, with a suffix such as `.v2`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

_UPPER: Final = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_LOWER: Final = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_EXACT: Final = ("format", "pattern", "multipleOf", "contentEncoding", "contentMediaType")
_MOST_VARIANTS: Final = 1_000

Schema = Mapping[str, Any]
_Pair = tuple[str | None, str | None]


@dataclass(frozen=True, slots=True)
class BreakingChange:
    """One breaking change: where it is, and what changed."""

    event_type: str
    place: str
    problem: str

    def __str__(self) -> str:
        return f"{self.event_type}: {self.place} {self.problem}"


def breaking_changes(released: Schema, current: Schema) -> list[BreakingChange]:
    """Return what breaks between the released AsyncAPI document and the current one, by event type.

    A document that is not as `document` writes it ends with an AttributeError, a KeyError, a TypeError or a ValueError,
    and one that is nested too deeply with a RecursionError.
    """
    found: list[BreakingChange] = []
    for event_type, channel in released.get("channels", {}).items():
        now = current.get("channels", {}).get(event_type, {}).get("messages", {})
        for name, message in channel.get("messages", {}).items():
            if name not in now:
                what = f"version {message.get('x-event-version', 1)}" if now else "the event type"
                found.append(BreakingChange(event_type, what, "is gone; keep it, with a deadline"))
            elif "payload" in message:
                old, new = _Side(released, message["payload"]), _Side(current, now[name].get("payload"))
                found += (BreakingChange(event_type, place, problem) for place, problem in _changes(old, new, _Seen()))
    return found


@dataclass(frozen=True, slots=True)
class _Side:
    """A schema, and the document whose components it refers to. The schema None allows any value."""

    document: Schema
    schema: Any

    @property
    def reference(self) -> str | None:
        return self.schema.get("$ref") if isinstance(self.schema, Mapping) else None

    def resolved(self) -> Schema:
        return self._followed()[1]

    def _followed(self) -> tuple[set[str], Schema]:
        """Follow references; return the names of the definitions on the way, and the schema at the end."""
        schema, names = self.schema, set[str]()
        while isinstance(schema, Mapping) and "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            if name in names:
                break
            names.add(name)
            schema = self.document["components"]["schemas"][name]
        return names, schema if isinstance(schema, Mapping) else {}

    def at(self, schema: Any) -> _Side:
        return _Side(self.document, schema)

    def variants(self, met: set[str] | None = None) -> list[_Side]:
        """Return the alternatives of the schema; a definition that is met again adds none."""
        met = set() if met is None else met
        names, schema = self._followed()
        if names & met:
            return []
        met |= names
        several = schema.get("anyOf") or schema.get("oneOf")
        if several:
            return [variant for each in several for variant in self.at(each).variants(met)]
        types = schema.get("type")
        if isinstance(types, list):
            return [self.at({**schema, "type": each}) for each in types]
        return [self]


@dataclass(frozen=True, slots=True)
class _Seen:
    """The pairs of definitions that were compared, and those whose new one does not fit the old one."""

    pairs: set[_Pair] = field(default_factory=set)
    unfit: set[_Pair] = field(default_factory=set)

    def fits(self, old: _Side, new: _Side, place: str) -> bool:
        """Return whether every value of the new schema fits the old one; the answer is remembered."""
        pair = (old.reference, new.reference)
        if pair in self.unfit:
            return False
        trial = _Seen(set(self.pairs), self.unfit)
        if next(_changes(old, new, trial, place), None) is None:
            self.pairs.update(trial.pairs)
            return True
        if None not in pair:
            self.unfit.add(pair)
        return False


def _changes(old: _Side, new: _Side, seen: _Seen, place: str = "payload") -> Iterator[tuple[str, str]]:
    """Yield what the new schema allows and the old one does not, except added fields, which consumers ignore.

    Two definitions are compared once, in the place where they are met first: models may contain themselves.
    """
    references = (old.reference, new.reference)
    if None not in references:
        if references in seen.pairs:
            return
        seen.pairs.add(references)
    before, after = old.variants(), new.variants()
    if max(len(before), len(after)) > _MOST_VARIANTS:
        raise ValueError(f"{place} has more than {_MOST_VARIANTS} variants")
    if len(before) == len(after) == 1:
        yield from _plain_changes(old.at(before[0].schema), new.at(after[0].schema), seen, place)
        return
    for variant in after:
        kinds = [each for each in before if _kind(each) == _kind(variant)]
        if len(kinds) == 1:
            yield from _changes(kinds[0], variant, seen, place)
        elif not any(seen.fits(each, variant, place) for each in kinds or before):
            yield place, f"may be {_kind(variant)} now, in a way that it was not before"


def _kind(side: _Side) -> str:
    schema = side.resolved()
    return str(schema.get("type") or schema.get("title") or ("one of some values" if "enum" in schema else "anything"))


def _plain_changes(old: _Side, new: _Side, seen: _Seen, place: str) -> Iterator[tuple[str, str]]:
    before, after = old.resolved(), new.resolved()
    allowed = {before["type"], "integer"} if before.get("type") == "number" else {before.get("type")}
    if before.get("type") and after.get("type") not in allowed:
        yield place, f"was {before['type']}, and is {after.get('type') or 'anything'} now"
        return
    yield from ((place, problem) for problem in _narrower(before, after))
    values_before, values_after = before.get("additionalProperties"), after.get("additionalProperties")
    if isinstance(values_before, Mapping):
        wide = values_after if isinstance(values_after, Mapping) else {}
        yield from _changes(old.at(values_before), new.at(wide), seen, f"{place}.*")
    elements, elements_after = before.get("prefixItems", ()), after.get("prefixItems", ())
    if len(elements) != len(elements_after):
        yield place, "has another number of elements now"
    for number, (one, other) in enumerate(zip(elements, elements_after, strict=False)):
        yield from _changes(old.at(one), new.at(other), seen, f"{place}[{number}]")
    if "items" in before:
        yield from _changes(old.at(before["items"]), new.at(after.get("items", {})), seen, f"{place}[]")
    fields, required = after.get("properties", {}), set(after.get("required", ()))
    for name, schema in before.get("properties", {}).items():
        if name not in fields:
            yield f"{place}.{name}", "is gone"
            continue
        if name in before.get("required", ()) and name not in required:
            yield f"{place}.{name}", "was always there, and may be missing now"
        yield from _changes(old.at(schema), new.at(fields[name]), seen, f"{place}.{name}")
    for name in fields:
        if name in before.get("properties", {}):
            continue
        if values_before is False:
            yield f"{place}.{name}", "is new, and handlers of the last release refuse fields that they do not know"
        elif name in required:
            yield f"{place}.{name}", "is new and required, and events that wait lack it; give it a default"


def _narrower(before: Schema, after: Schema) -> Iterator[str]:
    """Yield the rules of the old schema that values of the new one may break."""
    known = _values(before)
    if known is not None:
        values = _values(after)
        added = None if values is None else [each for each in values if each not in known]
        if added is None:
            yield "was one of a few values, and may be another one now"
        elif added:
            yield f"may be {', '.join(map(repr, added))} now"
    for rule in _EXACT:
        if rule in before and after.get(rule) != before[rule]:
            yield f"had {rule} {before[rule]!r}, and has {after.get(rule)!r} now"
    for rule in (*_UPPER, *_LOWER):
        if rule in before and (rule not in after or _is_wider(rule, before[rule], after[rule])):
            yield f"had {rule} {before[rule]!r}, and has {after.get(rule)!r} now"


def _is_wider(rule: str, before: float, after: float) -> bool:
    return after > before if rule in _UPPER else after < before


def _values(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    found = schema.get("enum")
    return list(found) if found is not None else None
