"""A model that costs nothing: each sequence writes a text that was made before.

Texts consist of phrases, a few of which come often and most rarely, with a replaced token now and then, so that a trie
finds about as much in them as in recorded answers. A step claims to take a while: otherwise drafting would not pay.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np

from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL
from draftwood_model_runner.loading.loaded import LoadedModel
from draftwood_model_runner.loading.tokenizer import load_tokenizer
from draftwood_model_runner.runners.base import NO_LIMITS, DraftLimits, KVCompaction, Predictions, StepBatch
from draftwood_model_runner.sampling.generation_defaults import GenerationDefaults
from draftwood_model_runner.sampling.token_sampler import TokenSampler
from draftwood_model_runner.sampling.verification import AcceptedPath, verify
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.base import StepFeedback

_VOCABULARY, _FIRST_TOKEN = 4096, 10
"""The bundled model's, whose tokenizer turns tokens into text, and the first one after the special tokens."""
_PHRASES, _SHORTEST, _LONGEST = 6000, 4, 16
_POPULARITY = 0.9
"""The exponent of the Zipf distribution of the phrases."""
_REPLACED = 0.06
"""Share of tokens that are replaced by random ones."""
_SUCCESSORS = 8
_PAGE_SIZE = 16
STEP_SECONDS = 0.01
"""That a step claims to take."""


def make_texts(count: int, tokens: int, seed: int) -> Int32Array:
    """int32[count, tokens] of texts, from the same phrases for any seed."""
    fixed, random = np.random.default_rng(0), np.random.default_rng(seed)
    offsets = fixed.zipf(1.2, (_PHRASES, _LONGEST)) % (_VOCABULARY - _FIRST_TOKEN)
    phrases = (offsets + _FIRST_TOKEN).astype(np.int32)
    lengths = fixed.integers(_SHORTEST, _LONGEST + 1, _PHRASES)
    popularity = 1.0 / np.arange(1, _PHRASES + 1) ** _POPULARITY
    popularity /= popularity.sum()
    texts = np.empty((count, tokens), np.int32)
    for text in texts:
        chosen = random.choice(_PHRASES, tokens // _SHORTEST + 1, p=popularity)
        text[:] = np.concatenate([phrases[phrase, : lengths[phrase]] for phrase in chosen])[:tokens]
    replaced = random.random(texts.shape) < _REPLACED
    texts[replaced] = random.integers(_FIRST_TOKEN, _VOCABULARY, int(replaced.sum()))
    return texts


@dataclass(frozen=True, slots=True)
class _CostlessStep:
    """Implements `StepInFlight`."""

    can_overlap: ClassVar[bool] = False
    feedback: StepFeedback
    samplers: SequenceOf[TokenSampler | None]

    def wait(self) -> tuple[StepFeedback, float]:
        return self.feedback, STEP_SECONDS

    def verify(self, rows: SequenceOf[int]) -> list[AcceptedPath]:
        return verify(self.samplers, self.feedback, None, rows, threads=1)


class CostlessRunner:
    """Implements `Runner`.

    Args:
        texts: int32[s, max_context], one for each sequence, which is known by the first token of its prompt: the first
            tokens must differ.

    """

    page_size = _PAGE_SIZE
    is_asynchronous = False
    mixed_batches = False

    def __init__(self, texts: Int32Array) -> None:
        self.max_context = texts.shape[1]
        self.pages = (texts.shape[0] + 1) * (self.max_context // _PAGE_SIZE + 1)
        self._texts = texts
        self._text_of_token = {int(text[0]): number for number, text in enumerate(texts)}
        self._text_of_page = np.zeros(self.pages, np.int64)
        shape = _VOCABULARY, _SUCCESSORS
        self._successors = np.random.default_rng(1).integers(_FIRST_TOKEN, _VOCABULARY, shape, dtype=np.int32)

    def draft_limits(self, position: int) -> DraftLimits:
        return NO_LIMITS

    def step(self, batch: StepBatch, top_k: int) -> Predictions:
        """Takes the time: the engine measures at its start what steps cost."""
        time.sleep(STEP_SECONDS)
        return self._predict(batch, top_k)

    def begin(self, batch: StepBatch, top_k: int, samplers: SequenceOf[TokenSampler | None]) -> _CostlessStep:
        predicted = self._predict(batch, top_k)
        return _CostlessStep(batch.feedback(predicted.tokens, predicted.top_tokens), samplers)

    def _predict(self, batch: StepBatch, top_k: int) -> Predictions:
        first_pages = batch.block_table[batch.cu_blocks[:-1]]
        for row in np.flatnonzero(batch.context_lens == 0).tolist():
            token = int(batch.tokens[batch.cu_seqlens[row]])
            self._text_of_page[first_pages[row]] = self._text_of_token.get(token, 0)
        texts = np.repeat(self._text_of_page[first_pages], np.diff(batch.cu_seqlens))[batch.logit_rows]
        tokens, positions = batch.tokens[batch.logit_rows], batch.positions[batch.logit_rows]
        top_tokens = self._successors[tokens]
        right = self._texts[texts, positions] == tokens
        top_tokens[right, 0] = self._texts[texts, np.minimum(positions + 1, self.max_context - 1)][right]
        predicted = np.ascontiguousarray(top_tokens[:, 0])
        return Predictions(None, predicted, np.ascontiguousarray(top_tokens[:, :top_k]) if top_k else None)

    def compact_kv(self, moves: KVCompaction) -> None:
        """There are no keys and values."""


def costless_model(runner: CostlessRunner) -> LoadedModel:
    """A model for an engine, computed by this runner: what an engine needs of one."""
    factory = SimpleNamespace(name="costless", exact=True, window=None, kv_bytes_per_token=0)
    factory.default_kv_tokens = lambda context, sequences: runner.pages * _PAGE_SIZE
    factory.runner = lambda kv_tokens, threads=None, sequences=None: runner
    model: Any = SimpleNamespace(
        factory=factory,
        max_context=runner.max_context,
        vocab_size=_VOCABULARY,
        tokenizer=load_tokenizer(BUNDLED_MODEL),
        device="cpu",
        weights="none",
        parameters=0,
        eos_token_ids=frozenset(),
        defaults=GenerationDefaults(),
        step_times_file=None,
        drafters={},
    )
    return cast(LoadedModel, model)
