from __future__ import annotations

import io
import sys
from collections.abc import Iterator

import pytest

from draftwood_service.logging_config import configure_logging


@pytest.fixture(autouse=True, scope="session")
def logging_as_served() -> None:
    """Configures logging as the service does; loggers keep the configuration of their first use."""
    configure_logging("info", "console", sys.__stderr__)


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """Lines of the log as JSON."""
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    yield stream
    configure_logging("info", "console", sys.__stderr__)
