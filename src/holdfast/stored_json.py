"""Reads JSON of the database as values that Python can hold and print.

Producers in any language insert payloads, and jsonb holds what Python cannot: numbers with any number of digits, and
nesting that is deeper than its stack. What is left out is replaced by a text that says so.
"""

from __future__ import annotations

import json
import re
from math import isfinite
from typing import Any, Final

# Twice as deep as what `publish` accepts. Printing takes several calls for each level.
DEEPEST: Final = 200
# Python refuses to read or write integers with more than 4,300 digits.
MOST_DIGITS: Final = 4_000

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"|[][{}]')
_TOO_DEEP = f'"<nested deeper than {DEEPEST} levels: left out>"'


def decode(text: str) -> Any:
    """Return the value of a JSON text.

    >>> decode('{"n": 1, "many": ' + "9" * 5_000 + "}")
    {'n': 1, 'many': '<a number of 5000 digits: left out>'}
    """
    return json.loads(_cut(text), parse_int=_integer, parse_float=_fraction)


def _cut(text: str) -> str:
    if text.count("[") + text.count("{") <= DEEPEST:
        return text
    kept: list[str] = []
    start = depth = 0
    for token in _TOKEN.finditer(text):
        if token[0] in "[{":
            depth += 1
            if depth == DEEPEST + 1:
                kept += text[start : token.start()], _TOO_DEEP
        elif token[0] in "]}":
            if depth == DEEPEST + 1:
                start = token.end()
            depth -= 1
    return "".join((*kept, text[start:]))


def _integer(digits: str) -> int | str:
    return int(digits) if len(digits) <= MOST_DIGITS else f"<a number of {len(digits.lstrip('-'))} digits: left out>"


def _fraction(text: str) -> float | str:
    number = float(text)
    return number if isfinite(number) else f"<a number of {len(text.lstrip('-')) - 1} digits: left out>"
