"""Limits within one process: windows, and the part of a request in them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood_service.quotas import NO_LIMITS, Limiter, QuotaExceededError, RateLimits
from draftwood_service.quotas.request_quota import ALLOWANCE, RequestQuota, TextCallQuota
from tests.memory.servers import Valkey
from tests.service.quotas.test_shared import limiters


class Clock:
    """Seconds that the test sets."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


async def test_a_request_may_use_more_than_it_reserved_and_gives_nothing_back_after_its_window() -> None:
    clock, limits = Clock(), RateLimits(tokens_per_minute=100)
    limiter = Limiter(clock)
    long = await limiter.reserve("t", limits, 100)
    clock.now += 100
    (await limiter.reserve("t", limits, 100)).release(101)
    long.release(1)
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


@pytest.fixture(params=["local", "shared"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def limiter_of(kind: str, server: Valkey) -> AsyncIterator[Limiter]:
    if kind == "local":
        yield Limiter()
        return
    async with limiters(server.url, 1) as [limiter]:
        yield limiter


async def used(limiter: Limiter, limits: RateLimits) -> dict[str, int]:
    """What is counted, by limit: how a request that is too large is refused."""
    found = {}
    for name, value in (("requests_per_minute", limits.requests_per_minute), ("tokens_per_minute", 10**6)):
        with pytest.raises(QuotaExceededError) as caught:
            await limiter.reserve("t", RateLimits(**{name: value}), 10**9, requests=10**6)
        found[name] = caught.value.used
    return found


LIMITS = RateLimits(requests_per_minute=3, tokens_per_minute=100, concurrency=2)


async def test_a_request_reserves_in_two_parts_and_counts_once(kind: str, server: Valkey) -> None:
    async with limiter_of(kind, server) as limiter:
        quota = RequestQuota(limiter, "t", LIMITS)
        await quota.enter(31)
        await quota.reserve_tokens(90)
        quota.queued()
        assert await used(limiter, LIMITS) == {"requests_per_minute": 1, "tokens_per_minute": 90}
        quota.release(50)
        quota.release(0)
        await quota.released()
        assert await used(limiter, LIMITS) == {"requests_per_minute": 1, "tokens_per_minute": 50}
        other = RequestQuota(limiter, "t", LIMITS)
        await other.enter(49)
        with pytest.raises(QuotaExceededError) as caught:
            await other.reserve_tokens(51)
        assert (caught.value.limit, caught.value.used, caught.value.needed) == ("tokens_per_minute", 50, 51)
        assert caught.value.retry_seconds is not None
        with pytest.raises(QuotaExceededError, match="lower max_tokens") as caught:
            await other.reserve_tokens(101)  # more than the whole limit, with what is reserved already
        assert caught.value.retry_seconds is None
        await other.reserve_tokens(50)
        assert (await used(limiter, LIMITS))["tokens_per_minute"] == 100


async def test_a_request_that_is_not_queued_is_not_counted(kind: str, server: Valkey) -> None:
    async with limiter_of(kind, server) as limiter:
        for _ in range(10):
            quota = RequestQuota(limiter, "t", LIMITS)
            await quota.enter(2)
            await quota.reserve_tokens(90)
            quota.release(80)
            await quota.released()
        assert await used(limiter, LIMITS) == {"requests_per_minute": 0, "tokens_per_minute": 0}


def test_calls_on_text_have_a_window_of_their_own() -> None:
    clock = Clock()
    quota, limits = TextCallQuota(clock), RateLimits(requests_per_minute=2, tokens_per_minute=50)
    for _ in range(2 * ALLOWANCE):
        quota.admit("t", limits)
        quota.count("t", limits, 1)
    with pytest.raises(QuotaExceededError) as caught:
        quota.admit("t", limits)
    assert (caught.value.limit, caught.value.value, caught.value.used) == ("text_calls_per_minute", 20, 20)
    quota.admit("other", limits)
    for texts in ((499, 1), (10**6,)):  # one that is too long is never refused, those after it are
        clock.now += 61
        for tokens in texts:
            quota.admit("t", limits)
            quota.count("t", limits, tokens)
        with pytest.raises(QuotaExceededError, match=f"text_tokens_per_minute: {sum(texts)} of 500 are used"):
            quota.admit("t", limits)
    clock.now += 61
    quota.admit("t", limits)
    for _ in range(1000):
        quota.admit("free", RateLimits(concurrency=1))
        quota.count("free", RateLimits(concurrency=1), 10**6)
