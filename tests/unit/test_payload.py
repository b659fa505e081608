"""What a payload may hold, and the error that names what it may not (PUB-3)."""

import ast
import enum
import json
import math
import re
import sys
import time
from collections import OrderedDict
from datetime import date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.errors import PayloadError
from holdfast.payload import MAX_DEPTH, encode_payload


class Colour(enum.StrEnum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    "payload",
    [
        {},
        {"text": "ü … 😀 \u2028 \x7f \t\n", "n": 1, "f": 1.5, "b": True, "none": None},
        {"nested": {"list": [1, [2, {"deep": []}]]}},
        {"literal": "\\u0000"},
        {"enum": Colour.RED, "level": Level.HIGH, Colour.RED: 1},
        OrderedDict(a=1),
        {"big": 10**4_000},
    ],
)
def test_a_good_payload_keeps_its_value(payload: dict[str, Any]) -> None:
    """PUB-3."""
    assert json.loads(encode_payload(payload)) == payload


@pytest.mark.parametrize("count", [1, 10, 100, 1_000, 10_000])
def test_a_payload_of_any_length_keeps_its_value(count: int) -> None:
    """Short ones are written in another way than long ones (PUB-3)."""
    payload = {"lines": [{"sku": "ü\\", "price": 19.9, "small": 5e-324, "large": -(2**70), "none": None}] * count}
    assert json.loads(encode_payload(payload, 2**31)) == payload


@pytest.mark.parametrize("limit", range(40, 140, 3))
def test_the_cap_is_the_same_however_a_payload_is_written(limit: int) -> None:
    """RELIABILITY D2: a short payload is measured as jsonb prints it, with a space after each separator."""
    payload = {"a": [1, 2, 3], "b": {"c": "ü", "d": None}, "e": [1.5]}
    size = len('{"a": [1, 2, 3], "b": {"c": "ü", "d": null}, "e": [1.5]}'.encode())
    if limit >= size:
        assert json.loads(encode_payload(payload, limit)) == payload
    else:
        with pytest.raises(PayloadError, match=f"{size} bytes of JSON, {limit} are allowed"):
            encode_payload(payload, limit)


def test_a_tuple_is_written_as_a_list() -> None:
    assert encode_payload({"point": (1, 2)}) == '{"point":[1,2]}'


@pytest.mark.parametrize(
    ("payload", "field", "remedy"),
    [
        ({"lines": [{}, {}, {"at": datetime(2026, 1, 1)}]}, "payload.lines[2].at", "aware"),
        ({"price": Decimal("NaN")}, "payload.price", "NaN"),
        ({"raw": b"\xff"}, "payload.raw", "base64"),
        ({"tags": {"a"}}, "payload.tags", "sorted"),
        ({"object": object()}, "payload.object", "pass text"),
        ({"a": [math.nan]}, "payload.a[0]", "None"),
        ({"a": {"b": -math.inf}}, "payload.a.b", "None"),
        ({"a": "x\0y"}, "payload.a", "NUL"),
        ({"a b": {"c": "\ud800"}}, "payload['a b'].c", "surrogate"),
        ({"a": {"\0": 1}}, "payload.a", "key that contains a NUL"),
        ({"a": {"\udfff": 1}}, "payload.a", "key that contains a lone surrogate"),
        ({"a": [{1: "x"}]}, "payload.a[0]", "key of type int"),
        ({"a": {None: 1}}, "payload.a", "key of type NoneType"),
        ({True: 1}, "payload", "key of type bool"),
        ({b"a": 1}, "payload", "key of type bytes"),
        ({"huge": 10**5_000}, "payload.huge", "digits"),
        ({"a": (1, {"b": {2}})}, "payload.a[1].b", "sorted"),
        ([1], "payload", "wrap"),
        (None, "payload", "wrap"),
        ("text", "payload", "wrap"),
        (' {"a": 1}', "payload", "json.loads(value)"),
        (b'{"a": 1}', "payload", "json.loads(value)"),
        (b"\xff", "payload", "base64"),
        (Colour, "payload", "is the class Colour; pass an object of it"),
    ],
)
def test_a_bad_payload_is_refused_by_path(payload: Any, field: str, remedy: str) -> None:
    """A typed error before any SQL, naming the value and the cure (PUB-3, D1)."""
    with pytest.raises(PayloadError) as caught:
        encode_payload(payload)
    assert caught.value.field == field
    assert remedy in str(caught.value)


def test_an_error_does_not_quote_values() -> None:
    """RELIABILITY S7."""
    with pytest.raises(PayloadError) as caught:
        encode_payload({"password": "canary\0", "raw": b"canary"})
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize("char", ["x", "ü", "😀", '"', "\n"])
def test_the_cap_counts_bytes_of_json_text(char: str) -> None:
    """RELIABILITY D2: at the cap and one byte above it."""
    payload = {"text": char * 50}
    size = len(json.dumps(payload, ensure_ascii=False).encode())
    assert encode_payload(payload, size)
    with pytest.raises(PayloadError, match=f"{size} bytes of JSON, {size - 1} are allowed"):
        encode_payload(payload, size - 1)


def test_64_megabytes_are_refused() -> None:
    """RELIABILITY D2."""
    with pytest.raises(PayloadError, match="262144 are allowed"):
        encode_payload({"blob": "x" * 64 * 2**20})


