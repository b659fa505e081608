"""What a client sent, in a request of Django's: read once, hashed, and made as it came when the view is run again."""

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
    """A request as the server brought it. `fields` are those of the key, `body` may be how it is refused."""

    def __init__(self, request: Any, settings: IdempotencySettings) -> None:
        self._request = request
        self._settings = settings
        field = request.META.get("HTTP_IDEMPOTENCY_KEY")
        # WSGI joins two fields with a comma, which no key has outside of quotation marks.
        self.fields = [] if field is None else [field.encode("latin-1", "replace")]
        self.body = self._read() if self.fields else b""
        self._state = dict(vars(request))

    def _read(self) -> bytes | Answer | ConfigurationError:
        """Now, because a view may read the stream, and a body cannot be had from Django after that."""
        announced = self._request.META.get("CONTENT_LENGTH") or ""
        length = int(announced) if announced.isdigit() else 0
        if length > self._settings.request_limit:
            return answers.body_too_large(self._settings)
        try:
            body: bytes = self._request.body
        except RequestDataTooBig:
            return answers.body_too_large(self._settings)
        except RawPostDataException:
            return ConfigurationError(
                "MIDDLEWARE",
                "has something that reads the body of the request before Holdfast can",
                "put holdfast.integrations.django.IdempotencyMiddleware before it",
            )
        if len(body) > self._settings.request_limit:
            return answers.body_too_large(self._settings)
        if len(body) < length:
            return answers.unavailable(self._settings)  # the client went, and will read nothing of this
        return body

    def parts(self, body: bytes) -> list[bytes]:
        """What of it is hashed."""
        request = self._request
        hashed = HashedRequest(
            request.method,
            request.get_full_path().partition("?")[0].encode(),
            request.META.get("QUERY_STRING", "").encode("latin-1", "replace"),
            request.META.get("CONTENT_TYPE", "").encode("latin-1", "replace"),
            body,
        )
        return hashed.parts(raw=self._settings.raw_body)

    def rewind(self) -> bool:
        """Make it as it came: the same object, for those around us. False if its body went past us, and is gone."""
        request, state = self._request, vars(self._request)
        body = state.get("_body")
        if body is None and request._read_started:
            return False
        request.close()  # files that were uploaded, and are parsed again
        state.clear()
        state |= self._state
        if body is not None:
            request._body, request._stream = body, BytesIO(body)
        return True
