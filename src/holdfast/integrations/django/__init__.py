"""Idempotent views for Django, with the contract of docs/http.md.

    MIDDLEWARE = [..., "holdfast.integrations.django.IdempotencyMiddleware"]
    HOLDFAST_IDEMPOTENCY = {"SECRETS": {1: env("IDEMPOTENCY_SECRET")}, "SCOPE": "shop.auth.tenant_of"}

    @login_required
    @idempotent
    def place_order(request):
        Order.objects.create(...)
        publisher.publish(connection, "order.placed", {...})
        return JsonResponse({...}, status=201)

The view runs in `transaction.atomic`. The middleware stores its response in the same transaction and commits, before
the response is passed on.
"""

from holdfast.installing import require_extra

require_extra("django", "django", "psycopg")

from holdfast.integrations.django.middleware import IdempotencyMiddleware
from holdfast.integrations.django.views import exchange_of, idempotent

__all__ = ["IdempotencyMiddleware", "exchange_of", "idempotent"]
