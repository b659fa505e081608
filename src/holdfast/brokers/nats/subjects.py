"""Names on NATS: streams, subjects, and the consumer of a handler.

An event goes to `hf.<channel>.<target or _>.<type>`. What a subject cannot contain is percent-encoded in its token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Final
from urllib.parse import quote, unquote

from holdfast.brokers.engine import Interest

_ALL: Final = "_"
# A token that is empty in the type, as in "order..placed": no percent-encoding of anything is a lone percent sign.
_EMPTY: Final = "%"
_SAFE: Final = "!#&'()+,-/:;=?@[]^_`{|}~"


def stream_of(channel: str) -> str:
    """Return the stream of a channel.

    >>> stream_of("events")
    'HF_events'
    """
    return f"HF_{channel}"


def subject_of(channel: str, event_type: str, target: str | None) -> str:
    """Return the subject of an event.

    >>> subject_of("events", "order.placed", None), subject_of("events", "a..b>", "billing")
    ('hf.events._.order.placed', 'hf.events.billing.a.%.b%3E')
    """
    return f"hf.{channel}.{_target_token(target)}.{'.'.join(map(_token, event_type.split('.')))}"


def event_of(subject: str) -> tuple[str, str | None]:
    """Return type and target of an event by its subject.

    >>> event_of("hf.events._.order.placed"), event_of("hf.events.billing.a.%.b%3E")
    (('order.placed', None), ('a..b>', 'billing'))
    """
    target, _, tail = subject.split(".", 2)[2].partition(".")
    event_type = ".".join("" if token == _EMPTY else unquote(token) for token in tail.split("."))
    return event_type, None if target == _ALL else unquote(target)


def filters_of(interest: Interest) -> tuple[str, ...]:
    """Return the subjects that have at least what a handler is owed, none of which covers another."""
    targets = (_ALL, _target_token(interest.domain_context))
    wanted = {f"hf.{interest.channel}.{target}.{_tail(each)}" for each in interest.event_types for target in targets}
    return tuple(sorted(_without_covered(wanted)))


def consumer_of(interest: Interest) -> str:
    """Return the consumer of a handler. Other filters make another one: to edit a consumer's has lost messages."""
    terms = json.dumps([interest.handler_name, filters_of(interest), interest.ordered])
    return f"{interest.handler_name.replace('.', '_')[:160]}_{hashlib.sha256(terms.encode()).hexdigest()[:12]}"


def _tail(event_type: str) -> str:
    beginning, star, _ = event_type.partition("*")
    if not star:
        return ".".join(map(_token, event_type.split(".")))
    # Our star spans dots, and may stand inside a token: the source leaves out what is too much.
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
