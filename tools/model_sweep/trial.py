"""Loads a small random model by a runner, and compares drafted greedy answers with those of transformers."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoTokenizer, GenerationConfig

from draftwood_model_runner.engine import Engine, EngineConfig
from draftwood_model_runner.errors import DraftwoodError
from draftwood_model_runner.loading.model import BUNDLED_MODEL, adopt
from draftwood_model_runner.loading.tokenizer import Tokenizer
from draftwood_model_runner.request import Request, StopParams
from draftwood_model_runner.runners.probing import path_with_wrong_siblings
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies import EMPTY_TREE, DraftTree, Feedback
from draftwood_strategies.draft import Int32Array
from tools.model_sweep.families import CONTEXT

RUNNERS = ("torch", "openvino")
PROMPTS = (5, 30, 38, 90, 170, 260)
"""Tokens of the prompts: below, at and far beyond the window of the small models."""
NEW_TOKENS = 24
_DRAFT = 5
"""Tokens of the answer in a draft."""
_JOIN_EVERY = 2
"""Steps between two sequences that join."""
_MIN_MARGIN = 2e-5
"""Of the largest logit: where the two most probable tokens are nearer, rounding may decide between them. The runners'
logits differ from those of transformers by 2e-6 at most."""


class _Answer(NamedTuple):
    """What `generate` writes; only its first tokens, before two are nearly as probable, say something."""

    tokens: list[int]
    clear: int


def try_runner(module: Any, runner: str) -> dict[str, Any]:
    """What is known of a family and a runner.

    The sequences join one after the other, and are drafted for with the true answer, with wrong siblings beside it,
    and with random trees.

    Returns:
        `result`: "trees", "chains" or "refused"; of the first two, `answers` and how many are `identical`, how many
        `tokens` were compared and how many of them are `distinct`, and `accepted` draft tokens; else the `reason`.
    """
    module = copy.deepcopy(module)
    module.generation_config, module.config.eos_token_id = GenerationConfig(), None
    vocab = int(module.config.get_text_config(decoder=True).vocab_size)
    prompts = _prompts(vocab)
    expected = [_greedy(module, prompt) for prompt in prompts]
    try:
        model = adopt(
            module, known_tokenizer(), name="small", runner=runner, max_context=CONTEXT - 8, defaults="greedy"
        )
    except DraftwoodError as error:
        return {"result": "refused", "reason": str(error)}
    engine = Engine(model, EngineConfig(max_draft_nodes=32, adaptive_budget=False, max_running=len(prompts)))
    batch = [
        Sequence(
            Request(request_id=str(i), prompt=prompt, stop=StopParams(NEW_TOKENS), max_draft_nodes=2 * _DRAFT),
            KnownAnswer(answer.tokens, vocab, i),
            None,
        )
        for i, (prompt, answer) in enumerate(zip(prompts, expected, strict=True))
    ]
    _run(engine, batch)
    pairs = [(of.output[: true.clear], true.tokens[: true.clear]) for of, true in zip(batch, expected, strict=True)]
    identical = sum(output == answer for output, answer in pairs)
    limits = model.factory.runner(CONTEXT).draft_limits
    trees = all(limits(position).branches for position in range(CONTEXT - 8))
    found: dict[str, Any] = {
        "result": "trees" if trees else "chains",
        "answers": len(batch),
        "identical": identical,
        "tokens": sum(len(answer) for _, answer in pairs),
        "distinct": len({token for _, answer in pairs for token in answer}),
        "accepted": sum(sequence.stats.accepted_tokens for sequence in batch),
    }
    if identical < len(batch):
        reason = f"{len(batch) - identical} of {len(batch)} answers differ from those of transformers"
        found |= {"result": "refused", "reason": reason}
    return found


def _run(engine: Engine, waiting: list[Sequence]) -> None:
    waiting = waiting[::-1]
    steps = 0
    while waiting or engine.has_work:
        if waiting and steps % _JOIN_EVERY == 0:
            engine.add(waiting.pop())
        engine.step()
        steps += 1


@cache
def known_tokenizer() -> Tokenizer:
    return Tokenizer(AutoTokenizer.from_pretrained(BUNDLED_MODEL))


class KnownAnswer:
    """A strategy, and its one drafter: in turn the next tokens of an answer, the same with a wrong one beside each, and
    trees of random tokens, some of which hold the answer."""

    top_k = 0

    def __init__(self, answer: list[int], vocab: int, seed: int) -> None:
        self._answer = answer
        self._vocab = vocab
        self._written = 0
        self._random = np.random.default_rng(seed)

    def start(self, prompt: Int32Array) -> KnownAnswer:
        return self

    def propose(self, budget: int) -> DraftTree:
        rest = self._answer[self._written : self._written + min(_DRAFT, budget // 2)]
        if not rest:
            return EMPTY_TREE
        path, kind = np.array(rest, np.int32), int(self._random.integers(4))
        if kind == 0:
            return DraftTree.of(path)
        if kind == 1:
            return path_with_wrong_siblings(path, self._vocab)
        return self._random_tree(path, budget, true=kind == 2)

    def _random_tree(self, path: Int32Array, budget: int, true: bool) -> DraftTree:
        """Nodes under random earlier ones; the first of them the path, if the tree is `true`."""
        size = min(2 * _DRAFT, budget)
        tokens = self._random.integers(0, self._vocab, size).astype(np.int32)
        parents = np.array([self._random.integers(-1, i) if i else -1 for i in range(size)], np.int32)
        if true:
            tokens[: path.size], parents[: path.size] = path, np.arange(-1, path.size - 1)
        seen: dict[tuple[int, int], bool] = {}
        for i in range(size):  # siblings have different tokens
            while (int(parents[i]), int(tokens[i])) in seen:
                tokens[i] = (tokens[i] + 1) % self._vocab
            seen[int(parents[i]), int(tokens[i])] = True
        return DraftTree.of(tokens, parents)

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        self._written += len(accepted)

    def close(self) -> None:
        pass


def _prompts(vocab: int) -> list[Any]:
    random = np.random.default_rng(0)
    return [random.integers(3, vocab, length, np.int32) for length in PROMPTS]


@torch.inference_mode()
def _greedy(module: Any, prompt: Any) -> _Answer:
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    written = module.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.stack(written.logits)[:, 0].float()
    best = logits.topk(2).values
    near = (best[:, 0] - best[:, 1] < _MIN_MARGIN * logits.abs().amax(-1)).tolist()
    tokens: list[int] = written.sequences[0, prompt.size :].tolist()
    return _Answer(tokens, near.index(True) if True in near else len(tokens))
