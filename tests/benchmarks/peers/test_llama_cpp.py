"""llama.cpp as a peer, with a program in place of its server that answers as that does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from draftwood_benchmarks.peers import llama_cpp_peer
from draftwood_benchmarks.peers.llama_cpp_peer import Engine
from draftwood_benchmarks.peers.process import PeerModel, running_peer
from draftwood_model_runner.errors import InvalidInputError, ModelNotFoundError
from tests.benchmarks.peers.fake import UsePeer

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
        timings = {{"predicted_n": len(tokens), "draft_n": 4, "draft_n_accepted": 1}}
        if not body["stream"]:
            self.wfile.write(json.dumps({{"tokens": tokens, "timings": timings}}).encode())
            return
        for i, token in enumerate(tokens):
            part = {{"tokens": [token], "timings": {{"predicted_n": i + 1}}}}
            self.wfile.write(b"data: " + json.dumps(part).encode() + b"\\n\\n")
        self.wfile.write(b"data: " + json.dumps({{"tokens": [], "timings": timings}}).encode() + b"\\n\\n")


class Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


Handler.address_string = lambda self: ""
with Server(options["--host"], Handler) as server:
    server.serve_forever()
"""
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
    for process in processes:
        process.kill()
        process.wait()


def test_answers_and_windows(request_of: dict[str, Any], started: list[subprocess.Popen[bytes]]) -> None:
    engine = Engine(request_of)
    answer = engine.generate([7, 8, 9], 3)
    assert (answer["tokens"], answer["steps"]) == ([1, 7, 8], 2)
    window = engine.load_test([[5, 6]], 3, streams=2, seconds=0.3)
    requests = window["requests"]
    assert window["seconds"] == pytest.approx(0.3)
    assert all(first == 1 and 1 <= tokens <= 3 and ttft > 0 for ttft, _, first, tokens in requests)
    assert sum(tokens for *_, tokens in requests) >= window["tokens"] > window["steps"] > 0
    with pytest.raises(RuntimeError, match="llama-server answered 400: the request exceeds the available context"):
        engine.generate([0], 3)
    with pytest.raises(RuntimeError, match="answered 400"):
        engine.load_test([[0]], 3, streams=2, seconds=0.3)
    assert len(started) == 1


def test_each_memory_has_a_server_of_its_own(
    request_of: dict[str, Any], started: list[subprocess.Popen[bytes]]
) -> None:
    engine = Engine(request_of | {"drafts": "ngram-mod"})
    engine.learn([[5], [6]], 2, "warm 0")
    asked = [engine.generate([7], 1, memory)["tokens"][0] for memory in ("warm 0", "cold 0", "warm 0", "cold 0")]
    assert asked == [3, 1, 4, 2]
    assert engine.load_test([[5], [6]], 2, 1, 60.0, "window")["tokens"] == 4
    assert [process.poll() is None for process in started] == [False, False, True, True]


def test_a_server_that_ends_is_reported_with_its_last_lines(
    request_of: dict[str, Any], started: list[subprocess.Popen[bytes]]
) -> None:
    with pytest.raises(RuntimeError, match="ended with status 1: unknown model architecture"):
        Engine(request_of | {"gguf": "broken.gguf"})


def test_llama_cpp_needs_a_gguf_file(use_peer: UsePeer, tmp_path: Path) -> None:
    model = PeerModel("folder", "float32", 1)
    (tmp_path / "config.json").touch()
    for named in (None, str(tmp_path), "someone/model"):
        with (
            pytest.raises(InvalidInputError, match=r"--peer.*llama\.cpp.*it computes GGUF files"),
            running_peer("llama.cpp", replace(model, gguf=named)),
        ):
            pass
    with (
        pytest.raises(ModelNotFoundError, match=r"missing\.gguf.*no such file"),
        running_peer("llama.cpp", replace(model, gguf="missing.gguf")),
    ):
        pass
    file = tmp_path / "some.gguf"
    file.touch()
    use_peer("import json, sys\nprint(json.dumps({'version': json.loads(sys.stdin.readline())['gguf']}), flush=True)")
    with running_peer("llama.cpp", replace(model, gguf=str(file))) as peer:
        assert peer.version == str(file)
