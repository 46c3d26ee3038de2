"""Mixed traffic on a real service loses no memory, thread, file descriptor or request slot."""

from __future__ import annotations

import pytest

from tests.system.soak.growth import BOUNDS
from tests.system.soak.run import ROUNDS, soak
from tests.system.soak.traffic import KINDS


@pytest.mark.parametrize(
    ("seconds", "memory_bound"),
    [
        # In the second half of the time, some 100 requests: a leak of 640 KiB per request, a fifth of the KV memory of
        # a sequence. A run of half an hour finds 2 KiB per request.
        pytest.param(14, 64.0, marks=pytest.mark.timeout(600)),
        pytest.param(1800, BOUNDS["rss_mib"], marks=(pytest.mark.slow, pytest.mark.timeout(2400))),
    ],
)
def test_a_soak_loses_no_slot_and_no_memory(seconds: int, memory_bound: float) -> None:
    soaked = soak(seconds)
    growths = soaked.growths(seconds, memory_bound)
    print(soaked.requests.total(), growths)
    assert soaked.failures == []
    assert set(soaked.requests) == KINDS.keys()
    assert max(sample.requests for sample in soaked.samples) > 4
    assert soaked.free_slots == [soaked.slots] * ROUNDS
    assert {growth.name for growth in growths} == BOUNDS.keys()
    assert [growth for growth in growths if not growth.within] == []
    assert soaked.log == ""
