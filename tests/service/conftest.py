from __future__ import annotations

import sys

import pytest

from draftwood_service.logging_config import configure_logging


@pytest.fixture(autouse=True, scope="session")
def logging_as_served() -> None:
    """Configures logging as the service does; loggers keep the configuration of their first use."""
    configure_logging("info", "console", sys.__stderr__)
