"""Settings of a small Django project, on the database that HOLDFAST_DSN names."""

import os
from urllib.parse import unquote, urlsplit

_place = urlsplit(os.environ.get("HOLDFAST_DSN", "postgresql://postgres@localhost/orders"))

SECRET_KEY = os.environ.get("ORDERS_SECRET", "for-a-demonstration-only")
ALLOWED_HOSTS = ["localhost", "127.0.0.1", "testserver"]
ROOT_URLCONF = "examples.django_orders.views"
INSTALLED_APPS = ["examples.django_orders"]
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _place.path.lstrip("/"),
        "USER": unquote(_place.username or ""),
        "PASSWORD": unquote(_place.password or ""),
        "HOST": _place.hostname or "",
        "PORT": _place.port or "",
    }
}
