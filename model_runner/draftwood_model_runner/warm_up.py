"""A first answer before the first request: compiles what is compiled at its first call. No torch."""

from __future__ import annotations

import logging

import numpy as np

from draftwood_model_runner.engine import Engine
from draftwood_model_runner.request import Request, SamplingParams, StopParams
from draftwood_model_runner.sampling.host.token_masks import forbid
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies import create, strategy_names

TENANT = "\x00warm-up"
"""No caller can have this name."""
_PROMPT_TOKENS, _NEW_TOKENS = 8, 8

_log = logging.getLogger(__name__)


def warm_up(engine: Engine) -> None:
    """Writes a few tokens with every registered strategy, all in one batch, and a few that are sampled.

    Without it the first request after an installation waits some seconds for compilers, and its drafter is blamed for
    it. Compiled functions are kept on disk, so that later starts only load them.
    """
    prompt = np.arange(_PROMPT_TOKENS, dtype=np.int32) % engine.model.vocab_size
    new = min(_NEW_TOKENS, engine.model.max_context - prompt.size)
    for name in strategy_names():
        try:
            strategy = create(name)
        except Exception:
            _log.exception("strategy %r cannot be created", name)
            continue
        request = Request(
            request_id=f"warm-up-{name}",
            prompt=prompt,
            stop=StopParams(max_tokens=new, ignore_eos=True),
            tenant=TENANT,
            strategy_name=name,
            max_draft_nodes=engine.config.max_draft_nodes,
        )
        engine.add(Sequence(request, strategy))
    sampled = Request(
        request_id="warm-up-sampled",
        prompt=prompt,
        stop=StopParams(max_tokens=1, ignore_eos=True),
        sampling=SamplingParams(temperature=0.7, top_k=20, top_p=0.9),
        tenant=TENANT,
    )
    engine.add(Sequence(sampled))
    forbid(bytes(4), np.zeros(1, np.float32))
    while engine.has_work:
        engine.step()
