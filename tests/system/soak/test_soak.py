"""Mixed traffic on a real service loses no memory, thread, file descriptor or request slot."""

from __future__ import annotations

import random

import pytest

from tests.system.soak.growth import BOUNDS, Sample, growth_of, theil_sen
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


def samples(rss: list[float], threads: int = 10) -> list[Sample]:
    return [Sample(float(i), value, threads, 20, 0) for i, value in enumerate(rss)]


def test_a_line_has_its_slope_whatever_a_few_points_do() -> None:
    times = [float(i) for i in range(30)]
    values = [2.0 + 0.5 * at for at in times]
    values[4] = values[20] = 1000.0
    assert theil_sen(times, values) == pytest.approx(0.5)


def test_what_grew_before_the_end_of_the_warm_up_does_not_count() -> None:
    memory = growth_of(samples([100.0 * i for i in range(10)] + [900.0] * 20), warm_up=10.0)[0]
    assert memory.name == "rss_mib"
    assert (memory.start, memory.end, memory.per_hour) == (900.0, 900.0, 0.0)
    assert memory.within


def test_noise_without_growth_is_within_and_a_steady_leak_is_not() -> None:
    draw = random.Random(0)
    noise = [500.0 + draw.uniform(0, 300) for _ in range(300)]
    assert growth_of(samples(noise), 100.0)[0].within
    leak = [value + 0.5 * i for i, value in enumerate(noise)]
    found = growth_of(samples(leak), 100.0)[0]
    assert not found.within
    assert found.per_hour == pytest.approx(3600 * 0.5, rel=0.2)


def test_everything_with_a_bound_is_fitted() -> None:
    leaking = [Sample(float(i), 100.0, i, 2 * i, 0) for i in range(60)]
    found = {growth.name: growth for growth in growth_of(leaking, 20.0)}
    assert found.keys() == BOUNDS.keys()
    assert {name for name, growth in found.items() if not growth.within} == {"threads", "fds"}
