"""Mixed traffic on a real service loses no memory, thread, file descriptor or request slot."""

from __future__ import annotations

import random

import pytest

from tests.system.soak.growth import BOUNDS, Sample, growth_of
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


def samples(rss: list[float]) -> list[Sample]:
    return [Sample(float(i), value, 10, 20, 0) for i, value in enumerate(rss)]


def test_what_grew_before_the_end_of_the_warm_up_does_not_count() -> None:
    memory = growth_of(samples([100.0 * i for i in range(10)] + [900.0] * 20), warm_up=10.0)[0]
    assert memory == ("rss_mib", 900.0, 900.0, 0.0, BOUNDS["rss_mib"])
    assert memory.within


def test_noise_without_growth_is_within_and_a_steady_leak_is_not() -> None:
    draw = random.Random(0)
    noise = [500.0 + draw.uniform(0, 300) for _ in range(300)]
    noise[150] = 100_000.0
    assert growth_of(samples(noise), 100.0)[0].within
    found = growth_of([Sample(float(i), value + 0.5 * i, i, 2 * i, 0) for i, value in enumerate(noise)], 100.0)
    assert [(growth.name, growth.within) for growth in found] == [(name, False) for name in BOUNDS]
    assert found[0].per_hour == pytest.approx(3600 * 0.5, rel=0.2)
