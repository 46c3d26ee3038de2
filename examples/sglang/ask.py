"""Asks a running SGLang questions and prints what its drafts saved: `python ask.py http://127.0.0.1:8001 [TENANT]`.

It needs nothing but Python. Each call asks the same questions, so that the second one shows what the first one taught.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from typing import Any

QUESTIONS = [
    "How can I return a lamp that I bought last week?",
    "Where is my order? I ordered two lamps, and one has arrived.",
    "Can I change the address of an order that was sent?",
]


def answer_to(server: str, question: str, tenant: str, tokens: int = 80) -> dict[str, Any]:
    """SGLang's answer to a question, with what it says of it in `meta_info`."""
    params = {"max_new_tokens": tokens, "temperature": 0, "custom_params": {"draftwood_tenant": tenant}}
    body = {"text": f"Question: {question}\nAnswer:", "sampling_params": params}
    call = urllib.request.Request(f"{server}/generate", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(call) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def main(server: str, tenant: str = "acme") -> None:
    began = time.perf_counter()
    told = [answer_to(server, question, tenant)["meta_info"] for question in QUESTIONS]
    seconds = time.perf_counter() - began
    tokens = sum(one["completion_tokens"] for one in told)
    steps = sum(one.get("spec_verify_ct", one["completion_tokens"]) for one in told)
    print(f"{tokens} tokens in {seconds:.1f} s, {tokens / max(steps, 1):.2f} a step")


if __name__ == "__main__":
    main(*sys.argv[1:])
