"""Asks a running vLLM questions and prints what its drafts saved: `python ask.py http://127.0.0.1:8001 [TENANT]`.

It needs nothing but Python. Each call asks the same questions, so that the second one shows what the first one taught.
"""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.request

QUESTIONS = [
    "How can I return a lamp that I bought last week?",
    "Where is my order? I ordered two lamps, and one has arrived.",
    "Can I change the address of an order that was sent?",
]
COUNTS = {"drafted": "num_draft_tokens", "accepted": "num_accepted_tokens", "drafts": "num_drafts"}
"""Of vLLM's own metrics."""


def counts(server: str) -> dict[str, float]:
    """What vLLM has counted of drafts up to now."""
    with urllib.request.urlopen(f"{server}/metrics") as answer:
        text = answer.read().decode()
    found = {}
    for key, name in COUNTS.items():
        match = re.search(rf"^vllm:spec_decode_{name}_total{{[^}}]*}} (\S+)$", text, re.MULTILINE)
        found[key] = float(match.group(1)) if match else 0.0
    return found


def answer_to(server: str, question: str, tenant: str) -> int:
    """Asks a question; returns the number of tokens of the answer."""
    body = {"prompt": f"Question: {question}\nAnswer:", "max_tokens": 80, "temperature": 0}
    body["vllm_xargs"] = {"draftwood_tenant": tenant}
    call = urllib.request.Request(
        f"{server}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(call) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


def main(server: str, tenant: str = "acme") -> None:
    before, began = counts(server), time.perf_counter()
    tokens = sum(answer_to(server, question, tenant) for question in QUESTIONS)
    seconds = time.perf_counter() - began
    done = {key: value - before[key] for key, value in counts(server).items()}
    print(f"{tokens} tokens in {seconds:.1f} s; {done['drafted']:.0f} drafted, {done['accepted']:.0f} of them accepted")


if __name__ == "__main__":
    main(*sys.argv[1:])
