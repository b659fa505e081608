"""The nightly tier: `./dev test -- --nightly` searches with many more examples than a usual run, which samples."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

EXAMPLES = 10_000
TIMEOUT = 7_200


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help=f"{EXAMPLES:,} examples for each property (takes hours)")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # On a busy machine to make an example may take long, which says nothing about the property.
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")
    if config.getoption("--nightly"):
        settings.register_profile("nightly", parent=settings.get_profile("busy"), max_examples=EXAMPLES)
        settings.load_profile("nightly")
        config.option.timeout = config.option.timeout or TIMEOUT


def nightly_examples(config: pytest.Config) -> int | None:
    """The number of examples, if this is a nightly run."""
    return EXAMPLES if config.getoption("--nightly") else None
