"""The worker and its requests, and when something fails."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

from tests.sglang.harness import TEXT, VOCABULARY, answered, drafted, finish, learn_for, request, running_worker

pytestmark = pytest.mark.sglang


def test_requests_tenants_and_their_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_worker(monkeypatch) as worker:
        learn_for(worker, "acme", "other", "default")
        assert answered(worker, "1", draftwood_tenant="acme") == 0
        assert answered(worker, "1", draftwood_tenant="acme") > 20  # the same id, another request
        assert answered(worker, "2", draftwood_tenant="other") == 0
        assert answered(worker, "3", draftwood_tenant="acme", draftwood="off") == 0
        assert answered(worker, "4", draftwood_tenant=7) == 0
        assert answered(worker, "5") == 0
        assert answered(worker, "6") > 20  # of the tenant "default", where neither tenant nor store is set
        worker.clear_cache_pool()  # what SGLang's /flush_cache does; answers of tenants are no cache of it
        assert answered(worker, "7", draftwood_tenant="acme") > 20


def test_a_request_that_was_preempted_or_taken_back_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_worker(monkeypatch) as worker:
        learn_for(worker, "acme")
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


def test_tokens_behind_the_end_of_an_answer_are_not_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_worker(monkeypatch) as worker:
        learn_for(worker, "acme")
        corpus = worker.ngram_corpus
        for name, most, stops in (("stop", 64, {TEXT[12]}), ("most", 7, None)):
            req = request(name, TEXT[:6], most, draftwood_tenant="acme")
            req.eos_token_ids = stops
            drafted(worker, req, TEXT[6:10])
            drafted(worker, req, [*TEXT[10:13], 3, 3])
            drafted(worker, req, [3, 3])
            session = corpus.drafts.sessions[corpus._histories[name].key]
            assert np.concatenate(session.output).tolist() == TEXT[6:13]
            finish(req, 7)
            assert corpus.output_of(corpus._histories[name].key).tolist() == TEXT[6:13]
        req = request("last", TEXT[:6], draftwood_tenant="acme")
        drafted(worker, req, TEXT[6:10])
        req.output_ids.extend(TEXT[10:20])  # of its last step, after which none is prepared
        finish(req)
        assert corpus.output_of(corpus._histories["last"].key).tolist() == TEXT[6:20]


def test_drafting_that_raises_costs_drafts_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(rows: Any) -> Any:
        raise RuntimeError("broken")

    with running_worker(monkeypatch) as worker:
        learn_for(worker, "acme")
        assert answered(worker, "1", draftwood_tenant="acme") == 0
        drafts = worker.ngram_corpus.drafts
        monkeypatch.setattr("draftwood_memory.engines.drafts.PAUSE_SECONDS", 0.0)
        with monkeypatch.context() as patch:
            patch.setattr(drafts, "step", fail)
            assert answered(worker, "2", draftwood_tenant="acme") == 0
        assert "nothing is drafted for 0 s, since 3 steps in a row failed" in caplog.text
        assert answered(worker, "3", draftwood_tenant="acme") > 0


@pytest.mark.parametrize("value", ["nonsense://", "redis://127.0.0.1:9"])
def test_a_wrong_setting_or_a_store_that_is_down_stops_nothing(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("DRAFTWOOD_STORE", value)
    with running_worker(monkeypatch) as worker:
        answered(worker, "1", draftwood_tenant="acme")
        assert (worker.ngram_corpus.drafts is None) == value.startswith("nonsense")


def test_tokens_outside_the_vocabulary_are_notdrafted(monkeypatch: pytest.MonkeyPatch) -> None:
    strange = [*TEXT[:20], VOCABULARY + 5, *TEXT[20:]]  # as those of padded images
    with running_worker(monkeypatch) as worker:
        learn_for(worker, "acme")
        for name in "123":
            answered(worker, name, strange, draftwood_tenant="acme")
        assert worker.ngram_corpus.drafts is not None
