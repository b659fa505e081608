"""The nightly tier: `./dev test -- --nightly` searches with many more examples than a usual run, which samples."""

from __future__ import annotations

import pytest
from hypothesis import settings

EXAMPLES = 10_000
TIMEOUT = 7_200


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help=f"{EXAMPLES:,} examples for each property (takes hours)")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--nightly"):
        settings.register_profile("nightly", max_examples=EXAMPLES, deadline=None)
        settings.load_profile("nightly")
        config.option.timeout = config.option.timeout or TIMEOUT


def nightly_examples(config: pytest.Config) -> int | None:
    """The number of examples, if this is a nightly run."""
    return EXAMPLES if config.getoption("--nightly") else None
