"""What surrounds the plug-in in `vllm serve`: processes, adapters, a strategy that hangs, a store that dies."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.memory.servers import Valkey, wait_for
from tests.vllm.server import Server, running_server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]
RANDOM = random.Random(31)
PROMPTS = [[1, *(RANDOM.randrange(10, 4000) for _ in range(20))] for _ in range(5)]
HANGS = """
import threading

class Hangs:
    top_k = 0
    def start(self, prompt): return Drafter()
    def learn(self, sequences): pass

class Drafter:
    calls = 0
    def propose(self, budget):
        self.calls += 1
        if self.calls > 6:
            threading.Event().wait()
        return Tree()
    def observe(self, accepted, feedback): pass
    def close(self): pass

class Tree:
    import numpy
    tokens = parents = numpy.zeros(0, numpy.int32)
    scores = numpy.zeros(0, numpy.float32)
"""


def adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter of random weights for the bundled model."""
    folder.mkdir()
    random_, weights = np.random.default_rng(seed), {}
    for layer in range(6):
        for name in ("q_proj", "v_proj"):
            of_layer = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("lora_A", (8, 256)), ("lora_B", (256, 8))):
                weights[f"{of_layer}.{part}.weight"] = (random_.standard_normal(shape) * 0.05).astype(np.float32)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def hanging(folder: Path) -> Path:
    """An installed package with a strategy that hangs in its seventh draft of a request; its warm-up has five."""
    information = folder / "hangs-1.0.dist-info"
    information.mkdir(parents=True)
    (folder / "hangs.py").write_text(HANGS)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: hangs\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[draftwood.strategies]\nhangs = hangs:Hangs\n")
    return folder


@pytest.fixture(scope="module")
def served(running: Valkey, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    folder = tmp_path_factory.mktemp("serving")
    modules = [f"{name}={adapter(folder / name, seed)}" for seed, name in enumerate(("first", "second"))]
    flags = ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", *modules]
    packages = (hanging(folder / "packages"),)
    with running_server(*flags, packages=packages, DRAFTWOOD_STORE=running.url, DRAFTWOOD_TENANT="acme") as served:
        yield served


def check_same(server: Server, model: str = "demo") -> list[list[int]]:
    """Answers without drafts, which those with drafts equal, cold and warm."""
    plain = [server.write(prompt, model, draftwood="off") for prompt in PROMPTS]
    for _ in ("cold", "warm"):
        assert [server.write(prompt, model) for prompt in PROMPTS] == plain
    return plain


def test_tensor_parallel_ranks_behind_two_api_servers_in_compiled_mode() -> None:
    """Both API servers show the same metrics: a scrape reaches either."""
    with running_server("--tensor-parallel-size", "2", "--api-server-count", "2", compiled=True) as (server, log):
        check_same(server)
        assert server.counted("draftwood_draft_accepted_tokens_total") > 50

        def alike() -> bool:
            [first, *others] = [server.metrics() for _ in range(8)]
            return all(other == first for other in others)

        wait_for(alike, "eight scrapes that show the same", 60.0)
        found, text = server.metrics(), log.read_text()
    assert text.count("drafting with trie") == 1
    assert found["draftwood_sequences_total", "", "trie"] == 10
    assert found["draftwood_sequences_total", "", "none"] == 5
    assert found["draftwood_memory_memories",] == 1


def test_adapters_write_the_same_with_drafts_and_share_their_tenants_memory(served: tuple[Server, Path]) -> None:
    server, _ = served
    answers = {model: check_same(server, model) for model in ("demo", "first", "second")}
    assert answers["demo"] != answers["first"] != answers["second"]
    wait_for(lambda: server.metric("draftwood_memory_learned_total") == 30, "all answers to be learned", 60.0)
    assert server.metric("draftwood_memory_memories") == 1


def test_a_strategy_that_hangs_costs_its_drafts_and_nothing_else(served: tuple[Server, Path]) -> None:
    server, log = served
    plain = server.write(PROMPTS[0], draftwood="off")
    began = time.monotonic()
    with ThreadPoolExecutor() as pool:
        beside = pool.submit(server.write, PROMPTS[0])
        assert server.write(PROMPTS[0], draftwood_strategy="hangs") == plain
        assert beside.result() == plain
    assert 4.0 < time.monotonic() - began < 60.0
    assert "strategy 'hangs' is switched off for request" in log.read_text()
    assert "propose raised CallTimeoutError: no answer within 5 s" in log.read_text()
    before = server.counted("draftwood_draft_accepted_tokens_total")
    assert server.metric("draftwood_draft_disabled_total", strategy="hangs") == 1
    assert server.write(PROMPTS[0]) == plain
    assert server.counted("draftwood_draft_accepted_tokens_total") > before  # drafts go on


def test_a_store_that_dies_during_requests_costs_them_nothing(served: tuple[Server, Path], running: Valkey) -> None:
    server, _ = served
    plain = [server.write(prompt, draftwood="off") for prompt in PROMPTS]
    began = time.monotonic()
    for prompt, expected in zip(PROMPTS, plain, strict=True):
        assert server.write(prompt) == expected
    alone = time.monotonic() - began
    assert server.counted("draftwood_store_up") == 1
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(server.write, prompt) for prompt in PROMPTS]
        running.kill()
        assert [one.result() for one in asked] == plain
    wait_for(lambda: server.metric("draftwood_store_up") == 0, "the store to be missed", 60.0)
    before, began = server.counted("draftwood_draft_accepted_tokens_total"), time.monotonic()
    assert [server.write(prompt) for prompt in PROMPTS] == plain
    assert time.monotonic() - began < 5 * alone + 2.0
    assert server.counted("draftwood_draft_accepted_tokens_total") > before + 50  # drafts go on
    running.start()
    wait_for(lambda: server.metric("draftwood_store_up") == 1, "the store to be back", 60.0)
    wait_for(lambda: server.metric("draftwood_store_pending") == 0, "what waited to be stored", 60.0)
