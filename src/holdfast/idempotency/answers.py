"""The answers to idempotent requests, and how each ends its transaction: the contract of docs/http.md, without I/O."""

import json
from dataclasses import dataclass
from enum import Enum

from holdfast.idempotency.settings import IdempotencySettings
from holdfast.postgres.idempotency import ExistingRecord, StoredResponse

Headers = list[tuple[bytes, bytes]]

_RETRY_AFTER = (b"retry-after", b"1")
# These statuses depend on the client or the moment, not on the request: the next attempt may get another one.
_PASSING = frozenset((401, 403, 408, 425, 429))
_BODILESS = frozenset((204, 205, 304))


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete HTTP response."""

    status: int
    headers: Headers
    body: bytes

    def header(self, name: bytes) -> bytes | None:
        """Return the first value of the header, given in lower case."""
        return next((value for key, value in self.headers if key.lower() == name), None)

    def echoing(self, field: bytes | None) -> "Answer":
        """Return the answer with the key as the client wrote it; unchanged for None."""
        return self if field is None else Answer(self.status, [*self.headers, (b"idempotency-key", field)], self.body)


class Settlement(Enum):
    """How the transaction of a request is ended."""

    COMMIT = "commit the change; without a key there is no answer to store"
    STORE = "store the answer and commit it with the change"
    STORE_REFUSAL = "undo the change, store the answer and commit it"
    ROLL_BACK = "roll back, so that a retry is a first request"
    NOTHING = "do nothing: the transaction has ended"


def settlement_of(status: int, settings: IdempotencySettings, *, keyed: bool) -> Settlement:
    """Return how the transaction is ended for the status that the endpoint chose; `keyed` if the request has a key."""
    if status < 400:
        return Settlement.STORE if keyed else Settlement.COMMIT
    stores = settings.store_4xx if status < 500 else settings.store_5xx
    return Settlement.STORE_REFUSAL if keyed and stores and status not in _PASSING else Settlement.ROLL_BACK


def stored(answer: Answer, settings: IdempotencySettings) -> StoredResponse:
    """Return what is stored of an answer: the allowed headers, and the body up to `response_limit`."""
    kept = settings.kept_headers
    headers = [
        (name.lower().decode("latin-1"), value.decode("latin-1"))
        for name, value in answer.headers
        if name.lower() in kept
    ]
    omitted = len(answer.body) > settings.response_limit
    body = b"" if omitted else answer.body
    return StoredResponse(
        failed=answer.status >= 400, status=answer.status, headers=headers, body=body, omitted=omitted
    )


def replayed(record: ExistingRecord, settings: IdempotencySettings) -> Answer:
    """Return the answer to a duplicate of the recorded request."""
    if record.outcome == "reused":
        return key_reused(settings)
    response = record.response
    if response is None:
        return not_replayable(settings)
    headers: Headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.headers]
    if response.omitted:
        location = [(name, value) for name, value in headers if name == b"location"]
        return not_replayable(settings, location)
    # A replay is for this client alone, even where the first answer could have been cached.
    headers = [(name, value) for name, value in headers if name != b"cache-control"]
    headers += [(b"cache-control", b"no-store"), (b"vary", b"Idempotency-Key"), (b"idempotent-replayed", b"true")]
    if response.status not in _BODILESS:
        headers.append((b"content-length", str(len(response.body)).encode()))
    return Answer(response.status, headers, response.body)


# --- problems (RFC 9457) ---


def _problem(
    settings: IdempotencySettings, status: int, name: str, title: str, detail: str, headers: Headers | None = None
) -> Answer:
    kind = f"{settings.problems.rstrip('/')}/{name}"
    body = json.dumps({"type": kind, "title": title, "status": status, "detail": detail}).encode()
    fields: Headers = [
        (b"content-type", b"application/problem+json"),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        (b"link", f'<{kind}>; rel="describedby"'.encode("latin-1", "replace")),
    ]
    return Answer(status, fields + (headers or []), body)


def key_missing(settings: IdempotencySettings) -> Answer:
    detail = "Send a key of your own, such as a UUID, and send the same one with every retry of this request."
    return _problem(settings, 400, "idempotency-key-missing", "Idempotency-Key is missing", detail)


def key_invalid(settings: IdempotencySettings, why: str) -> Answer:
    detail = (
        f"The header {why}. Send one key of at most 255 printable ASCII characters, and put it into quotation marks "
        "if it has a space, a comma, a semicolon, a backslash or a quotation mark (these two with a backslash before)."
    )
    return _problem(settings, 400, "idempotency-key-invalid", "Idempotency-Key is invalid", detail)


def scope_invalid(settings: IdempotencySettings) -> Answer:
    detail = "Keys belong to a caller, and what was sent to identify this one is empty, too long or not printable."
    return _problem(settings, 400, "idempotency-scope-invalid", "The caller is not identified", detail)


def body_too_large(settings: IdempotencySettings) -> Answer:
    detail = f"Requests with a key may have {settings.request_limit} bytes."
    return _problem(settings, 413, "request-too-large", "The request is too large", detail)


def body_too_slow(settings: IdempotencySettings) -> Answer:
    detail = f"The body of a request must arrive within {settings.receive_within:g} seconds."
    return _problem(settings, 408, "request-too-slow", "The request took too long to arrive", detail)


def in_progress(settings: IdempotencySettings) -> Answer:
    detail = "The first request with this key is still being carried out. Ask again for its answer."
    name, title = "idempotency-in-progress", "The request is being carried out"
    return _problem(settings, 409, name, title, detail, [_RETRY_AFTER])


def key_reused(settings: IdempotencySettings) -> Answer:
    detail = "Another request was sent with this key. Use a new key for a new request."
    name, title = "idempotency-key-reused", "Idempotency-Key was used for another request"
    return _problem(settings, settings.mismatch_status, name, title, detail)


def not_replayable(settings: IdempotencySettings, location: Headers | None = None) -> Answer:
    detail = "The request was carried out, and is not carried out again, but its answer was not kept."
    name, title = "response-not-replayable", "The answer cannot be repeated"
    return _problem(settings, 409, name, title, detail, location)


def unavailable(settings: IdempotencySettings) -> Answer:
    detail = "Nothing is known to have been changed. Send the same request with the same key again."
    name, title = "idempotency-unavailable", "The request cannot be carried out now"
    return _problem(settings, 503, name, title, detail, [_RETRY_AFTER])


def misconfigured(settings: IdempotencySettings) -> Answer:
    detail = "Nothing was changed. Sending the request again does not help before the server has been set up."
    return _problem(settings, 500, "idempotency-misconfigured", "The server cannot record requests", detail)


def conflict(settings: IdempotencySettings) -> Answer:
    detail = "Nothing was changed. The request contradicts what is stored, and does so each time it is carried out."
    return _problem(settings, 409, "request-conflict", "The request contradicts what is stored", detail)


PROBLEMS = {
    400: "The key is missing or cannot be read, or its owner is not identified.",
    408: "The body of the request took too long to arrive.",
    409: "The first request with the key is under way, was another request, or its answer was too large to be kept; or "
    "the request contradicts what is stored.",
    413: "The request is too large to be sent with a key.",
    422: "The key was used for another request.",
    500: "The request was not carried out: the server is not set up for it.",
    503: "The request was not carried out, or it is not known whether it was: send it again with the same key.",
}
