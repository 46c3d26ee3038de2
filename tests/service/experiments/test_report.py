"""Guardrails and reports."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from draftwood.admin.v1 import experiments_pb2 as pb
from draftwood_model_runner.request import Request, StopParams
from draftwood_model_runner.sequence import SequenceStats
from draftwood_service.engine.stream import Sample
from draftwood_service.experiments.live import outcome_of
from draftwood_service.experiments.report import INTERFERENCE, KEYS, report
from draftwood_service.experiments.statistics import violations
from draftwood_tenants.experiments.assignment import BUCKETS, Limits, Split
from draftwood_tenants.experiments.counts import Counts, Origin, Outcome, Recorder, column

SPLIT = Split(b"a salt of ours", ("trie", "hybrid"), (1.0, 1.0))


def run(units: float = 3000, timed: float = 100, **treatment: float) -> Counts:
    """An experiment whose treatment has its `tpot`, `ttft`, `errors`, `differing` multiplied or set; `timed` percent of
    the units are of processes that know the TTFT."""
    random = np.random.default_rng(1)
    recorder = Recorder(Origin("a", "1"), 2)
    for unit in range(int(units)):
        assignment = SPLIT.assign("acme", str(unit))
        assert assignment is not None
        change = treatment if assignment.arm else {}
        normal = random.standard_normal(3)
        tokens = int(random.integers(40, 160))
        outcome = Outcome(
            arrived_at=60.0 * unit,
            erred=bool(random.random() < change.get("errors", 0.02)),
            tokens=tokens,
            steps=tokens // 2,
            decode_seconds=tokens * 0.003 * change.get("tpot", 1.0) * math.exp(0.4 * normal[1]),
            ttft_seconds=0.02 * change.get("ttft", 1.0) * math.exp(0.3 * normal[2]) if unit % 100 < timed else None,
            draft_nodes=4 * tokens,
            accepted_tokens=tokens // 2,
        )
        recorder.record(assignment, "acme", str(unit), outcome)
        if random.random() < 0.2:
            recorder.record_audit(assignment, differing=bool(random.random() < change.get("differing", 0.0)))
    return recorder.snapshot().counts


def kinds(found: pb.ExperimentReport) -> list[str]:
    return [pb.ConclusionKind.Name(finding.kind).removeprefix("CONCLUSION_KIND_") for finding in found.conclusions]


def said(found: pb.ExperimentReport) -> str:
    return " ".join(conclusion.text for conclusion in found.conclusions)


def test_a_faster_arm_is_named_with_its_bounds_for_people_and_programs() -> None:
    found = report(SPLIT, run(4000, tpot=0.8), unreadable=2)
    (time,) = [comparison for comparison in found.comparisons if comparison.metric == "decode_seconds_per_token"]
    assert time.verdict == pb.VERDICT_BETTER
    assert time.low < -0.2 < time.high < -0.1
    assert not found.sample_ratio_mismatch
    assert not found.violations
    assert kinds(found)[:2] == ["COUNTS_MISSING", "FASTER"]
    named = found.conclusions[1]
    assert (named.arm, named.metric, found.better_arm) == ("hybrid", "decode_seconds_per_token", "hybrid")
    text = said(found)
    assert "hybrid is faster than trie: decode time per token -" in text
    assert INTERFERENCE in text
    assert [row.arm for row in found.arms] == ["trie", "hybrid"]
    assert sum(row.units for row in found.arms) == 4000
    assert found.arms[0].metrics["tokens_per_step"] == pytest.approx(2.0, abs=0.02)
    assert found.arms[0].metrics["ttft_seconds_p50"] == pytest.approx(0.02, rel=0.1)
    assert {metric.title: metric.key for metric in found.metrics} == KEYS
    for row in found.arms:
        assert {*row.metrics} == {*KEYS.values()}
    assert {comparison.metric for comparison in found.comparisons} == {*KEYS.values()}


def test_keys_are_a_part_of_the_protocol() -> None:
    """One that is renamed breaks programs."""
    times = {f"{name}_seconds_{part}" for name in ("tpot", "ttft") for part in ("p50", "p90")}
    others = {"decode_seconds_per_token", "draft_nodes_per_accepted_token", "tokens_per_step", "ttft_seconds_mean"}
    assert {*KEYS.values()} == times | others


def test_equal_arms_give_no_difference_and_a_slower_one_is_worse() -> None:
    found = report(SPLIT, run())
    assert all(comparison.verdict == pb.VERDICT_OPEN for comparison in found.comparisons)
    assert "no difference is shown" in said(found)
    assert "may stop now" not in said(found)
    slower = report(SPLIT, run(4000, tpot=1.3))
    assert "hybrid is slower than trie" in said(slower)
    assert "may stop now" in said(slower)
    assert [kinds(one)[0] for one in (found, slower)] == ["NO_DIFFERENCE", "SLOWER"]


def test_too_few_units_say_nothing() -> None:
    found, empty = report(SPLIT, run(120, tpot=0.2)), report(SPLIT, Counts.zero(2))
    assert found.conclusions[0].text.startswith("Too early: every arm needs 100 units")
    assert {one.HasField("low") for one in found.comparisons if one.metric == "decode_seconds_per_token"} == {False}
    assert kinds(empty) == ["TOO_EARLY"]
    assert not empty.arms[0].metrics


def test_lost_units_forbid_any_conclusion() -> None:
    counts = run(4000, tpot=0.5)
    kept = np.arange(BUCKETS) % 4 > 0
    counts.sums[1] *= kept[:, None]
    found = report(SPLIT, counts)
    assert found.sample_ratio_mismatch
    assert found.conclusions[0].text.startswith("Nothing may be concluded: the units (trie ")
    assert kinds(found) == ["SAMPLE_RATIO_MISMATCH"]


@pytest.mark.parametrize(
    ("treatment", "guardrail", "reason"),
    [
        ({"errors": 0.1}, "errors", "units had errors"),
        ({"ttft": 1.4}, "ttft", "longer; 10% is allowed"),
        ({"differing": 0.2}, "differing", "audited answers differ; 0.10% is allowed"),
    ],
)
def test_an_arm_beyond_a_limit_is_stopped_and_no_better_one(
    treatment: dict[str, float], guardrail: str, reason: str
) -> None:
    counts = run(**treatment)
    (found,) = violations(SPLIT, counts)
    assert (found.arm, found.guardrail) == ("hybrid", guardrail)
    assert reason in found.reason
    (stop,) = [finding for finding in report(SPLIT, counts).conclusions if finding.kind == pb.CONCLUSION_KIND_GUARDRAIL]
    assert stop.arm == "hybrid"
    assert stop.text.startswith(f"Stop hybrid ({guardrail}): ")


def test_better_arms_are_not_stopped() -> None:
    assert violations(SPLIT, run(errors=0.0, ttft=0.5)) == []


@pytest.mark.system
def test_guardrails_looked_at_often_stop_few_equal_arms() -> None:
    """Errors at one percent in both arms, 60 looks each, 200 experiments: at most alpha of them are stopped."""
    random = np.random.default_rng(9)
    stopped = 0
    for _ in range(200):
        counts = Counts.zero(2)
        raised = False
        for _ in range(60):
            arm = random.integers(2, size=50)
            units = np.bincount(arm, minlength=2)
            counts.sums[:, 0, column("units")] += units
            counts.sums[:, 0, column("erred_units")] += random.binomial(units, 0.05)
            raised |= any(violation.guardrail == "errors" for violation in violations(SPLIT, counts))
        stopped += raised
    assert stopped <= 7  # P(Binomial(200, 0.01) > 7) is below 0.001


@pytest.mark.parametrize("values", [{"alpha": 0.0}, {"differing": 1.0}, {"slower_ttft": -0.1}])
def test_limits_out_of_range_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        Limits(**values)


def test_answers_without_a_ttft_neither_move_it_nor_make_it_too_sure() -> None:
    """Some engines do not know when a request arrived: its mean is that of the others."""
    times = [
        [row for row in report(SPLIT, run(4000, timed=timed)).comparisons if row.metric == "ttft_seconds_mean"]
        for timed in (100, 50, 3)
    ]
    (everything,), (half,), (few,) = times
    assert abs(half.change - everything.change) < 0.03
    assert half.high - half.low > 1.2 * (everything.high - everything.low) > 0
    assert [few.HasField(bound) for bound in ("low", "high")] == [False, False]  # sixty in an arm
    values = [row.metrics["ttft_seconds_mean"] for row in report(SPLIT, run(4000, timed=50)).arms]
    assert values == pytest.approx([0.0209, 0.0209], abs=0.001)
    found = report(SPLIT, run(4000, timed=50, ttft=1.5)).violations
    assert [(one.arm, one.guardrail) for one in found] == [("hybrid", "ttft")]


ARRIVED = time.perf_counter() - 100


def sample(tokens: int, steps: int, first: float, last: float) -> Sample:
    request = Request(request_id="r", prompt=np.arange(7, dtype=np.int32), stop=StopParams(99), arrived_at=ARRIVED)
    stats = SequenceStats(
        arrived_at=ARRIVED,
        first_token_at=ARRIVED + first,
        finished_at=ARRIVED + last,
        decode_steps=steps,
        draft_tokens=12,
        accepted_tokens=5,
    )
    return Sample(request, tokens, stats)


def test_times_and_tokens_are_those_after_the_first_of_each_sample() -> None:
    found = outcome_of("stop", [sample(21, 11, 0.5, 2.5), sample(11, 6, 0.25, 1.25)], ARRIVED)
    assert found is not None
    assert (found.tokens, found.steps) == (30, 15)
    assert (found.decode_seconds, found.ttft_seconds) == pytest.approx((3.0, 0.25))
    assert (found.draft_nodes, found.accepted_tokens, found.erred) == (24, 10, False)
    assert found.arrived_at == pytest.approx(time.time() - (time.perf_counter() - ARRIVED), abs=0.5)


def test_errors_that_an_arm_may_cause_count_and_no_other_ends() -> None:
    for result in ("internal", "model_failed", "engine_stopped", "deadline_exceeded"):
        found = outcome_of(result, [sample(3, 2, 0.5, 0.0)], ARRIVED)
        assert found is not None, result
        assert (found.erred, found.tokens, found.decode_seconds) == (True, 0, 0.0)
        assert outcome_of(result, [], ARRIVED) is None  # it was not read
    for result in ("cancelled", "invalid_value", "queue_full", "reader_stalled", "shutting_down", "quota_exceeded"):
        assert outcome_of(result, [sample(3, 2, 0.5, 0.0)], ARRIVED) is None, result
