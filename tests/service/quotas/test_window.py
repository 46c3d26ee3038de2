"""Limits in one process, on a clock of the test's own."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood_model_runner.errors import InvalidValueError
from draftwood_service.quotas import NO_LIMITS, QuotaExceededError, RateLimits
from draftwood_service.quotas.local import Limiter


class Clock:
    """Seconds that the test sets."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


async def test_a_settle_after_the_window_changes_nothing() -> None:
    clock = Clock()
    limiter = Limiter(clock)
    limits = RateLimits(tokens_per_minute=100)
    long = await limiter.reserve("t", limits, 100)
    clock.now += 100
    await limiter.reserve("t", limits, 100)
    long.release(1)
    with pytest.raises(QuotaExceededError):
        await limiter.reserve("t", limits, 1)


async def test_a_request_may_have_used_more_than_it_reserved() -> None:
    limiter, limits = Limiter(Clock()), RateLimits(tokens_per_minute=100)
    (await limiter.reserve("t", limits, 100)).release(101)
    with pytest.raises(QuotaExceededError):
        await limiter.reserve("t", limits, 1)


async def test_idle_tenants_and_tenants_without_limits_are_not_kept() -> None:
    clock = Clock()
    limiter = Limiter(clock)
    await limiter.reserve("free", NO_LIMITS, 10**9)
    for number in range(100):
        (await limiter.reserve(f"t{number}", RateLimits(concurrency=1), 1)).release(1)
    assert len(limiter.windows) == 100
    clock.now += 200
    await limiter.reserve("t", RateLimits(concurrency=1), 1)
    assert set(limiter.windows) == {"t"}


@pytest.mark.parametrize("name", ["requests_per_minute", "tokens_per_minute", "concurrency"])
def test_limits_are_at_least_one(name: str) -> None:
    with pytest.raises(InvalidValueError, match=name):
        RateLimits(**{name: 0})


@given(
    gaps=st.lists(st.floats(0, 30) | st.floats(0, 0.5), min_size=1, max_size=80),
    tokens=st.lists(st.integers(1, 60), min_size=80, max_size=80),
    requests=st.integers(1, 8),
)
async def test_no_minute_has_more_than_the_limit(gaps: list[float], tokens: list[int], requests: int) -> None:
    clock = Clock(0.0)
    limiter = Limiter(clock)
    limits = RateLimits(requests_per_minute=requests, tokens_per_minute=100)
    admitted: list[tuple[float, int]] = []
    for gap, needed in zip(gaps, tokens, strict=False):
        clock.now += gap
        with suppress(QuotaExceededError):
            await limiter.reserve("t", limits, needed)
            admitted.append((clock.now, needed))
    for begin, _ in admitted:
        window = [needed for at, needed in admitted if begin <= at < begin + 60]
        assert len(window) <= requests
        assert sum(window) <= 100


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 100)), min_size=1, max_size=30))
async def test_a_request_fits_after_the_seconds_of_its_error_and_not_much_earlier(
    earlier: list[tuple[float, int]],
) -> None:
    clock = Clock(0.0)
    limiter = Limiter(clock)
    limits = RateLimits(tokens_per_minute=100)
    for gap, tokens in earlier:
        clock.now += gap
        with suppress(QuotaExceededError):
            await limiter.reserve("t", limits, tokens)
    with pytest.raises(QuotaExceededError) as caught:
        await limiter.reserve("t", limits, 100)
    assert caught.value.retry_seconds is not None
    assert 0 < caught.value.retry_seconds <= 61
    clock.now += caught.value.retry_seconds - 0.01
    with pytest.raises(QuotaExceededError):
        await limiter.reserve("t", limits, 100)
    clock.now += 0.02
    await limiter.reserve("t", limits, 100)
