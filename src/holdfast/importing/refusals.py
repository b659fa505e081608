"""The error for a row or a task that cannot be an event: it names the row or task, and is always short."""

from __future__ import annotations

from holdfast.errors import ConfigurationError, HoldfastError

_LONGEST_NAME, _LONGEST_PROBLEM = 100, 500


def refusal(name: str, error: Exception, remedy: str) -> ConfigurationError:
    """Return the error that names the refused row or task, and the reason."""
    return ConfigurationError(_cut(name, _LONGEST_NAME), _cut(_problem(error), _LONGEST_PROBLEM), remedy)


def _problem(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "cannot be an event: it is nested too deeply"
    if isinstance(error, ValueError) and str(error).startswith("Exceeds the limit"):
        return "cannot be an event: an integer in it has more digits than can be read"
    named = isinstance(error, HoldfastError | ValueError)  # the text of others says little without their type
    return f"cannot be an event: {error if named else f'{type(error).__name__}: {error}'}"


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
