"""vLLM on the same GPU, with its own drafts and with ours in it: tokens a second by the number of streams.

Each engine runs alone, in a process of its own, and answers what our engine answered in the section "streams".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from itertools import chain

from draftwood_benchmarks.gpu.sections import Plan, parts_of
from draftwood_benchmarks.harness.models import ChosenModel
from draftwood_benchmarks.harness.prompts import encode
from draftwood_benchmarks.harness.report import Rows, console
from draftwood_benchmarks.peers.process import LOAD_TIMEOUT, MODULES, Peer, PeerError, PeerModel, running_program
from draftwood_model_runner.loading.tokenizer import load_tokenizer
from draftwood_strategies.draft import Int32Array

DRAFTS = ("none", "draftwood", "suffix", "ngram-gpu", "ngram")
"""In their order: what a run that is cut short must bring back comes first."""
_WINDOW_SECONDS = 6.0
"""Of drafts without a memory, which answer their questions in turn."""


def inside_vllm(chosen: ChosenModel, questions: list[str], plan: Plan, dtype: str) -> Iterable[Rows]:
    """The rows so far, after each kind of drafts; the ratio is over vLLM without drafts. An engine that fails has a row
    with the reason.

    Args:
        dtype: "bfloat16", ...
    """
    tokenizer = load_tokenizer(chosen.path)
    prompts = [encode(tokenizer, question) for question in questions]
    rows: Rows = []
    model = PeerModel(chosen.path, dtype, threads=1, streams=max(plan.streams))
    for drafts in DRAFTS:
        console.print(f"vLLM with drafts {drafts}")
        try:
            with running_program(
                "vllm",
                MODULES["vllm"],
                LOAD_TIMEOUT,
                **asdict(replace(model, drafts=drafts)),
                device="cuda",
                max_model_len=plan.answer_context,
            ) as peer:
                rows += chain.from_iterable(_passes(peer, prompts, count, plan) for count in plan.streams)
        except PeerError as error:
            rows.append({"streams": 0, "drafts": drafts, "memory": "", "error": str(error)})
        off = {
            (row["streams"], row["memory"]): row["tokens_per_s"]
            for row in rows
            if row["drafts"] == "none" and row["streams"]
        }
        for row in rows:
            row["over_off"] = (
                row["tokens_per_s"] / off[key] if (key := (row["streams"], row["memory"])) in off else None
            )
        yield rows


def _passes(peer: Peer, prompts: list[Int32Array], count: int, plan: Plan) -> Rows:
    """Questions with an empty memory, and further ones after others were learned."""
    asked, others, further = parts_of(prompts, max(2 * count, plan.prompts), plan.others)
    rows, memory = [], f"{count} streams"
    for name, passed in (("cold", asked), ("warm", further)):
        if not passed:
            continue
        if name == "warm":
            peer.learn([one.tolist() for one in others], plan.tokens, memory)
        window = peer.load_test([one.tolist() for one in passed], plan.tokens, count, _WINDOW_SECONDS, memory)
        rows.append(
            {
                "streams": count,
                "drafts": peer.drafts,
                "memory": name,
                "tokens_per_s": window.tokens / window.seconds,
                "tokens_per_step": window.tokens / max(1, window.steps),
                "error": "",
            }
        )
    return rows
