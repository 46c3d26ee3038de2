"""The algorithm as SGLang's registry, plug-in loader and resolution of arguments see it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tests.sglang.harness import registered, server_args

pytestmark = pytest.mark.sglang

_RESOLVED = (
    "max_running_requests",
    "enable_mixed_chunk",
    "speculative_eagle_topk",
    "speculative_num_steps",
    "speculative_num_draft_tokens",
    "disable_overlap_schedule",
    "page_size",
    "attention_backend",
)


def test_sglang_finds_the_plug_in_and_its_algorithm() -> None:
    from sglang.srt.plugins import load_plugins_by_group

    from draftwood_sglang import worker

    assert load_plugins_by_group("sglang.srt.plugins")["draftwood"] == (worker.register, "draftwood-sglang")
    registered()
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    found = SpeculativeAlgorithm.from_string("draftwood")
    assert found.is_ngram()
    assert found.supports_overlap
    assert not found.has_draft_kv()
    assert found.has_draft_kv() == SpeculativeAlgorithm.NGRAM.has_draft_kv()


@pytest.mark.parametrize("nodes", [None, 16])
@pytest.mark.parametrize("given", [{}, {"max_running_requests": 7, "speculative_ngram_max_bfs_breadth": 4}])
def test_arguments_are_resolved_as_those_of_sglangs_own_n_gram_drafts(nodes: int | None, given: dict[str, Any]) -> None:
    from sglang.srt.arg_groups.overrides import resolved_view

    ours, theirs = (resolved_view(server_args(name, nodes, **given)) for name in ("DRAFTWOOD", "NGRAM"))
    assert [getattr(ours, name) for name in _RESOLVED] == [getattr(theirs, name) for name in _RESOLVED]
    assert not ours.disable_overlap_schedule


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pp_size": 2}, "DRAFTWOOD needs --pipeline-parallel-size 1, not 2"),
        ({"nodes": 1}, "DRAFTWOOD needs --speculative-num-draft-tokens of at least 2, not 1"),
        ({"speculative_ngram_external_corpus_path": "x"}, "takes no --speculative-ngram-external-corpus-path"),
        ({"page_size": 16, "attention_backend": "triton"}, "is unstable and produces incorrect results"),
    ],
)
def test_arguments_that_do_not_go_with_it_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        server_args(**given)


def test_an_unknown_version_is_told_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    from sglang.srt.speculative import spec_registry
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from draftwood_sglang import worker

    registry: dict[str, Any] = {}
    monkeypatch.setattr(spec_registry, "_REGISTRY", registry)
    other = tmp_path / "ngram_worker.py"
    other.write_text("class NGRAMWorker:\n    def clear_cache_pool(self): ...\n    def __init__(self): NgramCorpus()\n")
    monkeypatch.setattr(worker, "find_spec", lambda name: SimpleNamespace(origin=str(other)))
    with caplog.at_level(logging.WARNING, "draftwood"):
        worker.register()
    assert "SGLang 0.5.23 has no NGRAMWorker._prepare_draft_tokens; version 0.5.23 has" in caplog.text
    assert registry == {}
    caplog.clear()
    monkeypatch.delattr(SpeculativeAlgorithm, "register")
    monkeypatch.undo()
    monkeypatch.setattr(spec_registry, "_REGISTRY", registry)
    monkeypatch.setattr(worker, "_missing", lambda: 1 / 0)
    worker.register()  # never raises
    assert "cannot register the algorithm DRAFTWOOD" in caplog.text
    assert registry == {}
