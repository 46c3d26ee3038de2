"""The protocol with a peer, and its failures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from draftwood_benchmarks.peers import process
from draftwood_benchmarks.peers.process import PeerError, PeerModel, drafts_of, running_peer
from draftwood_model_runner.errors import InvalidInputError
from tests.benchmarks.peers.fake import ANSWER_LOAD, ECHO, UsePeer

MODEL = PeerModel("folder", "float32", 1)


def test_a_peer_answers_prompts_and_load_tests(use_peer: UsePeer) -> None:
    use_peer(ECHO)
    with running_peer("openvino-genai", MODEL) as peer:
        assert peer.version == "1"
        assert peer.generate([5, 6, 7], 2) == ([5, 6], 0.5, 2)
        assert peer.load_test([[1], [2]], 8, streams=3, seconds=1.5) == (6, 1.5, 6, [])


def test_a_peer_is_told_the_data_types(use_peer: UsePeer) -> None:
    use_peer(ANSWER_LOAD)
    with running_peer("openvino-genai", PeerModel("folder", "bfloat16", 1, weights="int8")) as peer:
        assert peer.version == "bfloat16 int8"


def test_a_missing_environment_names_the_command_that_makes_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process, "ENVIRONMENTS", tmp_path)
    (tmp_path / "model.gguf").touch()
    model = replace(MODEL, gguf=str(tmp_path / "model.gguf"))
    for name in process.MODULES:
        with pytest.raises(PeerError, match="python is missing; run `make peers`"), running_peer(name, model):
            pass


def test_a_peer_that_dies_is_reported_with_its_status_and_last_lines(use_peer: UsePeer) -> None:
    use_peer("import sys\nsys.stdin.readline()\nsys.exit('no memory')")
    with pytest.raises(PeerError, match="ended with status 1\\nno memory"), running_peer("openvino-genai", MODEL):
        pass


def test_each_peer_drafts_with_what_it_has() -> None:
    assert drafts_of([], []) == []
    assert drafts_of(["vllm", "llama.cpp", "vllm"], []) == [("vllm", "none"), ("llama.cpp", "none")]
    assert drafts_of(["openvino-genai", "llama.cpp"], ["none", "ngram-mod", "none"]) == [
        ("openvino-genai", "none"), ("llama.cpp", "none"), ("llama.cpp", "ngram-mod"),
    ]  # fmt: skip
    assert drafts_of(["vllm", "openvino-genai"], ["suffix"]) == [("vllm", "suffix"), ("openvino-genai", "none")]
    with pytest.raises(InvalidInputError, match=r"ngram-mod.*must be one of none, ngram, suffix, draftwood with"):
        drafts_of(["vllm"], ["ngram-mod"])
    with pytest.raises(InvalidInputError, match=r"--peer.*ollama.*must be one of openvino-genai, vllm, llama\.cpp"):
        drafts_of(["ollama"], [])


def test_a_peer_that_hangs_is_given_up(use_peer: UsePeer) -> None:
    use_peer("import sys\nsys.stdin.readline()\nsys.stdin.readline()")
    with (
        pytest.raises(PeerError, match=r"no answer to load within 0.2 s"),
        running_peer("openvino-genai", MODEL, timeout=0.2),
    ):
        pass


def test_a_malformed_answer_is_an_error(use_peer: UsePeer) -> None:
    for answer, message in (
        ("Loading...", "its answer to generate is no JSON object: 'Loading...'"),
        ("[1]", "its answer to generate is no JSON object"),
        ('{"error": "bad prompt"}', "generate failed: bad prompt"),
    ):
        use_peer(f"{ANSWER_LOAD}for line in sys.stdin:\n    print({answer!r}, flush=True)")
        with running_peer("openvino-genai", MODEL) as peer, pytest.raises(PeerError) as raised:
            peer.generate([1], 1)
        assert message in str(raised.value)
