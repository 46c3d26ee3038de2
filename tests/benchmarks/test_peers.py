"""Peers for tests: small programs that speak the protocol, or break it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest

from draftwood_benchmarks.closed_loop import Window
from draftwood_benchmarks.peers import llama_cpp_peer, process, serve_peer
from draftwood_benchmarks.peers.llama_cpp_peer import Engine
from draftwood_benchmarks.peers.process import PeerError, PeerModel, drafts_of, running_peer
from draftwood_model_runner.errors import InvalidInputError, ModelNotFoundError
from tests.benchmarks.conftest import ECHO, UsePeer

SERVER = f"""#!{sys.executable}
import json, os, socketserver, sys
from http.server import BaseHTTPRequestHandler

options = dict(zip(sys.argv, sys.argv[1:]))
if options["--model"] == "broken.gguf":
    sys.exit("unknown model architecture")
asked = 0


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        global asked
        asked += 1
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["cache_prompt"] is False and body["temperature"] == 0.0
        if body["prompt"] == [0]:
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b"the request exceeds the available context size")
            return
        self.send_response(200)
        self.end_headers()
        tokens = [asked, *body["prompt"]][: body["n_predict"]]
        accepted = int(len(tokens) > 1)
        timings = {{"predicted_n": len(tokens), "draft_n": 4, "draft_n_accepted": accepted}}
        if not body["stream"]:
            self.wfile.write(json.dumps({{"tokens": tokens, "timings": timings}}).encode())
            return
        for i, token in enumerate(tokens):
            part = {{"tokens": [token], "timings": {{"predicted_n": i + 1, "draft_n_accepted": min(i, accepted)}}}}
            self.wfile.write(b"data: " + json.dumps(part).encode() + b"\\n\\n")
        self.wfile.write(b"data: " + json.dumps({{"tokens": [], "timings": timings}}).encode() + b"\\n\\n")


class Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


Handler.address_string = lambda self: ""
with Server(options["--host"], Handler) as server:
    server.serve_forever()
