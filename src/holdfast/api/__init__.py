"""The HTTP API: every verb of an operator under `/api/v1`, with an OpenAPI document. See docs/http-api.md."""

from holdfast.installing import require_extra

require_extra("console", "starlette")

from holdfast.api.app import create_api
from holdfast.api.bearer import by_bearer

__all__ = ["by_bearer", "create_api"]
