from __future__ import annotations

import io
import sys
from collections.abc import AsyncIterator, Iterator

import pytest

from draftwood_service.logging_config import configure_logging
from draftwood_tenants import followed_file
from tests.service.fakes import Served, serving


@pytest.fixture(autouse=True, scope="session")
def logging_as_served() -> None:
    """Configures logging as the service does, before a logger is first used."""
    configure_logging("info", "console", sys.__stderr__)


@pytest.fixture(autouse=True)
def files_are_looked_at_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each second, in a service."""
    monkeypatch.setattr(followed_file, "POLL_SECONDS", 0.05)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """A server with the settings of its defaults."""
    async with serving() as made:
        yield made


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """Lines of the log as JSON."""
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    yield stream
    configure_logging("info", "console", sys.__stderr__)
