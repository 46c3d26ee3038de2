"""Gateway, service, engine and store, each a process of its own: what is answered is learned and kept."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from draftwood_memory.store.naming import tenant_key
from tests.memory.servers import Valkey, wait_for


def ask(gateway: str, tenant: str) -> tuple[str, int]:
    """The text of an answer, and how many of its tokens were drafted."""
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": "How do I cancel an order?"}],
        "max_tokens": 60,
        "temperature": 0,
        "draftwood": {"strategy": "trie", "tenant": tenant},
    }
    body, head = json.dumps(fields).encode(), {"content-type": "application/json"}
    request = urllib.request.Request(f"{gateway}/v1/chat/completions", body, head)
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    return answer["choices"][0]["message"]["content"], answer["metrics"]["speculative_decoding"]["accepted_tokens"]


def test_an_answer_is_kept_for_its_tenant_and_drafts_the_next_one(gateway: str, gateway_store: Valkey) -> None:
    text, _ = ask(gateway, "kept")
    wait_for(lambda: bool(gateway_store.client.exists(tenant_key("kept"))), "learning")
    assert not gateway_store.client.exists(tenant_key("other"))
    answers = [ask(gateway, "kept") for _ in range(10)]  # the first drafts of a service are tried now and then
    assert {again for again, _ in answers} == {text}
    assert max(accepted for _, accepted in answers) > 30
