"""What makes two requests the same: an HMAC over method, path, query, content type and body.

Bodies are normalised, so that a client may write the same JSON with other white space or another order of its keys.
Numbers stay as they are written (1 is not 1.0, and no digit is lost), and a key that occurs twice stays twice.
"""

import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from hashlib import sha256
from json.encoder import encode_basestring as _quoted
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
        return [hmac.new(secret, text, sha256).hexdigest() for secret in self._secrets.values()]

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
    pairs = parse_qsl(query, keep_blank_values=True)
    return urlencode(sorted(pairs, key=_name)).encode()


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


class _Written(str):
    """A part of the document that is in its final form: a number as it came, or a whole object."""


def canonical_json(body: bytes | str) -> bytes:
    """The same bytes for the same JSON.

    >>> canonical_json('{"b": 1.0, "a": [1, 1e2]}')
    b'{"a":[1,1e2],"b":1.0}'
    """
    value = json.loads(body, object_pairs_hook=_object, parse_float=_Written, parse_int=_Written)
    return _write(value).encode("utf-8", "surrogatepass")


def _object(pairs: list[tuple[str, Any]]) -> _Written:
    # A stable sort: of equal keys, the last one is the one that counts for most readers.
    members = [f"{_quoted(key)}:{_write(value)}" for key, value in sorted(pairs, key=_name)]
    return _Written("{" + ",".join(members) + "}")


def _write(value: object) -> str:
    match value:
        case _Written():
            return value
        case str():
            return _quoted(value)
        case list():
            return "[" + ",".join(map(_write, value)) + "]"
        case _:
            return json.dumps(value)
