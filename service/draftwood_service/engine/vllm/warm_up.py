"""Made-up requests before the first real one, which would wait for what is compiled and allocated in first steps."""

from __future__ import annotations

import time

import numpy as np

from draftwood_model_runner.request import MAX_LOGPROBS, Request, SamplingParams, StopParams
from draftwood_model_runner.sequence import Sequence
from draftwood_service.engine.vllm.engine import VllmEngine

_TOKENS = 12
_LOOK_SECONDS = 0.002


def warm_up(engine: VllmEngine, vocab_size: int, *, drafts: bool) -> None:
    """Runs a greedy request, a sampled one and one with log-probabilities, as audits have; nothing is learned.

    Raises:
        EngineStoppedError: vLLM has died.
    """
    prompt = (np.arange(24) % min(3, vocab_size)).astype(np.int32)
    sampled = SamplingParams(temperature=1.0, top_p=0.9, top_k=10)
    for sampling in (SamplingParams(), sampled, SamplingParams(logprobs=MAX_LOGPROBS)):
        request = Request(
            request_id="warm-up",
            prompt=prompt,
            stop=StopParams(max_tokens=_TOKENS, ignore_eos=True),
            sampling=sampling,
            strategy_name="trie" if drafts else "none",
            max_draft_nodes=8 if drafts else 0,
            learns=False,
        )
        engine.add(Sequence(request))
    while not engine.idle:
        if engine.has_work:
            engine.step()
        else:
            time.sleep(_LOOK_SECONDS)
    engine.forget_counts()
