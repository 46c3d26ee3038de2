"""`vllm serve` behind a proxy that sets the tenant: `make test-vllm`."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.memory.servers import free_port
from tests.vllm.engine import ENGINE, PYTHON, environment_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
PROMPT = [1, *range(700, 730)]


class Server:
    """A running `vllm serve`."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self._base + path, timeout=60) as answer:
            return str(answer.read().decode())

    def complete(self, header: str | None, **fields: Any) -> int:
        """Asks for 40 tokens; returns how many of them were drafted and accepted."""
        before = self._accepted()
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True, **fields}
        headers = {"content-type": "application/json"} | ({} if header is None else {"x-draftwood-tenant": header})
        call = urllib.request.Request(f"{self._base}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(call, timeout=120) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 40
        time.sleep(0.3)  # its end reaches the worker
        return self._accepted() - before

    def _accepted(self) -> int:
        found = re.search(
            r"^vllm:spec_decode_num_accepted_tokens_total\{[^}]*\} (\S+)$", self.get("/metrics"), re.MULTILINE
        )
        return int(float(found.group(1))) if found else 0


@contextmanager
def running_server(*flags: str, **variables: str) -> Iterator[tuple[Server, Path]]:
    """`vllm serve` of the bundled model with the plug-in, and its log."""
    port = free_port()
    speculation = {"method": "custom_class", "model": "draftwood_vllm.Proposer", "num_speculative_tokens": 16}
    options = {"dtype": "float32", "max-model-len": 256, "max-num-seqs": 4, "port": port, "host": "127.0.0.1"}
    # Of `vllm serve`, whose command looks for the name of another build.
    program = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(ENGINE["model"])]
    command = [*program, "--enforce-eager", *flags]
    command += ["--served-model-name", "demo", "--speculative-config", json.dumps(speculation)]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    environment = environment_of(VLLM_CPU_KVCACHE_SPACE="1", **variables)
    with tempfile.TemporaryDirectory(prefix="draftwood-vllm-") as folder:
        log = Path(folder, "log")
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            server, deadline = Server(port), time.monotonic() + 400
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
            process.wait(60)
        finally:
            process.kill()
            process.wait()


def test_the_tenant_is_the_headers_whatever_a_caller_asks_for() -> None:
    with running_server("--middleware", "draftwood_vllm.TenantHeader") as (server, log):
        alone = server.complete("acme")
        taught = server.complete("acme")
        assert taught > alone + 6
        between = (alone + taught) / 2
        victim = {"vllm_xargs": {"draftwood_tenant": "acme"}}
        assert server.complete("mallory", **victim) < between
        assert server.complete(None, **victim) < between
        assert server.complete("acme", vllm_xargs={"draftwood_tenant": "mallory"}) > between
        assert server.complete("acme", vllm_xargs={"draftwood": "off"}) == 0
        with pytest.raises(urllib.error.HTTPError, match="415"):
            urllib.request.urlopen(
                urllib.request.Request(f"{server._base}/v1/completions", b"--x", {"content-type": "text/plain"})
            )
        ask = Path(__file__).resolve().parents[2] / "examples" / "vllm" / "ask.py"
        for expected in (r"\d+ tokens in \S+ s; \d+ drafted, \d+ of them accepted\n",) * 2:
            done = subprocess.run([str(PYTHON), str(ask), server._base], capture_output=True, text=True, check=True)
            assert re.fullmatch(expected, done.stdout)
        lines = [line for line in log.read_text().splitlines() if "drafting with trie" in line]
        assert len(lines) == 1
        assert 'requests that name no tenant are of tenant "default"' in lines[0]


def test_a_wrong_setting_costs_the_drafts_and_not_the_server() -> None:
    with running_server(DRAFTWOOD_MEMORY_TOKENS="many") as (server, log):
        assert server.complete(None) == 0
        assert server.complete(None) == 0
        problems = [line for line in log.read_text().splitlines() if "goes on without drafts of Draftwood" in line]
        assert len(problems) == 1
        assert problems[0].endswith("memory_tokens many: must be a whole number")
