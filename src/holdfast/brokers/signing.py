"""Signatures of messages, by which a worker tells a relay's messages from those that anybody else has written.

A relay signs the bytes of a structured CloudEvent, and puts the signature in front of its other attributes:

    {"hfsignature":"1.<id of the secret>.<HMAC-SHA256>","specversion":"1.0", … ,"data":{…}}

The signature covers the length and the name of the channel, and every byte of the message after the signature. A worker
checks these bytes before it parses them: a message that two JSON parsers would read differently, for instance because
it has a name twice, cannot pass for another one.
"""

from __future__ import annotations

import hashlib
import hmac
from binascii import b2a_base64
from collections.abc import Sequence
from enum import Enum
from typing import Final

from holdfast.brokers.attributes import SIGNATURE

_START: Final = f'{{"{SIGNATURE}":"'.encode()
_VERSION: Final = b"1."
_CONTEXT: Final = b"holdfast relay 1\0"
_ID_LENGTH: Final = 8
_MAC_LENGTH: Final = 43  # of 32 bytes in base64, without padding
_ID_AT: Final = len(_START) + len(_VERSION)
_MAC_AT: Final = _ID_AT + _ID_LENGTH + 1
_END: Final = _MAC_AT + _MAC_LENGTH
_REST: Final = _END + 2
# The part of a signature that goes into the broker's de-duplication id: too long to guess, and still short.
_MARK_LENGTH: Final = 16
_MOST_CHANNELS: Final = 1000


class Verdict(Enum):
    """What the signature of a message says."""

    OURS = "signed by a relay"
    UNSIGNED = "it says that a relay has sent it, and has no signature"
    UNKNOWN = "it is signed with a secret that this worker does not accept"
    FORGED = "its signature is not that of its content"


class _Secret:
    """One secret, and the keys made from it; its repr shows none of them."""

    __slots__ = ("_begun", "_key", "id")

    def __init__(self, secret: bytes) -> None:
        self._key = hashlib.sha256(_CONTEXT + secret).digest()
        self._begun: dict[str, hmac.HMAC] = {}  # by channel, with the prefix that all of its messages share
        self.id = hmac.digest(self._key, b"id", "sha256").hex()[:_ID_LENGTH].encode()

    def mac(self, rest: bytes, channel: str) -> bytes:
        """Return the authentication code of `rest`, the bytes of a message after its signature."""
        begun = self._begun.get(channel)
        if begun is None:
            if len(self._begun) >= _MOST_CHANNELS:
                self._begun.clear()
            name = channel.encode()
            begun = hmac.new(self._key, _CONTEXT + len(name).to_bytes(4, "big") + name, "sha256")
            self._begun[channel] = begun
        code = begun.copy()
        code.update(rest)
        return b2a_base64(code.digest(), newline=False)[:_MAC_LENGTH]


class Signatures:
    """The secrets that a worker signs with and accepts. Until `use` is called it signs and accepts nothing."""

    def __init__(self) -> None:
        self._signing: _Secret | None = None
        self._accepted: dict[bytes, list[_Secret]] = {}
        self._apart = b""

    @property
    def ready(self) -> bool:
        """Whether there is a secret to sign with."""
        return self._signing is not None

    def use(self, signing: bytes, accepted: Sequence[bytes], apart: bytes) -> None:
        """Sign with one secret and accept several; `apart` is the secret for the keys of foreign events."""
        self._signing = _Secret(signing)
        found: dict[bytes, list[_Secret]] = {}
        for secret in dict.fromkeys((signing, *accepted)):
            each = _Secret(secret)
            found.setdefault(each.id, []).append(each)
        self._accepted, self._apart = found, apart

    def signed(self, body: bytes, channel: str) -> tuple[bytes, str]:
        """Return a structured CloudEvent with its signature, and a mark of it that only a relay can work out."""
        if self._signing is None:
            raise RuntimeError("there is no secret to sign with")
        rest = body[1:]
        mac = self._signing.mac(rest, channel)
        return b"".join((_START, _VERSION, self._signing.id, b".", mac, b'",', rest)), mac[:_MARK_LENGTH].decode()

    def verdict(self, body: bytes, channel: str) -> Verdict:
        """Return what the signature of a message says about it."""
        if not body.startswith(_START):
            return Verdict.UNSIGNED
        if body[len(_START) : _ID_AT] != _VERSION or body[_END:_REST] != b'",' or body[_MAC_AT - 1 : _MAC_AT] != b".":
            return Verdict.FORGED
        known = self._accepted.get(body[_ID_AT : _MAC_AT - 1])
        if known is None:
            return Verdict.UNKNOWN
        rest, given = body[_REST:], body[_MAC_AT:_END]
        if any([hmac.compare_digest(each.mac(rest, channel), given) for each in known]):
            return Verdict.OURS
        return Verdict.FORGED

    def apart(self, key: str) -> str:
        """Return the key of a foreign event, changed so that it never equals a key that a producer here chose."""
        return f"foreign:{hmac.digest(self._apart, key.encode(errors='surrogatepass'), 'sha256').hex()}"
