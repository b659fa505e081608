"""Request hashes: two requests are the same if an HMAC over method, path, query, content type, encoding and body is.

The key of the HMAC is derived from a secret and the scope, so that the same request of two tenants has two hashes.

Bodies are normalised, so that a client may send the same JSON with other white space or another order of keys. Numbers
stay as they are written (1 is not 1.0, and no digit is lost), and a key that occurs twice stays twice.
"""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from functools import lru_cache
from operator import itemgetter
from typing import Any
from urllib.parse import parse_qsl, urlencode

from holdfast.errors import ConfigurationError

_SHORTEST_SECRET = 16
_KEPT_KEYS = 1_024  # of the scopes seen last
_name = itemgetter(0)
_BOUNDARIES = re.compile(rb";\s*(boundary[^=;\s]*)\s*=", re.IGNORECASE).findall


class Secrets:
    """The secrets of the hashes, by number. The highest signs; hashes of the others are still recognised.

    To change the secret, add one with a higher number; remove the old one when its records have expired.
    """

    def __init__(self, secrets: Mapping[int, str | bytes]) -> None:
        if isinstance(secrets, str | bytes):
            raise ConfigurationError(
                "secrets", "are one text without a number", "write {1: secret}, to replace it later"
            )
        if not isinstance(secrets, Mapping) or not secrets:
            raise ConfigurationError("secrets", "are missing", 'give {1: "..."}, the same in every process')
        self._secrets: dict[int, bytes] = {}
        for version in sorted(secrets, reverse=True):
            secret = secrets[version]
            if not isinstance(secret, str | bytes):
                raise ConfigurationError("secrets", f"number {version} is {type(secret).__name__}", "use text or bytes")
            data = secret.encode() if isinstance(secret, str) else secret
            if type(version) is not int or not 0 < version < 2**31:
                raise ConfigurationError("secrets", f"have the number {version!r}", "count from 1")
            if len(data) < _SHORTEST_SECRET:
                remedy = f"use {_SHORTEST_SECRET} bytes or more, for example from secrets.token_hex()"
                raise ConfigurationError("secrets", f"number {version} is too short", remedy)
            self._secrets[version] = data
        self._begun = lru_cache(maxsize=_KEPT_KEYS)(self._begin)

    @property
    def version(self) -> int:
        """The number of the secret that signs."""
        return next(iter(self._secrets))

    def hashes(self, scope: str, parts: Sequence[bytes]) -> list[str]:
        """Return the hash to store, then those that older secrets make of the same request."""
        text = _joined(parts)
        return [_digest(begun, text) for begun in self._begun(scope)]

    def _begin(self, scope: str) -> list[hmac.HMAC]:
        owner = scope.encode(errors="surrogatepass")
        keys = [hmac.digest(secret, _joined((b"scope", owner)), "sha256") for secret in self._secrets.values()]
        return [hmac.new(key, digestmod="sha256") for key in keys]

    def shown(self, scope: str, key: str) -> str:
        """Return a name of the key for logs: the same for the same key, and of no use to a client."""
        text = _joined((b"shown", scope.encode(errors="surrogatepass"), key.encode()))
        return hmac.digest(self._secrets[self.version], text, "sha256").hex()[:12]

    def __repr__(self) -> str:
        return f"Secrets(versions={list(self._secrets)})"


def _digest(begun: hmac.HMAC, text: bytes) -> str:
    # A copy costs half of what a digest from the key on does.
    digest = begun.copy()
    digest.update(text)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class HashedRequest:
    """The hashed parts of an HTTP request."""

    method: str
    path: bytes  # as it was sent, percent-encoded
    query: bytes
    content_type: bytes
    body: bytes
    content_encoding: bytes = b""

    def parts(self, *, raw: bool = False) -> list[bytes]:
        """Return the parts to hash; with `raw`, the body as it was sent."""
        start = [b"http", self.method.encode(), self.path, canonical_query(self.query)]
        encoding = b",".join(part.strip().lower() for part in self.content_encoding.split(b","))
        canonical = None if raw else normalised(self.content_type, self.body)
        if canonical is None:
            # Marked, because the text of a body may be the normalised form of another.
            return [*start, self.content_type.strip(), encoding, self.body, b"raw"]
        content_type, body = canonical
        return [*start, content_type, encoding, body]


