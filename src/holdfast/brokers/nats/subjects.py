"""Names on NATS: streams, subjects, and the consumer of a handler.

An event goes to `hf.<channel>.<target or _>.<type>`, unless the address has another template. Characters that a subject
cannot contain are percent-encoded.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote

from holdfast.brokers.addresses import FIELD, Address
from holdfast.brokers.engine import Interest
from holdfast.brokers.naming import CHANNEL, TARGET, TYPE, require_places, template_of
from holdfast.checks import quoted
from holdfast.errors import ConfigurationError

_LONGEST: Final = 200
_ALL: Final = "_"
# Stands for an empty token of a type, as in "order..placed"; percent-encoding never makes a lone percent sign.
_EMPTY: Final = "%"
_SAFE: Final = "!#&'()+,-/:;=?@[]^_`{|}~"


@dataclass(frozen=True, slots=True)
class Subjects:
    """The names of streams, subjects and consumers for the templates of one address."""

    stream: str = "HF_{channel}"
    subject: str = "hf.{channel}.{target}.{type}"

    def stream_of(self, channel: str) -> str:
        """Return the stream of a channel.

        >>> Subjects().stream_of("events")
        'HF_events'
        """
        return self.stream.replace(CHANNEL, channel)

    def subjects_of(self, channel: str) -> str:
        """Return the pattern of all subjects of a channel, which its stream takes.

        >>> Subjects(subject="shop.{target}.{channel}.{type}").subjects_of("events")
        'shop.*.events.>'
        """
        return self._head(channel, "*") + ">"

    def subject_of(self, channel: str, event_type: str, target: str | None) -> str:
        """Return the subject of an event.

        >>> Subjects().subject_of("events", "order.placed", None), Subjects().subject_of("events", "a..b>", "billing")
        ('hf.events._.order.placed', 'hf.events.billing.a.%.b%3E')
        """
        return self._head(channel, _target_token(target)) + ".".join(map(_token, event_type.split(".")))

    def event_of(self, subject: str) -> tuple[str, str | None]:
        """Return the type and target of an event from its subject.

        >>> Subjects().event_of("hf.events._.order.placed"), Subjects().event_of("hf.events.billing.a.%.b%3E")
        (('order.placed', None), ('a..b>', 'billing'))
        """
        places = self.subject.split(".")
        tokens = subject.split(".")
        target = tokens[places.index(TARGET)]
        tail = tokens[len(places) - 1 :]
        event_type = ".".join("" if token == _EMPTY else unquote(token) for token in tail)
        return event_type, None if target == _ALL else unquote(target)

    def has(self, channel: str, subject: str) -> bool:
        """Return whether a subject, or a filter of subjects, belongs to a channel by these names.

        >>> Subjects().has("events", "hf.events._.order.>"), Subjects().has("events", "shop.events._.order.>")
        (True, False)
        """
        head = self.subjects_of(channel).split(".")[:-1]
        tokens = subject.split(".")
        return len(tokens) > len(head) and all(want in ("*", token) for want, token in zip(head, tokens, strict=False))

    def filters_of(self, interest: Interest) -> tuple[str, ...]:
        """Return filters that let at least a handler's events through, none of which covers another."""
        heads = [self._head(interest.channel, target) for target in (_ALL, _target_token(interest.domain_context))]
        wanted = {f"{head}{_tail(each)}" for each in interest.event_types for head in heads}
        return tuple(sorted(_without_covered(wanted)))

    def consumer_of(self, interest: Interest) -> str:
        """Return the consumer of a handler. Other filters make another: changing a consumer's filters lost messages."""
        terms = json.dumps([interest.handler_name, self.filters_of(interest), interest.ordered])
        return f"{interest.handler_name.replace('.', '_')[:160]}_{hashlib.sha256(terms.encode()).hexdigest()[:12]}"

    def _head(self, channel: str, target: str) -> str:
        return self.subject.removesuffix(TYPE).replace(CHANNEL, channel).replace(TARGET, target)


def subjects_by(address: Address) -> Subjects:
    """Return the names for an address; refuse templates that NATS would not take, or that lack a place."""
    usual = Subjects()
    stream = template_of(address, "stream", usual.stream, r"_\-", _LONGEST)
    if stream.is_by_type:
        remedy = "leave it out: a stream has all events of a channel, and subjects tell their types"
        raise ConfigurationError(FIELD, "has a place for the type in stream", remedy)
    subject = address.options.get("subject", usual.subject)
    needed = (CHANNEL, TARGET, TYPE)
    require_places("subject", subject, needed, needed, usual=usual.subject)
    tokens = subject.split(".")
    plain = [token for token in tokens if token not in (TARGET, TYPE)]
    if len(subject) > _LONGEST or tokens[-1] != TYPE or len(set(tokens)) < len(tokens) or TARGET not in tokens:
        problem = f"has the subject {quoted(subject)}"
        raise ConfigurationError(FIELD, problem, "write it like shop.{channel}.{target}.{type}, each token once")
    if not all(re.fullmatch(r"[A-Za-z0-9_-]+", token.replace(CHANNEL, "x")) for token in plain):
        raise ConfigurationError(
            FIELD, f"has the subject {quoted(subject)}", "use letters, digits, - and _ in its tokens"
        )
    return Subjects(stream.text, subject)


def covers(pattern: str, subjects: str) -> bool:
    """Whether a pattern of a stream takes all that other subjects, which may be a pattern too, stand for.

    >>> covers("hf.>", "hf.events.*.>"), covers("hf.events.*.>", "hf.events.*.>"), covers("hf.*.*.a", "hf.events.*.>")
    (True, True, False)
    """
    ours, theirs = subjects.split("."), pattern.split(".")
    for index, each in enumerate(theirs):
        if each == ">":
            return len(ours) > index
        if index >= len(ours) or ours[index] == ">" or each not in ("*", ours[index]):
            return False
    return len(ours) == len(theirs)


def _tail(event_type: str) -> str:
    beginning, star, _ = event_type.partition("*")
    if not star:
        return ".".join(map(_token, event_type.split(".")))
    # A star in a pattern spans dots and may stand inside a token, which NATS cannot say: the source drops the rest.
    tokens = beginning.split(".")[:-1]
    return ".".join((*map(_token, tokens), ">"))


def _without_covered(subjects: set[str]) -> Iterable[str]:
    wide = [subject[:-1] for subject in subjects if subject.endswith(".>")]
    for subject in subjects:
        if not any(subject.startswith(each) and subject != f"{each}>" for each in wide):
            yield subject


def _target_token(target: str | None) -> str:
    if target is None:
        return _ALL
    return "%5F" if target == _ALL else _token(target).replace(".", "%2E")


def _token(text: str) -> str:
    return quote(text, safe=_SAFE) if text else _EMPTY
