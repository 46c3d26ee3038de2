"""Outputs of vLLM's steps, as plain values. Imports nothing of vLLM."""

from __future__ import annotations

from typing import NamedTuple

from draftwood_model_runner.output import TokenLogprobs


class CoreOutput(NamedTuple):
    """What one step wrote for a request.

    Attributes:
        ended: why vLLM ended the request: "stop", "length", ...; "" while it goes on.
        began_at: when it was scheduled first, on the clock of `time.perf_counter`; 0.0 if that was not in this step.
        cached_prompt_tokens: in the first output; else None.
        draft_tokens: that were verified for it in all, in the last output of a request with drafts; else None.
    """

    id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    ended: str
    began_at: float
    preemptions: int
    cached_prompt_tokens: int | None
    draft_tokens: int | None


class CoreStep(NamedTuple):
    """A step of vLLM.

    Attributes:
        kv_use: part of the KV cache that live requests hold, from 0 to 1; None if vLLM does not say.
    """

    outputs: list[CoreOutput]
    kv_use: float | None
