"""The step that ends a prompt: who takes part in it, beside a tenant that holds more than its share of the slots."""

from __future__ import annotations

import pytest

from tests.model_runner.scheduling.test_scheduler import Bench


def crowded(slots: int = 8) -> Bench:
    """A bench on which tenant a decodes in all slots, and more of its requests wait."""
    bench = Bench(max_running=slots, prefix_cache=True)
    for _ in range(3 * slots):
        bench.add("a", prompt=20, max_tokens=1000)
    for _ in range(30):
        bench.step()
    assert len(bench.scheduler.running) == slots
    return bench


def test_the_step_of_a_first_token_runs_that_prompt_alone() -> None:
    bench = crowded()
    newcomer = bench.add("b", prompt=10, max_tokens=3)
    assert [(work.sequence, work.tokens) for work in bench.step()] == [(newcomer, 10)]
    assert len(newcomer.output) == 1
    assert len(bench.step()) == 8, "from the second token on, all take part"


def test_a_tenant_within_its_share_takes_part_in_every_step() -> None:
    bench = Bench(max_running=8)
    fair = [bench.add("a", max_tokens=100) for _ in range(4)]
    bench.step()
    for written in range(1, 50):
        assert [len(s.output) for s in fair] == [written] * 4
        if written % 5 == 0:
            bench.add("b", prompt=10, max_tokens=3)
        bench.step()


def test_slots_that_cannot_be_divided_evenly_are_not_held_against_anyone() -> None:
    bench = Bench(max_running=8)
    for tenant in "aaabbb":
        bench.add(tenant, max_tokens=100)
    bench.step()
    bench.add("c", prompt=10)
    bench.add("c", prompt=10)
    assert len(bench.step()) == 8


def test_a_tenant_by_itself_skips_nothing() -> None:
    bench = crowded()
    assert all(len(bench.step()) == 8 for _ in range(50))


@pytest.mark.parametrize("prompt", [10, 128])
def test_others_prompts_take_no_more_than_three_steps_in_a_row(prompt: int) -> None:
    """Tenant b asks anew in every step, with answers of one token."""
    bench = crowded()
    skipped = longest = 0
    for _ in range(100):
        bench.add("b", prompt=prompt, max_tokens=1)
        tenants = {work.sequence.request.tenant for work in bench.step()}
        skipped = 0 if "a" in tenants else skipped + 1
        longest = max(longest, skipped)
    assert longest == 3


def test_a_prompt_of_several_steps_has_its_last_one_alone() -> None:
    bench = crowded()
    long = bench.add("b", prompt=300, max_tokens=3)
    works = [{work.sequence.request.tenant: work.tokens for work in bench.step()} for _ in range(3)]
    assert [work["b"] for work in works] == [128, 128, 44]
    assert ["a" in work for work in works] == [True, True, False]
    assert len(long.output) == 1
