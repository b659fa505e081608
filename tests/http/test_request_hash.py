"""What belongs to the hash of a request (SEC-1, IDM-1)."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.idempotency.hashing import HashedRequest, Secrets, canonical_json, multipart_parts

pytestmark = pytest.mark.trust

SECRETS = Secrets({1: "first secret 1234", 2: "second secret 123"})


def hashed(scope: str = "http:alice", **fields: Any) -> str:
    request = {"method": "POST", "path": b"/orders", "query": b"", "content_type": b"", "body": b"", **fields}
    return SECRETS.hashes(scope, HashedRequest(**request).parts())[0]


JSON = b"application/json"
HEAD = b'Content-Disposition: form-data; name="x"\r\n\r\n'


def form(*values: bytes, boundary: bytes = b"b1", kind: bytes = b"multipart/form-data") -> dict[str, bytes]:
    body = b"".join(b"--%b\r\n%b%b\r\n" % (boundary, HEAD, value) for value in values) + b"--%b--\r\n" % boundary
    return {"content_type": kind + b"; boundary=" + boundary, "body": body}


def test_the_encoding_counts() -> None:
    """The same bytes under another Content-Encoding are another request; its case is not (IDM-1)."""
    assert hashed(body=b"x") != hashed(body=b"x", content_encoding=b"gzip")
    assert hashed(body=b"x", content_encoding=b"GZIP , br") == hashed(body=b"x", content_encoding=b"gzip,br")


def test_multipart_bodies_count() -> None:
    """Every part, its place and its end; the boundary, which clients make anew, does not (IDM-1)."""
    assert hashed(**form(b"1", b"2")) == hashed(**form(b"1", b"2", boundary=b"another one"))
    different = [
        form(b"1", b"2"), form(b"2", b"1"), form(b"12"), form(b"1"), form(), form(b"1", b""), form(b"", b"1"),
        form(b"--\r\n"), form(b"--b1"), form(b"1", b"2", kind=b"multipart/mixed"), form(b"1\r\n", b"2"),
    ]  # fmt: skip
    assert len({hashed(**each) for each in different}) == len(different)


def test_a_part_cannot_pass_for_a_boundary() -> None:
    """The boundary is left out where it parts a body, and nowhere else, or two bodies would become one (SEC-1)."""
    assert hashed(**form(b"--b1x")) != hashed(**form(b"--x"))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--b1",
        b"--b1\r\n",
        b"--b1\r\nx",
        b"--b1\r\nx--b1--",
        b"--b1--epilogue",
        b"x\r\n--b1--",
        b"--b1x\r\n--b1--",
    ],
)
def test_what_is_not_well_formed_is_compared_as_it_is(body: bytes) -> None:
    """The application will refuse it, and the hash must not guess (IDM-1)."""
    content_type = b"multipart/form-data; boundary=b1"
    assert multipart_parts(content_type, body) is None
    assert hashed(content_type=content_type, body=body) != hashed(content_type=content_type + b"2", body=body)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"content_type": JSON, "body": rb'{"a":"\u00001"}'}, {"content_type": JSON, "body": b'{"a":1}'}),
        ({"content_type": JSON, "body": rb'["\u0000",["a",1]]'}, {"content_type": JSON, "body": b'{"a":1,"a":2}'}),
        ({"content_type": b"multipart/form-data", "body": b"45:%b1" % HEAD}, form(b"1")),
        ({"content_type": JSON, "body": canonical_json(b'{"a":1}')}, {"content_type": JSON, "body": b'{"a":1}'}),
    ],
)
def test_no_body_passes_for_the_normalised_form_of_another(one: dict[str, bytes], other: dict[str, bytes]) -> None:
    """A body that counts as it is, is marked: two requests never have one hash (SEC-1)."""
    assert hashed(**one) != hashed(**other)
    parts = [HashedRequest("POST", b"/", b"", **each).parts() for each in (one, other)]
    assert len(parts[0]) != len(parts[1]), "the mark"


@pytest.mark.parametrize(
    "parameters",
    [b"boundary=b1; boundary=b2", b"boundary=b2; boundary=b1", b"boundary*0=b; boundary*1=1", b"boundary*=utf-8''b1",
     b'boundary=b1; x="; boundary=b2"'],
)  # fmt: skip
def test_a_boundary_that_can_be_read_in_two_ways(parameters: bytes) -> None:
    """The application may read another one than the hash does, so the header counts as it was sent (SEC-1)."""
    plain = form(b"1")
    other = {**plain, "content_type": b"multipart/form-data; " + parameters}
    assert multipart_parts(other["content_type"], other["body"]) is None
    assert hashed(**other) != hashed(**plain)


def test_the_order_of_parameters_counts() -> None:
    """Of two values the application may read the first or the last (SEC-1)."""
    one, other = (form(b"1", kind=b"multipart/form-data; " + each) for each in (b"a=1; a=2", b"a=2; a=1"))
    assert hashed(**one) != hashed(**other)


def test_every_scope_has_a_key_of_its_own() -> None:
    """Who reads the table cannot see that two tenants sent the same (SEC-1)."""
    assert hashed("http:alice") != hashed("http:bob")
