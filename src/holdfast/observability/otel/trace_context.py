"""The trace context that an event carries: a W3C traceparent, and after a space the tracestate, if it has room for it.

Producers write it, so it may be anything. What cannot be read counts as none.
"""

from __future__ import annotations

import re
from typing import Final

from opentelemetry.trace import SpanContext, TraceFlags
from opentelemetry.trace.span import TraceState

from holdfast.checks import LONGEST_TEXT
from holdfast.telemetry import TRACEPARENT

# The traceparent of a trace that is not sampled, as nearly all are where few are sampled: found at a third of the time.
UNSAMPLED: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f][02468ace]")
_SAMPLED_AND_RANDOM: Final = 0x03


def span_context(text: str) -> SpanContext | None:
    """Return the span that a trace context names; None if it is no W3C traceparent, and a tracestate, of ours or not.

    >>> span_context("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01").is_remote
    True
    >>> span_context("garbage") is None
    True
    """
    match = TRACEPARENT.fullmatch(text)
    return None if match is None else context_of(match)


def context_of(match: re.Match[str]) -> SpanContext:
    """Return the span that a match of `TRACEPARENT` names."""
    state = match["state"]
    return SpanContext(
        int(match["trace"], 16),
        int(match["span"], 16),
        True,
        TraceFlags(int(match["flags"], 16) & _SAMPLED_AND_RANDOM),
        None if state is None else TraceState.from_header([state]),
    )


def text_of(context: SpanContext) -> str | None:
    """Return a span's context as events carry it; None for one that is not valid."""
    if not context.is_valid:
        return None
    text = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    if context.trace_state:
        whole = f"{text} {context.trace_state.to_header()}"
        return whole if len(whole) <= LONGEST_TEXT else text
    return text
