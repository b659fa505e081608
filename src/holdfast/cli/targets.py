"""Imports what a command names as MODULE:NAME: handlers, what makes their transactions, a function that redacts."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from difflib import get_close_matches
from types import ModuleType

from holdfast.errors import ConfigurationError
from holdfast.failure import Redactor
from holdfast.handlers import HandlerRegistry
from holdfast.redact import unredacted


def load_registry(target: str) -> HandlerRegistry:
    """Import `module:attribute`, looking in the current directory first."""
    module, attribute = _imported(target, "a registry", "MODULE:REGISTRY, like app.handlers:registry")
    if not hasattr(module, attribute):
        found = [name for name, value in vars(module).items() if isinstance(value, HandlerRegistry)]
        remedy = f"did you mean {module.__name__}:{found[0]}?" if found else "make one: registry = HandlerRegistry()"
        raise ConfigurationError(module.__name__, f"has no attribute {attribute}", remedy)
    registry = getattr(module, attribute)
    if not isinstance(registry, HandlerRegistry):
        problem = f"is {type(registry).__name__}, not a HandlerRegistry"
        raise ConfigurationError(target, problem, "name the registry that your handlers are registered with")
    return registry


def load_transactions(target: str) -> object:
    """Import what makes the transactions of handlers; the worker says whether it is of a kind that it can use."""
    module, attribute = _imported(target, "a session factory, an engine or a pool", "MODULE:NAME, like shop.db:Session")
    if not hasattr(module, attribute):
        near = get_close_matches(attribute, vars(module), 1)
        remedy = f"did you mean {module.__name__}:{near[0]}?" if near else "name what --transactions is to use"
        raise ConfigurationError(module.__name__, f"has no attribute {attribute}", remedy)
    found: object = getattr(module, attribute)
    return found


def load_redactor(target: str | None) -> Redactor | None:
    """Import the function that is applied to error texts; `none` is the one that turns redaction off."""
    if not target:
        return None
    if target == "none":
        return unredacted
    module, attribute = _imported(target, "a function", "MODULE:FUNCTION, like app.privacy:redact, or none")
    found = getattr(module, attribute, None)
    if not callable(found):
        problem = "is not a function" if hasattr(module, attribute) else "does not exist"
        raise ConfigurationError(target, problem, "name a function that takes a text and returns one")
    redactor: Redactor = found
    return redactor


def _imported(target: str, what: str, form: str) -> tuple[ModuleType, str]:
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise ConfigurationError(target, f"does not name {what}", f"write {form}")
    if "/" in module_name or module_name.endswith(".py"):
        dotted = ".".join(part for part in module_name.removesuffix(".py").split("/") if part not in ("", ".", ".."))
        raise ConfigurationError(module_name, "is a file, not a module", f"write {dotted}:{attribute}")
    return load_module(module_name), attribute


def load_module(module_name: str) -> ModuleType:
    """Import a module, looking in the current directory first."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        _set_up_django()
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            remedy = "run this in the directory that holds it, or correct the name"
            raise ConfigurationError(
                module_name, f"cannot be imported: no module named {error.name}", remedy
            ) from error
        raise _broken(module_name, error) from error
    except (Exception, SystemExit) as error:
        raise _broken(module_name, error) from error


def _set_up_django() -> None:
    """Load the applications of a Django project, as its own commands do: handlers import its models."""
    if not os.environ.get("DJANGO_SETTINGS_MODULE") or importlib.util.find_spec("django") is None:
        return
    import django
    from django.apps import apps

    if not apps.ready:
        django.setup()


def _broken(module: str, error: BaseException) -> ConfigurationError:
    problem = f"failed while it was imported: {type(error).__name__}: {error}"
    if "DJANGO_SETTINGS_MODULE" in str(error) and not os.environ.get("DJANGO_SETTINGS_MODULE"):
        return ConfigurationError(
            module, problem, "set DJANGO_SETTINGS_MODULE, or run it by manage.py: python manage.py holdfast worker"
        )
    return ConfigurationError(module, problem, "correct it; --debug shows where it happened")
