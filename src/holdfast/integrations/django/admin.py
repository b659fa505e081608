"""Pages of the admin for failed deliveries: their groups and a list, one with its traceback, replay and discard."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any
from uuid import UUID

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.views.decorators.http import require_POST

from holdfast.errors import HoldfastError, NotFound
from holdfast.integrations.django.failed_deliveries import PAGE, FailedDeliveries
from holdfast.integrations.django.models import FailedDelivery
from holdfast.postgres.operations.failed import FailedEvent, FailureGroup

# The permission that each change needs.
_PERMISSIONS = {"replay": "holdfast.replay_faileddelivery", "discard": "holdfast.discard_faileddelivery"}
_PAYLOAD = "holdfast.read_payload_faileddelivery"
_LIST = "admin:holdfast_faileddelivery_changelist"


@admin.register(FailedDelivery)
class FailedDeliveryAdmin(admin.ModelAdmin):  # type: ignore[misc]
    """Shows failed deliveries as `Operator` reads them; Django has no rows of the model."""

    def has_add_permission(self, request: Any) -> bool:
        return False

    def has_change_permission(self, request: Any, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: Any, obj: Any = None) -> bool:
        return False

    def get_urls(self) -> list[Any]:
        view = self.admin_site.admin_view
        return [
            path("", view(self.changelist_view), name="holdfast_faileddelivery_changelist"),
            path("<uuid:id>/", view(self.detail_view), name="holdfast_faileddelivery_change"),
            path("move/", view(require_POST(self.move_view)), name="holdfast_faileddelivery_move"),
        ]

    def changelist_view(self, request: Any, extra_context: Any = None) -> Any:
        """Show the groups, and the deliveries of one or of all of them."""
        self._require_view(request)
        group = request.GET.get("group") or None
        groups: list[FailureGroup] = []
        deliveries: list[FailedEvent] = []
        try:
            groups, deliveries = FailedDeliveries(request.user).overview(group, _place(request.GET.get("before")))
        except HoldfastError as error:
            messages.error(request, str(error))
        last = deliveries[-1] if len(deliveries) == PAGE else None
        found = {
            "title": "Failed deliveries",
            "group": group,
            "groups": groups,
            "deliveries": deliveries,
            "next": f"{last.failed_at.isoformat()}_{last.id}" if last else None,
        }
        return self._answer(request, "list", found)

    def detail_view(self, request: Any, id: UUID) -> Any:
        """Show one delivery, with its traceback and, to those who may read it, its payload."""
        self._require_view(request)
        payload = request.user.has_perm(_PAYLOAD)
        try:
            event, delivery = FailedDeliveries(request.user).detail(id, payload=payload)
        except NotFound as error:
            raise Http404(str(error)) from error
        except HoldfastError as error:
            messages.error(request, str(error))
            return HttpResponseRedirect(reverse(_LIST, current_app=self.admin_site.name))
        text = json.dumps(event.payload, indent=2, ensure_ascii=False) if payload else None
        found = {"title": str(delivery.handler_name), "event": event, "delivery": delivery, "payload": text}
        return self._answer(request, "detail", found)

    def move_view(self, request: Any) -> Any:
        """Replay or discard the chosen deliveries, and go back to the list."""
        self._require_view(request)
        verb = request.POST.get("verb", "")
        if verb not in _PERMISSIONS or not request.user.has_perm(_PERMISSIONS[verb]):
            raise PermissionDenied
        ids, group = request.POST.getlist("id"), request.POST.get("group") or None
        if not ids and not group:
            messages.error(request, f"Nothing was chosen: tick the deliveries to {verb}.")
            return HttpResponseRedirect(reverse(_LIST, current_app=self.admin_site.name))
        try:
            moved = FailedDeliveries(request.user).move(verb, ids, group, request.POST.get("reason") or None)
        except HoldfastError as error:
            messages.error(request, str(error))
        else:
            left = ", ".join(f"{count} {why}" for why, count in moved.left.items())
            done = "replayed" if verb == "replay" else "discarded"
            messages.success(request, f"{moved.count} {done}{f'; left as they are: {left}' if left else ''}.")
        return HttpResponseRedirect(reverse(_LIST, current_app=self.admin_site.name))

    def _require_view(self, request: Any) -> None:
        if not self.has_view_permission(request):
            raise PermissionDenied

    def _answer(self, request: Any, page: str, found: dict[str, Any]) -> Any:
        allowed = {f"may_{verb}": request.user.has_perm(name) for verb, name in _PERMISSIONS.items()}
        context = {**self.admin_site.each_context(request), "opts": FailedDelivery._meta, **allowed, **found}
        request.current_app = self.admin_site.name
        return TemplateResponse(request, f"admin/holdfast/{page}.html", context)


def _place(text: str | None) -> tuple[datetime, UUID] | None:
    """Return the cursor at which the page before ended."""
    moment, _, id = (text or "").partition("_")
    try:
        return (datetime.fromisoformat(moment), UUID(id)) if text else None
    except ValueError as error:
        raise Http404("the page is unknown") from error
