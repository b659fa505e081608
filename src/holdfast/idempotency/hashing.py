"""What makes two requests the same: an HMAC over method, path, query, content type and body.

Bodies are normalised, so that a client may write the same JSON with other white space or another order of its keys.
Numbers stay as they are written (1 is not 1.0, and no digit is lost), and a key that occurs twice stays twice.
"""

import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from operator import itemgetter
from typing import Any
from urllib.parse import parse_qsl, urlencode

from holdfast.errors import ConfigurationError

_SHORTEST_SECRET = 16
_name = itemgetter(0)


class Secrets:
    """The secrets of the hashes, by number. The highest one signs, the others are still recognised.

    To change the secret, add one with a higher number; take the old one away when its records have expired.
    """

    def __init__(self, secrets: Mapping[int, str | bytes]) -> None:
        if not isinstance(secrets, Mapping) or not secrets:
            raise ConfigurationError("secrets", "are missing", 'give {1: "..."}, the same in every process')
        self._secrets: dict[int, bytes] = {}
        for version in sorted(secrets, reverse=True):
            secret = secrets[version]
            data = secret.encode() if isinstance(secret, str) else bytes(secret)
            if type(version) is not int or not 0 < version < 2**31:
                raise ConfigurationError("secrets", f"have the number {version!r}", "count from 1")
            if len(data) < _SHORTEST_SECRET:
                remedy = f"use {_SHORTEST_SECRET} bytes or more, for example from secrets.token_hex()"
                raise ConfigurationError("secrets", f"number {version} is too short", remedy)
            self._secrets[version] = data

    @property
    def version(self) -> int:
        return next(iter(self._secrets))

    def hashes(self, parts: Sequence[bytes]) -> list[str]:
        """Of a request, under every secret, the newest first."""
        # With their lengths, so that no two lists of parts are the same text.
        text = b"".join(b"%d:%b" % (len(part), part) for part in parts)
        return [hmac.digest(secret, text, "sha256").hex() for secret in self._secrets.values()]

    def shown(self, scope: str, key: str) -> str:
        """What logs may say of a key: the same for the same key, and nothing that could be sent."""
        return self.hashes((b"shown", scope.encode(errors="surrogatepass"), key.encode()))[0][:12]

    def __repr__(self) -> str:
        return f"Secrets(versions={list(self._secrets)})"


@dataclass(frozen=True, slots=True)
class HashedRequest:
    """What of an HTTP request is hashed."""

    method: str
    path: bytes  # as it was sent, percent-encoded
    query: bytes
    content_type: bytes
    body: bytes

    def parts(self, *, raw: bool = False) -> list[bytes]:
        """The parts to hash; with `raw` the body as it came."""
        media_type, body = (self.content_type, self.body) if raw else normalised(self.content_type, self.body)
        return [b"http", self.method.encode(), self.path, canonical_query(self.query), media_type, body]


def canonical_query(query: bytes) -> bytes:
    """Parameters by name; those of one name stay in their order."""
    if not query:
        return b""
    # Latin-1 has a character for every byte: none is lost, whatever the client's encoding was.
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True, encoding="latin-1")
    return urlencode(sorted(pairs, key=_name), encoding="latin-1").encode()


def normalised(content_type: bytes, body: bytes) -> tuple[bytes, bytes]:
    """Content type and body, free of what a client may write differently each time it sends the same thing."""
    media_type = content_type.partition(b";")[0].strip().lower()
    if media_type == b"application/json" or media_type.endswith(b"+json"):
        try:
            return media_type, canonical_json(body)
        except (ValueError, RecursionError):
            return media_type, body  # the application will say what is wrong with it
    if media_type.startswith(b"multipart/") and (boundary := _boundary(content_type)):
        # Clients make a new boundary for each attempt.
        return media_type, body.replace(b"--" + boundary, b"--")
    return content_type.strip(), body


def _boundary(content_type: bytes) -> bytes:
    message = Message()
    message["content-type"] = content_type.decode("latin-1")
    boundary = message.get_boundary("")
    return boundary.encode("latin-1", "replace")


def canonical_json(body: bytes | str) -> bytes:
    """The same bytes for the same JSON: made for comparing, not for reading.

    >>> canonical_json('{"b": 1.0, "a": 2}') == canonical_json('{"a":2,"b":1.0}')
    True
    >>> canonical_json('[1]') == canonical_json('[1.0]')
    False
    """
    text = body if isinstance(body, str) else body.decode(json.detect_encoding(body), "surrogatepass")
    if "\\u0000" in text:
        raise ValueError("has what numbers are marked with")  # Postgres would not store it either
    return _encode(_decode(text)).encode("utf-8", "surrogatepass")


def _pairs(pairs: list[tuple[str, Any]]) -> Any:
    members = dict(pairs)
    # With a key that occurs twice: all of it, in an order that depends on nothing else. Marked, as no array begins so.
    return members if len(members) == len(pairs) else ["\0", *sorted(pairs, key=_name)]


# Numbers stay as they are written, and are told from strings by a character that no string has here. Everything is
# done by the interpreter's own C code: this runs on every request.
_mark = "\0".__add__
_decode = json.JSONDecoder(object_pairs_hook=_pairs, parse_float=_mark, parse_int=_mark, parse_constant=_mark).decode
_encode = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":"), sort_keys=True).encode
