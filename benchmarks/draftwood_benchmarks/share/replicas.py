"""Two services with one store: acceptance length, measured by their clients."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from rich.console import Console

from draftwood_benchmarks.harness.prompts import read_questions
from draftwood_benchmarks.harness.report import progress
from draftwood_benchmarks.harness.server_process import server_process
from draftwood_benchmarks.share.memory import STRATEGY
from draftwood_client import ChatMessage, Client, Completion
from draftwood_memory.store.embedded import EmbeddedServer

_MAX_TOKENS = 200


def measure_replicas(store: EmbeddedServer, questions: int, warmup: int, out: Console) -> dict[str, Any]:
    """Acceptance lengths of a tenant's answers."""
    measured, others = read_questions()
    measured, others = measured[:questions], others[:warmup]
    flags = ("--dtype", "float32", "--threads", "1", "--strategy", STRATEGY)
    with ExitStack() as stack:
        first, second = (stack.enter_context(server_process(*flags, "--store", store.url)).target for _ in range(2))
        with Client(first, tenant="share") as a, Client(second, tenant="share") as b:
            cold = _acceptance([_ask(b, text, f"cold-{n}") for n, text in enumerate(progress(measured, "cold", out))])
            for text in progress(others, "one replica learns", out):
                _ask(a, text)
            _ask(b, others[0], max_tokens=1)  # a replica follows a tenant from its first request on
            time.sleep(1.0)
            # A stopped store shares nothing, so both replicas are measured on what they have learned by now.
            assert store.pid is not None
            os.kill(store.pid, signal.SIGSTOP)
            try:
                own = _acceptance([_ask(a, text) for text in progress(measured, "the replica that learned", out)])
                shared = _acceptance([_ask(b, text) for text in progress(measured, "the other replica", out)])
            finally:
                os.kill(store.pid, signal.SIGCONT)
    return {
        "acceptance_cold": cold,
        "acceptance_own": own,
        "acceptance_after_share": shared,
    }


def _ask(client: Client, text: str, tenant: str | None = None, **options: Any) -> Completion:
    options = {"max_tokens": _MAX_TOKENS, **options, **({} if tenant is None else {"tenant": tenant})}
    return client.generate([ChatMessage("user", text)], **options)


def _acceptance(completions: Sequence[Completion]) -> float:
    """Tokens per decoding step over all answers."""
    return sum(len(one.token_ids) for one in completions) / sum(one.drafting.steps for one in completions)
