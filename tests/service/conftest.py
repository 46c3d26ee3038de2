from __future__ import annotations

import sys

import pytest

from service.logs import configure_logging


@pytest.fixture(autouse=True, scope="session")
def logging_as_served() -> None:
    """Logs as the service writes them; their loggers keep the configuration of their first use."""
    configure_logging("info", "console", sys.__stderr__)