def test_numbers_are_measured_as_jsonb_prints_them() -> None:
    """RELIABILITY D2: 1e300 has five characters in JSON and 301 in jsonb, which the CHECK measures."""
    assert encode_payload({"n": [1e300] * 10}, 3_100)
    with pytest.raises(PayloadError, match="bytes of JSON"):
        encode_payload({"n": [1e300] * 10}, 3_000)
    assert encode_payload({"n": ["3e300"] * 10}, 200)


def test_nesting_is_bounded() -> None:
    def nested(levels: int) -> dict[str, Any]:
        value: dict[str, Any] = {}
        for _ in range(levels - 1):
            value = {"a": value}
        return value

    assert encode_payload(nested(MAX_DEPTH))
    for levels in (MAX_DEPTH + 1, 100_000):
        with pytest.raises(PayloadError, match="nested deeper") as caught:
            encode_payload(nested(levels))
        assert caught.value.field.startswith("payload.a.a.")


def test_a_payload_that_contains_itself_is_refused() -> None:
    payload: dict[str, Any] = {"name": "loop"}
    payload["self"] = [payload]
    with pytest.raises(PayloadError, match="contains itself"):
        encode_payload(payload)


def test_a_small_payload_that_would_be_written_as_gigabytes_is_refused_at_once() -> None:
    value: list[Any] = ["x"] * 10
    for _ in range(40):
        value = [value, value]
    started = time.monotonic()
    with pytest.raises(PayloadError, match="more values"):
        encode_payload({"bomb": value})
    assert time.monotonic() - started < 5


def test_an_object_that_misbehaves_is_a_payload_error() -> None:
    class Hostile(dict[str, Any]):
        def items(self) -> Any:
            raise ZeroDivisionError

    with pytest.raises(PayloadError, match="cannot be written"):
        encode_payload({"a": Hostile(b=1)})


def acceptable(value: Any, depth: int = 1) -> bool:
    """The rules, written naively."""
    if value is None or isinstance(value, bool):
        return True
    if isinstance(value, int):
        return len(hex(value)) < 3_000
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, str):
        return "\0" not in value and not any(0xD800 <= ord(char) <= 0xDFFF for char in value)
    if isinstance(value, Decimal | date | UUID):
        return True
    if isinstance(value, dict):
        return depth <= MAX_DEPTH and all(
            isinstance(key, str) and acceptable(key) and acceptable(child, depth + 1) for key, child in value.items()
        )
    if isinstance(value, list | tuple):
        return depth <= MAX_DEPTH and all(acceptable(child, depth + 1) for child in value)
    return False


def as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_lists(child) for key, child in value.items()}
    if isinstance(value, Decimal | date | UUID):
        return str(value)
    return [as_lists(child) for child in value] if isinstance(value, list | tuple) else value


def resolve(payload: Any, path: str) -> Any:
    """Follow a path such as payload.lines[2]['odd key'] with Python's own parser."""
    for plain, subscript in re.findall(r"\.([A-Za-z0-9_-]+)|\[(\d+|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")\]", path):
        payload = payload[plain if plain else ast.literal_eval(subscript)]
    return payload


texts = st.text(max_size=8) | st.text(st.sampled_from("a\0\ud800\\u0"), max_size=8)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts | st.sampled_from(["\\u0000", "1e300"])
odd = st.sampled_from([b"x", {1}, Decimal(1), date(2026, 1, 1), uuid4(), 1j])
keys = texts | texts | texts | st.integers(0, 3)
values = st.recursive(
    scalars | scalars | scalars | odd,
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(keys, children, max_size=4) | st.tuples(children, children)
    ),
    max_leaves=12,
)


@given(st.dictionaries(texts, values, max_size=4) | st.dictionaries(keys, values, max_size=4))
def test_encoding_agrees_with_the_naive_rules(payload: dict[str, Any]) -> None:
    """Everything acceptable round-trips, everything else is refused, at a path that exists (PUB-3)."""
    try:
        text = encode_payload(payload)
    except PayloadError as error:
        assert not acceptable(payload)
        assert not acceptable(resolve(payload, error.field))
    else:
        assert acceptable(payload)
        assert json.loads(text) == as_lists(payload)
        # Numbers too: the hashes of commands are made of them as they are written.
        assert text == json.dumps(as_lists(payload), ensure_ascii=False, separators=(",", ":"))


@given(st.floats(allow_nan=False, allow_infinity=False))
@example(1e-4).via("the least without an exponent")
@example(1e-7).via("two digits of exponent in Python")
@example(9999999999999998.0).via("the greatest without an exponent")
@example(1e16).via("a sign in the exponent")
def test_a_number_is_written_as_python_writes_it(number: float) -> None:
    """A command that is repeated has the same hash, whichever release of Holdfast made the first (IDM-1)."""
    assert encode_payload({"n": number}) == f'{{"n":{number!r}}}'


def test_the_interpreter_limit_on_digits_is_the_default_here() -> None:
    """The case of the number with too many digits means something only with a limit."""
    assert 0 < sys.get_int_max_str_digits() <= 5_000


def test_a_text_enum_at_the_deepest_level_is_text() -> None:
    """Subclasses of str are values, not another level of nesting (PUB-3)."""

    class Colour(enum.StrEnum):
        RED = "red"

    value: Any = {"colour": Colour.RED}
    for _ in range(MAX_DEPTH - 1):
        value = {"a": value}
    assert "red" in encode_payload(value)
