"""Loads a small random model by a runner, and compares drafted greedy answers with those of transformers."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from draftwood_model_runner.engine import Engine, EngineConfig
from draftwood_model_runner.errors import DraftwoodError
from draftwood_model_runner.loading.model import BUNDLED_MODEL, adopt
from draftwood_model_runner.loading.tokenizer import Tokenizer
from draftwood_model_runner.request import Request, StopParams
from draftwood_model_runner.runners.probing import path_with_wrong_siblings
from draftwood_model_runner.runners.shrinking import CONTEXT
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies import EMPTY_TREE, DraftTree, Feedback
from draftwood_strategies.draft import Int32Array

RUNNERS = ("torch", "openvino")
PROMPTS = (5, 11, 30, 47, 64, 90)
"""Tokens of the prompts: below and far beyond the thresholds of `shrinking`."""
NEW_TOKENS = 40
_DRAFT = 5
"""Tokens of the answer in a draft."""


def try_runner(module: Any, runner: str) -> dict[str, Any]:
    """What the file holds of a family and a runner: `supported`, `identical` answers of how many, or the `reason`.

    Prompts are answered all at once, with the true answer and a wrong token beside each of its tokens drafted.
    """
    module = copy.deepcopy(module)
    module.generation_config.eos_token_id = module.config.eos_token_id = None
    vocab = int(module.config.get_text_config().vocab_size)
    prompts = _prompts(vocab)
    expected = [_greedy(module, prompt) for prompt in prompts]
    tokenizer = Tokenizer(AutoTokenizer.from_pretrained(BUNDLED_MODEL))
    try:
        model = adopt(module, tokenizer, name="small", runner=runner, max_context=CONTEXT, defaults="greedy")
    except DraftwoodError as error:
        return {"supported": False, "reason": str(error)}
    engine = Engine(model, EngineConfig(max_draft_nodes=32, adaptive_budget=False, max_running=len(prompts)))
    batch = [
        Sequence(
            Request(request_id=str(i), prompt=prompt, stop=StopParams(NEW_TOKENS), max_draft_nodes=2 * _DRAFT),
            _KnownAnswer(answer, vocab),
            None,
        )
        for i, (prompt, answer) in enumerate(zip(prompts, expected, strict=True))
    ]
    for sequence in batch:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
    identical = sum(sequence.output == answer for sequence, answer in zip(batch, expected, strict=True))
    accepted = sum(sequence.stats.accepted_tokens for sequence in batch)
    result: dict[str, Any] = {
        "supported": True,
        "answers": len(batch),
        "identical": identical,
        "accepted_tokens": accepted,
    }
    if identical < len(batch):
        reason = f"{len(batch) - identical} of {len(batch)} answers differ from those of transformers"
        result |= {"supported": False, "reason": reason}
    return result


class _KnownAnswer:
    """A strategy, and its one drafter: drafts the next tokens of an answer, each with a wrong one beside it."""

    top_k = 0

    def __init__(self, answer: list[int], vocab: int) -> None:
        self._answer = answer
        self._vocab = vocab
        self._written = 0

    def start(self, prompt: Int32Array) -> _KnownAnswer:
        return self

    def propose(self, budget: int) -> DraftTree:
        rest = self._answer[self._written : self._written + min(_DRAFT, budget // 2)]
        return path_with_wrong_siblings(np.array(rest, np.int32), self._vocab) if rest else EMPTY_TREE

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        self._written += len(accepted)

    def close(self) -> None:
        pass


def _prompts(vocab: int) -> list[Any]:
    random = np.random.default_rng(0)
    return [random.integers(3, vocab, length, np.int32) for length in PROMPTS]


@torch.inference_mode()
def _greedy(module: Any, prompt: Any) -> list[int]:
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    written = module.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
    )
    answer: list[int] = written[0, prompt.size :].tolist()
    return answer
