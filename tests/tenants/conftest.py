from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.memory.servers import Valkey


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
