"""The API: it stores an order and publishes the news of it, in one transaction."""

import json

from django.db import connection, transaction
from django.http import HttpRequest, JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from examples.django_orders.models import Order
from holdfast import Publisher

publisher = Publisher("orders")


@csrf_exempt
@require_POST
def place_order(request: HttpRequest) -> JsonResponse:
    """Store the order. There is never an order without its event, nor an event without its order."""
    wanted = json.loads(request.body)
    with transaction.atomic():
        order = Order.objects.create(customer=wanted["customer"], total_cents=wanted["total_cents"])
        publisher.publish(connection, "order.placed", {"order_id": order.pk})
    return JsonResponse({"order_id": order.pk}, status=201)


urlpatterns = [path("orders", place_order)]