def _joined(parts: Sequence[bytes]) -> bytes:
    # With their lengths, so that different lists of parts never become the same text.
    return b"".join(b"%d:%b" % (len(part), part) for part in parts)


def canonical_query(query: bytes) -> bytes:
    """Sort the parameters by name; those of one name stay in their order."""
    if not query:
        return b""
    # Latin-1 has a character for every byte, so none is lost, whatever the client's encoding was.
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True, encoding="latin-1")
    return urlencode(sorted(pairs, key=_name), encoding="latin-1").encode()


def normalised(content_type: bytes, body: bytes) -> tuple[bytes, bytes] | None:
    """Return content type and body without what a client may write differently in each attempt.

    None: the body counts as it is, because of its type, or because it is not well-formed and the application will
    answer for it.
    """
    media_type = content_type.partition(b";")[0].strip().lower()
    if media_type == b"application/json" or media_type.endswith(b"+json"):
        try:
            return media_type, canonical_json(body)
        except (ValueError, RecursionError):
            return None
    if media_type.startswith(b"multipart/") and (parts := multipart_parts(content_type, body)) is not None:
        # Clients make a new boundary for each attempt.
        return _without_boundary(content_type), _joined(parts)
    return None


def multipart_parts(content_type: bytes, body: bytes) -> list[bytes] | None:
    """Return the parts of a multipart body, with their headers; None if it is not well-formed.

    A second boundary, or one in pieces, is not: which of them an application reads is not known.
    """
    if [name.lower() for name in _BOUNDARIES(content_type)] != [b"boundary"]:
        return None
    boundary = _header(content_type).get_boundary("").encode("latin-1", "replace")
    if not boundary:
        return None
    delimiter = re.compile(rb"\r\n--" + re.escape(boundary) + rb"(?P<end>--)?[ \t]*(?:\r\n|\Z)")
    # The line break before a delimiter belongs to it, and the first delimiter may do without; the one after a delimiter
    # may be the one before the next.
    text, parts = b"\r\n" + body, []
    found = delimiter.match(text)
    while found and not found["end"]:
        begin = found.end() - 2
        found = delimiter.search(text, begin)
        if found:
            parts.append(text[begin + 2 : found.start()])
    return parts if found and found.end() == len(text) else None


def _header(content_type: bytes) -> Message:
    message = Message()
    message["content-type"] = content_type.decode("latin-1")
    return message


def _without_boundary(content_type: bytes) -> bytes:
    parameters = _header(content_type).get_params([]) or []
    kept = [f"{name.lower()}={value}" for name, value in parameters[1:] if name.lower() != "boundary"]
    return ";".join((parameters[0][0].lower(), *kept)).encode("latin-1", "replace")


def canonical_json(body: bytes | str) -> bytes:
    """Return the same bytes for the same JSON. They are for comparison, and are not JSON themselves.

    >>> canonical_json('{"b": 1.0, "a": 2}') == canonical_json('{"a":2,"b":1.0}')
    True
    >>> canonical_json('[1]') == canonical_json('[1.0]')
    False
    """
    text = body if isinstance(body, str) else body.decode(json.detect_encoding(body), "surrogatepass")
    if "\\u0000" in text:
        raise ValueError("contains the mark of numbers")  # Postgres would not store it either
    return _encode(_decode(text)).encode("utf-8", "surrogatepass")


def _pairs(pairs: list[tuple[str, Any]]) -> Any:
    members = dict(pairs)
    # With a repeated key: all members, sorted, marked by a first element that no other array has.
    return members if len(members) == len(pairs) else ["\0", *sorted(pairs, key=_name)]


# Numbers stay as they are written, marked with a character that no string contains here. All of it runs in the
# interpreter's C code, because it runs for every request.
_mark = "\0".__add__
_decode = json.JSONDecoder(object_pairs_hook=_pairs, parse_float=_mark, parse_int=_mark, parse_constant=_mark).decode
_encode = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":"), sort_keys=True).encode