"""
MODEL = PeerModel("folder", "float32", 1)
REQUEST = {"gguf": "model.gguf", "threads": 2, "streams": 2, "drafts": "none"}


@pytest.fixture
def request_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    program = tmp_path / "llama-server"
    program.write_text(SERVER)
    program.chmod(0o755)
    monkeypatch.setattr(llama_cpp_peer, "_binary", lambda: (program, "1"))
    with TemporaryDirectory() as folder:  # a path that is short enough for a socket
        yield REQUEST | {"folder": folder}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The servers that were started; those that live are ended."""
    processes: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def noting(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        processes.append(popen(*args, **options))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", noting)
    yield processes
    for started in processes:
        started.kill()
        started.wait()


def test_answers_and_windows(request_of: dict[str, Any], started: list[subprocess.Popen[bytes]]) -> None:
    engine = Engine(request_of)
    answer = engine.generate([7, 8, 9], 3)
    assert (answer["tokens"], answer["steps"]) == ([1, 7, 8], 2)
    window = serve_peer.load_test(engine, [[5, 6]], 3, streams=2, seconds=0.3)
    requests = window["requests"]
    assert 0.3 <= window["seconds"] < 60
    assert all(first == 1 and 1 <= tokens <= 3 and ttft > 0 for ttft, _, first, tokens in requests)
    assert sum(tokens for *_, tokens in requests) >= window["tokens"] > window["steps"] > 0
    with pytest.raises(RuntimeError, match="llama-server answered 400: the request exceeds the available context"):
        engine.generate([0], 3)
    with pytest.raises(RuntimeError, match="answered 400"):
        serve_peer.load_test(engine, [[0]], 3, streams=2, seconds=0.3)
    assert len(started) == 1


def test_each_memory_has_a_server_of_its_own(
    request_of: dict[str, Any], started: list[subprocess.Popen[bytes]]
) -> None:
    engine = Engine(request_of | {"drafts": "ngram-mod"})
    serve_peer.learn(engine, [[5], [6]], 2, "warm 0")
    asked = [engine.generate([7], 1, memory)["tokens"][0] for memory in ("warm 0", "cold 0", "warm 0", "cold 0")]
    assert asked == [3, 1, 4, 2]
    assert serve_peer.load_test(engine, [[5], [6]], 2, 1, 60.0, "window")["tokens"] == 4
    assert [process.poll() is None for process in started] == [False, False, True, True]


def test_a_server_that_ends_is_reported_with_its_last_lines(
    request_of: dict[str, Any], started: list[subprocess.Popen[bytes]]
) -> None:
    with pytest.raises(RuntimeError, match="ended with status 1: unknown model architecture"):
        Engine(request_of | {"gguf": "broken.gguf"})


def test_llama_cpp_needs_a_gguf_file(use_peer: UsePeer, tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    for named in (None, str(tmp_path), "someone/model"):
        with (
            pytest.raises(InvalidInputError, match=r"--peer.*llama\.cpp.*it computes GGUF files"),
            running_peer("llama.cpp", replace(MODEL, gguf=named)),
        ):
            pass
    with (
        pytest.raises(ModelNotFoundError, match=r"missing\.gguf.*no such file"),
        running_peer("llama.cpp", replace(MODEL, gguf="missing.gguf")),
    ):
        pass
    file = tmp_path / "some.gguf"
    file.touch()
    use_peer("import json, sys\nprint(json.dumps({'version': json.loads(sys.stdin.readline())['gguf']}), flush=True)")
    with running_peer("llama.cpp", replace(MODEL, gguf=str(file))) as peer:
        assert peer.version == str(file)


def test_a_peer_is_told_the_data_types_and_answers_prompts_and_load_tests(use_peer: UsePeer) -> None:
    use_peer(ECHO)
    with running_peer("openvino-genai", replace(MODEL, dtype="bfloat16", weights="int8")) as peer:
        assert peer.version == "bfloat16 int8"
        assert peer.generate([5, 6, 7], 2) == ([5, 6], 0.5, 2, 0)
        assert peer.load_test([[1], [2]], 8, streams=3, seconds=1.5) == Window(1.5, 6, steps=6)


class StepByStep:
    """Writes a token for each of its requests in each step."""

    version = "1"

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.asked: list[tuple[list[int], str]] = []

    def use(self, memory: str) -> None:
        assert not self.left, "requests of another memory are running"

    def add(self, prompt: list[int], max_tokens: int, memory: str) -> str:
        self.asked.append((prompt, memory))
        self.left[str(len(self.asked))] = max_tokens
        return str(len(self.asked))

    def step(self) -> Iterator[tuple[str, list[int], bool]]:
        for request in [*self.left]:
            self.left[request] -= 1
            ended = not self.left[request]
            if ended:
                del self.left[request]
            yield request, [7], ended

    def abort(self, requests: Iterable[str]) -> None:
        for request in requests:
            del self.left[request]


def test_an_engine_of_steps_is_asked_by_the_program_that_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = StepByStep()
    answer = serve_peer.generate(engine, [1], 3)
    assert (answer["tokens"], answer["steps"]) == ([7, 7, 7], 3)
    serve_peer.learn(engine, [[1], [2]], 2, "warm")
    window = serve_peer.load_test(
        engine, [[1], [2], [3]], 3, 2, 60.0, "warm"
    )  # ends when fewer prompts than streams are left
    assert (window["tokens"], window["steps"], window["seconds"] < 60) == (6, 6, True)
    assert [(first, tokens) for _, _, first, tokens in window["requests"]] == [(1, 3), (1, 3), (1, 1)]
    assert [memory for _, memory in engine.asked] == ["", *["warm"] * 5]
    monkeypatch.setattr(serve_peer, "time", SimpleNamespace(perf_counter=count(0.0, 0.001).__next__))
    window = serve_peer.load_test(engine, [[1], [2]], 3, 2, 0.1)
    assert len(window["requests"]) > 2, "prompts come again where nothing is remembered"
    assert not engine.left


def test_a_missing_environment_names_the_command_that_makes_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process, "ENVIRONMENTS", tmp_path)
    (tmp_path / "model.gguf").touch()
    model = replace(MODEL, gguf=str(tmp_path / "model.gguf"))
    for name in process.MODULES:
        with pytest.raises(PeerError, match="python is missing; run `make peers`"), running_peer(name, model):
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


LOADED = """print('{"version": 1}', flush=True)"""


@pytest.mark.parametrize(
    ("program", "timeout", "message"),
    [
        ("input()\nraise SystemExit('no memory')", 60, "ended with status 1\nno memory"),
        ("input()\ninput()", 0.5, "no answer to load within 0.5 s"),
        (
            f"input()\n{LOADED}\ninput()\nprint('Loading...')",
            60,
            "its answer to generate is no JSON object: 'Loading...'",
        ),
        (f"input()\n{LOADED}\ninput()\nprint('[1]')", 60, "its answer to generate is no JSON object"),
        (f'input()\n{LOADED}\ninput()\nprint(\'{{"error": "bad prompt"}}\')', 60, "generate failed: bad prompt"),
    ],
)
def test_what_a_peer_does_wrong_is_told(program: str, timeout: float, message: str, use_peer: UsePeer) -> None:
    use_peer(program)
    with pytest.raises(PeerError) as raised, running_peer("openvino-genai", MODEL, timeout=timeout) as peer:
        peer.generate([1], 1)
    assert message in str(raised.value)
