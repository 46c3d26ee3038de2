"""What holds for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.memory.servers import Valkey

# A test fails for what the code does, never for how fast this machine is: pytest's timeout ends what hangs.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="module")
def running() -> Iterator[Valkey]:
    """A store that the tests of a file share."""
    from tests.memory.servers import Valkey  # not in environments of other engines

    with Valkey() as server:
        yield server


@pytest.fixture
def server(running: Valkey) -> Valkey:
    """An empty store, shared over the tests of a file: none may stop it."""
    running.client.flushall()
    return running
