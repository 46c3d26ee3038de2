"""`vllm serve` behind a proxy that sets the tenant, and with a wrong setting: `make test-vllm`."""

from __future__ import annotations

import re
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.vllm.engine import PYTHON
from tests.vllm.server import running_server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_the_tenant_is_the_headers_whatever_a_caller_asks_for() -> None:
    with running_server("--middleware", "draftwood_vllm.TenantHeader") as (server, log):
        alone = server.complete("acme")
        learned = server.complete("acme")
        assert learned > alone + 6
        between = (alone + learned) / 2
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
        time.sleep(1.5)  # its figures are a second old at most
        counted = {name: server.metric(f"draftwood_{name}_total") for name in ("draft_tokens", "draft_accepted_tokens")}
        vllms = re.findall(r"^vllm:spec_decode_num_(\w+)_tokens_total\{.*\} (\S+)$", server.get("/metrics"), re.M)
        assert counted == {
            {"draft": "draft_tokens", "accepted": "draft_accepted_tokens"}[name]: float(value) for name, value in vllms
        }
        assert "acme" not in "".join(line for line in server.get("/metrics").splitlines() if "draftwood" in line)
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
        assert server.metrics() == {("draftwood_drafting_up",): 0.0}
