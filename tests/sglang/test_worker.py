"""The worker and its requests, and when something fails."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.sglang.harness import TEXT, VOCABULARY, answered, drafted, finish, learn_for, request, running_worker

pytestmark = pytest.mark.sglang


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """With the memories of three tenants, which are empty."""
    with running_worker(monkeypatch) as made:
        learn_for(made, "acme", "other", "default")
        yield made


def test_requests_tenants_and_their_switches(worker: Any) -> None:
    assert answered(worker, "1", draftwood_tenant="acme") == 0
    assert answered(worker, "1", draftwood_tenant="acme") > 20  # the same id, another request
    assert answered(worker, "2", draftwood_tenant="other") == 0
    assert answered(worker, "3", draftwood_tenant="acme", draftwood="off") == 0
    assert answered(worker, "4", draftwood_tenant=7) == 0
    assert answered(worker, "5") == 0
    assert answered(worker, "6") > 20  # of the tenant "default", where neither tenant nor store is set
    worker.clear_cache_pool()  # what SGLang's /flush_cache does; answers of tenants are no cache of it
    assert answered(worker, "7", draftwood_tenant="acme") > 20


def test_a_request_that_was_preempted_or_taken_back_goes_on(worker: Any) -> None:
    assert answered(worker, "1", draftwood_tenant="acme") == 0
    req = request("2", TEXT[:6], draftwood_tenant="acme")
    assert len(drafted(worker, req, TEXT[6:9])) > 3
    worker.ngram_corpus.erase_match_state(["2"])
    [key] = worker.ngram_corpus.drafts.sessions
    assert worker.ngram_corpus.is_live(key)
    assert drafted(worker, req, TEXT[9:12])[:3] == TEXT[12:15]
    assert [*worker.ngram_corpus.drafts.sessions] == [key]
    del req.output_ids[2:]
    assert drafted(worker, req, [TEXT[8]])[:3] == TEXT[9:12]
    worker.ngram_corpus.erase_match_state(["2"])
    gone = weakref.ref(req)
    del req
    assert gone() is None  # aborted while it waits: SGLang drops it, and so do we
    assert not worker.ngram_corpus.is_live(key)


@pytest.mark.parametrize(("most", "stops"), [(64, {TEXT[12]}), (7, None)], ids=["at a stop token", "at its length"])
def test_tokens_behind_the_end_of_an_answer_are_not_learned(worker: Any, most: int, stops: set[int] | None) -> None:
    corpus = worker.ngram_corpus
    req = request("1", TEXT[:6], most, draftwood_tenant="acme")
    req.eos_token_ids = stops
    drafted(worker, req, TEXT[6:10])
    drafted(worker, req, [*TEXT[10:13], 3, 3])
    drafted(worker, req, [3, 3])
    key = corpus._histories["1"].key
    assert np.concatenate(corpus.drafts.sessions[key].output).tolist() == TEXT[6:13]
    finish(req, 7)
    assert corpus.output_of(key).tolist() == TEXT[6:13]


def test_tokens_of_the_last_step_are_learned(worker: Any) -> None:
    """After it, none is prepared."""
    req = request("last", TEXT[:6], draftwood_tenant="acme")
    drafted(worker, req, TEXT[6:10])
    req.output_ids.extend(TEXT[10:20])
    finish(req)
    assert worker.ngram_corpus.output_of(worker.ngram_corpus._histories["last"].key).tolist() == TEXT[6:20]


def test_drafting_that_raises_costs_drafts_alone(
    worker: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert answered(worker, "1", draftwood_tenant="acme") == 0
    monkeypatch.setattr("draftwood_memory.engines.drafts.PAUSE_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(worker.ngram_corpus.drafts, "step", None)
        assert answered(worker, "2", draftwood_tenant="acme") == 0
    assert "nothing is drafted for 0 s, since 3 steps in a row failed" in caplog.text
    assert answered(worker, "3", draftwood_tenant="acme") > 0


@pytest.mark.parametrize("value", ["nonsense://", "redis://127.0.0.1:9"])
def test_a_wrong_setting_or_a_store_that_is_down_stops_nothing(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("DRAFTWOOD_STORE", value)
    with running_worker(monkeypatch) as worker:
        answered(worker, "1", draftwood_tenant="acme")
        assert (worker.ngram_corpus.drafts is None) == value.startswith("nonsense")


def test_tokens_outside_the_vocabulary_are_not_drafted_and_cost_others_nothing(worker: Any) -> None:
    strange = [*TEXT[:20], VOCABULARY + 5, *TEXT[20:]]  # as those of padded images
    for name in "12":
        answered(worker, name, strange, draftwood_tenant="acme")
    req = request("3", strange[:6], draftwood_tenant="acme")
    drafts = [drafted(worker, req, [token]) for token in strange[6:40]]
    assert all(token < VOCABULARY for draft in drafts for token in draft)
    assert answered(worker, "4", draftwood_tenant="other") == 0
    assert answered(worker, "5", draftwood_tenant="other") > 20
