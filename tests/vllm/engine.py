"""vLLM engines in processes of their own, and the requests that tests send them."""

from __future__ import annotations

import os
import random
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from draftwood_benchmarks.peers.process import Peer
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = REPOSITORY / ".venv-peers" / "vllm" / "bin" / "python"
ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # Threads that wait for each other take many times as long beside other processes.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
_TIMEOUT = 900.0
ENGINE = {
    "model": str(BUNDLED_MODEL),
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "block_size": 32,
    "enable_prefix_caching": True,
    # Prompts are read in chunks, and requests preempt each other.
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 20,
}


class Engine:
    """A running engine."""

    def __init__(self, peer: Peer, log: Path) -> None:
        self._peer = peer
        self._log = log

    @property
    def log(self) -> str:
        """What it has logged so far."""
        return self._log.read_text(errors="replace")

    def run(self, *requests: dict[str, Any], aborts: Mapping[str, int] = MappingProxyType({})) -> dict[str, Any]:
        """Runs requests to their ends; see `driver` for the answer."""
        return self._peer.ask({"op": "run", "requests": list(requests), "aborts": dict(aborts)}, _TIMEOUT)

    def call(self, operation: str) -> dict[str, Any]:
        """Another operation of its driver, without arguments."""
        return self._peer.ask({"op": operation}, _TIMEOUT)

    def state(self) -> dict[str, Any]:
        """Of its drafts, once it rests."""
        return self.call("state")

    def drafts_fast(self, name: str, prompt: list[int], tenant: str, expected: list[list[int]]) -> bool:
        """Whether a tenant's request is written in many fewer steps than its 40 tokens. It rests before and after."""
        self.state()
        run = self.run(request(name, prompt, 0, 40, draftwood_tenant=tenant))
        self.state()
        assert run["outputs"][name] == expected
        return bool(run["steps"] < 30)


def environment_of(*more: Path, **variables: str) -> dict[str, str]:
    """Of a process in vLLM's environment: none of the tests' own settings, our code as it is here, and `variables`."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "TMPDIR")}
    ours = [*(REPOSITORY / one for one in ("strategies", "memory", "tenants", "plugins/vllm")), *more]
    return {**kept, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(map(str, ours)), **variables}


@contextmanager
def running_engine(
    drafts: bool = True, driver: str = "driver.py", options: Mapping[str, Any] = MappingProxyType({}), **variables: str
) -> Iterator[Engine]:
    """An engine with the bundled model in float32, with drafts or without, further arguments of `EngineArgs`, and
    variables of its environment."""
    with tempfile.TemporaryDirectory(prefix="draftwood-vllm-") as folder:
        log = Path(folder, "log")
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [str(PYTHON), str(Path(__file__).with_name(driver))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment_of(**variables),
            )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            peer = Peer("vllm", process, log)
            peer.ask({"op": "load", "engine": {**ENGINE, **options}, "drafts": drafts}, _TIMEOUT)
            yield Engine(peer, log)
            process.stdin.close()  # it sends what was learned, and ends
            process.wait(120)
        finally:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


def request(name: str, prompt: list[int], at: int = 0, tokens: int = 24, /, **params: Any) -> dict[str, Any]:
    """A request as the driver takes it. Parameters that begin with draftwood are those of the drafts."""
    extra = {key: value for key, value in params.items() if key.startswith("draftwood")}
    others = {key: value for key, value in params.items() if key not in extra}
    given = {"max_tokens": tokens, "ignore_eos": True, "extra_args": extra, **others}
    return {"id": name, "prompt": prompt, "at": at, "params": given}


def mixed(count: int, each_step: float, most: int) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Requests that join over time, so many in each step, with and without tenants and drafts, whose prompts begin
    alike and whose answers have fewer than `most` tokens; and when some of them are aborted."""
    random_ = random.Random(12)
    texts = [[random_.randrange(10, 4000) for _ in range(40)] for _ in range(4)]
    requests, aborts = list[dict[str, Any]](), dict[str, int]()
    for number in range(count):
        prompt = [1, *random_.choice(texts)[: random_.randrange(1, 40)]]
        prompt += [random_.randrange(10, 4000) for _ in range(random_.randrange(50))]
        options: dict[str, Any] = {"draftwood_tenant": random_.choice("ab")} if random_.random() < 0.8 else {}
        options |= {"draftwood": "off"} if random_.random() < 0.1 else {}
        at = int(number / each_step)
        requests.append(request(str(number), prompt, at, random_.randrange(1, most), **options))
        if number % 10 == 0:
            aborts[str(number)] = at + random_.randrange(1, 12)
    return requests, aborts


def with_parameters(name: str, **params: Any) -> list[dict[str, Any]]:
    """Two requests with parameters of vLLM."""
    return [request(f"{name} {i}", [1, *range(10, 40), 20 + i], 0, 24, **params) for i in range(2)]


def assert_same(expected: dict[str, Any], found: dict[str, Any], count: int) -> None:
    """Answers of two runs of `mixed` are the same, of those requests that neither aborted."""
    both = expected["outputs"].keys() & found["outputs"].keys()
    assert len(both) > count * 0.85
    assert {name for name in both if expected["outputs"][name] != found["outputs"][name]} == set()
