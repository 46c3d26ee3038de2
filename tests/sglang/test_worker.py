"""The worker when something fails, and its ranks."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.sglang.harness import TEXT, answered, drafted, learn_for

pytestmark = pytest.mark.sglang


def test_requests_tenants_and_their_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.sglang.harness import running_worker

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
    from tests.sglang.harness import request, running_worker

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
    from tests.sglang.harness import finish, request, running_worker

    with running_worker(monkeypatch) as worker:
        learn_for(worker, "acme")
        corpus = worker.ngram_corpus
        for name, most, stops in (("stop", 64, {TEXT[12]}), ("most", 7, None)):
            req = request(name, TEXT[:6], most, draftwood_tenant="acme")
            req.eos_token_ids = stops
            drafted(worker, req, TEXT[6:10])
            drafted(worker, req, [*TEXT[10:13], 3, 3])
            drafted(worker, req, [3, 3])
            session = corpus.drafts.sessions[corpus._texts[name].key]
            assert np.concatenate(session.output).tolist() == TEXT[6:13]
            finish(req, 7)
            assert corpus.output_of(corpus._texts[name].key).tolist() == TEXT[6:13]
        req = request("last", TEXT[:6], draftwood_tenant="acme")
        drafted(worker, req, TEXT[6:10])
        req.output_ids.extend(TEXT[10:20])  # of its last step, after which none is prepared
        finish(req)
        assert corpus.output_of(corpus._texts["last"].key).tolist() == TEXT[6:20]


def test_drafting_that_raises_costs_drafts_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.sglang.harness import running_worker

    def fail(rows: Any) -> Any:
        raise RuntimeError("broken")

    with running_worker(monkeypatch) as worker:
        learn_for(worker, "acme")
        assert answered(worker, "1", draftwood_tenant="acme") == 0
        drafts = worker.ngram_corpus.drafts
        with monkeypatch.context() as patch:
            patch.setattr(drafts, "step", fail)
            assert answered(worker, "2", draftwood_tenant="acme") == 0
        assert worker.ngram_corpus.drafts is None
        assert "SGLang goes on without drafts of Draftwood: 3 in a row raised" in caplog.text


@pytest.mark.parametrize("value", ["nonsense://", "redis://127.0.0.1:9"])
def test_a_wrong_setting_or_a_store_that_is_down_stops_nothing(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    from tests.sglang.harness import running_worker

    monkeypatch.setenv("DRAFTWOOD_STORE", value)
    with running_worker(monkeypatch) as worker:
        answered(worker, "1", draftwood_tenant="acme")
        assert (worker.ngram_corpus.drafts is None) == value.startswith("nonsense")


def test_tokens_outside_the_vocabulary_are_notdrafted(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.sglang.harness import VOCABULARY, running_worker

    strange = [*TEXT[:20], VOCABULARY + 5, *TEXT[20:]]  # as those of padded images
    with running_worker(monkeypatch) as worker:
        learn_for(worker, "acme")
        for name in "123":
            answered(worker, name, strange, draftwood_tenant="acme")
        assert worker.ngram_corpus.drafts is not None


def test_ranks_of_tensor_parallelism_have_the_trees_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank drafts nothing, see `_Drafting.__init__`; its trees are replaced by what the first one sends."""
    from tests.sglang.harness import prepared, request, running_worker

    def send(tensor: Any, src: int, group: str) -> None:
        assert (src, group) == (4, "of the CPU")
        sent.append(tensor.clone())

    def receive(tensor: Any, src: int, group: str) -> None:
        tensor.copy_(sent.pop(0))

    sent: list[Any] = []
    with running_worker(monkeypatch) as first, running_worker(monkeypatch) as second:
        learn_for(first, "acme")
        assert answered(first, "1", draftwood_tenant="acme") == 0
        second.ngram_corpus.drafts = None
        found = []
        for worker, broadcast in ((first, send), (second, receive)):
            worker._group = SimpleNamespace(ranks=[4, 5], cpu_group="of the CPU")
            monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
            req = request("2", TEXT[:6], draftwood_tenant="acme")
            info = prepared(worker, [req], [TEXT[6:10]]).spec_info
            found.append((info.draft_token.tolist(), info.custom_mask.tolist()))
    assert found[0] == found[1]
    assert found[0][0][1:4] == TEXT[10:13]
