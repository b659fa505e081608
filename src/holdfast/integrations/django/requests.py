"""The captured request of Django: read once, hashed, and restored before the view is run again."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from django.core.exceptions import RequestDataTooBig
from django.http.request import RawPostDataException

from holdfast.errors import ConfigurationError
from holdfast.idempotency import answers
from holdfast.idempotency.answers import Answer
from holdfast.idempotency.hashing import HashedRequest
from holdfast.idempotency.settings import IdempotencySettings


class CapturedRequest:
    """A request as the server received it. `key_fields` are its `Idempotency-Key` headers.

    If it cannot be hashed, `refusal` is the answer to it, or `error` the misuse that prevents it.
    """

    def __init__(self, request: Any, settings: IdempotencySettings) -> None:
        self._request = request
        self._settings = settings
        field = request.META.get("HTTP_IDEMPOTENCY_KEY")
        # WSGI joins two fields with a comma, which no key has outside of quotation marks.
        self.key_fields = [] if field is None else [field.encode("latin-1", "replace")]
        self.refusal: Answer | None = None
        self.error: ConfigurationError | None = None
        self._body = b""
        if self.key_fields:
            # Now, because a view may read the stream, after which Django cannot return the body.
            self._read()
        self._state = dict(vars(request))

    def _read(self) -> None:
        settings = self._settings
        announced = self._request.META.get("CONTENT_LENGTH") or ""
        length = int(announced) if announced.isdigit() else 0
        if length > settings.request_limit:
            self.refusal = answers.body_too_large(settings)
            return
        try:
            self._body = self._request.body
        except RequestDataTooBig:
            self.refusal = answers.body_too_large(settings)
            return
        except RawPostDataException:
            self.error = ConfigurationError(
                "MIDDLEWARE",
                "has something that reads the body of the request before Holdfast can",
                "put holdfast.integrations.django.IdempotencyMiddleware before it",
            )
            return
        if len(self._body) > settings.request_limit:
            self.refusal = answers.body_too_large(settings)
        elif len(self._body) < length:
            self.refusal = answers.unavailable(settings)  # the client is gone, and will not read it

    def hashed_parts(self) -> list[bytes]:
        """Return the parts of the request that are hashed."""
        request = self._request
        hashed = HashedRequest(
            request.method,
            request.get_full_path().partition("?")[0].encode(),
            request.META.get("QUERY_STRING", "").encode("latin-1", "replace"),
            request.META.get("CONTENT_TYPE", "").encode("latin-1", "replace"),
            self._body,
            request.META.get("HTTP_CONTENT_ENCODING", "").encode("latin-1", "replace"),
        )
        return hashed.parts(raw=self._settings.raw_body)

    def rewind(self) -> bool:
        """Restore the request object to its state on arrival; return False if its body was read and is not kept."""
        request, state = self._request, vars(self._request)
        body = state.get("_body")
        if body is None and request._read_started:
            return False
        request.close()  # uploaded files, which are parsed again
        state.clear()
        state |= self._state
        if body is not None:
            request._body, request._stream = body, BytesIO(body)
        return True
