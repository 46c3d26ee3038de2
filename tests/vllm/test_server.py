"""`vllm serve` behind a proxy that sets the tenant, and with a wrong setting: `make test-vllm`."""

from __future__ import annotations

import re
import subprocess
import urllib.error
from functools import partial

import pytest

from tests.memory.servers import wait_for
from tests.vllm.engine import PYTHON, REPOSITORY
from tests.vllm.server import Server, running_server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]


def test_the_tenant_is_the_headers_whatever_a_caller_asks_for() -> None:
    with running_server("--middleware", "draftwood_vllm.TenantHeader") as (server, log):
        alone = server.complete("acme")
        wait_for(lambda: server.metric("draftwood_memory_learned_total") == 1, "the answer to be learned", 60.0)
        learned = server.complete("acme")
        assert learned > alone + 6
        between = (alone + learned) / 2
        victim = {"vllm_xargs": {"draftwood_tenant": "acme"}}
        assert server.complete("mallory", **victim) < between
        assert server.complete(None, **victim) < between
        assert server.complete("acme", vllm_xargs={"draftwood_tenant": "mallory"}) > between
        assert server.complete("acme", vllm_xargs={"draftwood": "off"}) == 0
        with pytest.raises(urllib.error.HTTPError, match="415"):
            server.post(b"--x", {"content-type": "text/plain"})
        ask = REPOSITORY / "examples" / "vllm" / "ask.py"
        for _ in range(2):
            done = subprocess.run([str(PYTHON), str(ask), server.base], capture_output=True, text=True, check=True)
            assert re.fullmatch(r"\d+ tokens in \S+ s; \d+ drafted, \d+ of them accepted\n", done.stdout)
        wait_for(partial(same_counts, server), "vLLM's counts in our metrics", 60.0)
        assert "acme" not in "".join(line for line in server.get("/metrics").splitlines() if "draftwood" in line)
        lines = [line for line in log.read_text().splitlines() if "drafting with trie" in line]
        assert len(lines) == 1
        assert 'requests that name no tenant are of tenant "default"' in lines[0]


def same_counts(server: Server) -> bool:
    """Whether our metrics, which are a second old at most, count as many tokens as vLLM."""
    text = server.get("/metrics")
    vllms = dict(re.findall(r"^vllm:spec_decode_num_(\w+)_tokens_total\{.*\} (\S+)$", text, re.MULTILINE))
    names = {"draft": "draftwood_draft_tokens_total", "accepted": "draftwood_draft_accepted_tokens_total"}
    return {of_vllm: server.metric(ours) for of_vllm, ours in names.items()} == {
        name: float(value) for name, value in vllms.items()
    }


def test_a_wrong_setting_costs_the_drafts_and_not_the_server() -> None:
    with running_server(DRAFTWOOD_MEMORY_TOKENS="many") as (server, log):
        assert server.complete(None) == 0
        assert server.complete(None) == 0
        problems = [line for line in log.read_text().splitlines() if "goes on without drafts of Draftwood" in line]
        assert len(problems) == 1
        assert problems[0].endswith("memory_tokens many: must be a whole number")
        assert server.metrics() == {("draftwood_drafting_up",): 0.0}
