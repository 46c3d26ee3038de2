from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from draftwood_service.logging_config import configure_logging
from tests.memory.servers import Valkey


@pytest.fixture(autouse=True, scope="session")
def logging_as_served() -> None:
    """Configures logging as the service does; loggers keep the configuration of their first use."""
    configure_logging("info", "console", sys.__stderr__)


@pytest.fixture(scope="module")
def running() -> Iterator[Valkey]:
    """A store that the tests of a file share."""
    with Valkey() as server:
        yield server


@pytest.fixture
def server(running: Valkey) -> Valkey:
    """An empty store, shared over the tests of a file: none may stop it."""
    running.client.flushall()
    return running
