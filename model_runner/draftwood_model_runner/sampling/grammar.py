"""Threads for what no step waits for: compiling grammars, and masks that take long."""

from __future__ import annotations

import os
import sys
import threading
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from typing import Any

import llguidance
import numpy as np

from draftwood_model_runner.request import GrammarKind
from draftwood_model_runner.sampling.grammar_compilation import Vocabulary, compiled, too_complex
from draftwood_model_runner.sampling.metadata import UNKNOWN_MASK, TokenMasks
from draftwood_model_runner.sampling.token_sampler import forbid
from draftwood_strategies.arrays import Float32Array, Int32Array

NICENESS = 10
"""Lower than the priority of the engine, as all requests wait for its steps."""

_SLOW_SECONDS = 0.001
"""A mask that takes more CPU time is computed beside the steps. Ordinary formats take 0.01 to 0.4 ms."""
_QUICK_MASKS = 16
"""After this many quick masks in a row, masks are computed within steps again."""


def background_threads(count: int, name: str) -> ThreadPoolExecutor:
    """Threads of low priority on Linux; other systems know no priorities of threads."""
    return ThreadPoolExecutor(count, thread_name_prefix=name, initializer=_lower_priority)


def _lower_priority() -> None:
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class GrammarCompiler:
    """Grammars over one tokenizer's vocabulary. Compiling is safe from several threads, and leaves others the
    interpreter's lock.

    Args:
        tokenizer: a fast transformers tokenizer.
        vocab_size: columns of the model's logits; may exceed the tokenizer's own.
        eos_token_ids: the tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()

    @cached_property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        return Vocabulary.of(self._source, self._vocab_size, self._eos_token_ids).load()

    def prepare(self) -> None:
        """Reads the vocabulary on another thread, so that the first grammar need not wait for it."""
        threading.Thread(target=self._read, name="draftwood-vocabulary", daemon=True).start()

    def _read(self) -> None:
        with self._lock, suppress(Exception):  # which the first grammar raises again
            _ = self._tokenizer

    def compile(self, kind: GrammarKind, text: str) -> GrammarState:
        """A grammar at its beginning. Takes as long and as much memory as the grammar needs, without a limit.

        Raises:
            InvalidValueError: the text is not a grammar of that kind, or too large a one; gives the reason.
        """
        with self._lock:
            tokenizer = self._tokenizer
        return GrammarState(compiled(tokenizer, kind, text), self._vocab_size)

    def check(self, kind: GrammarKind, text: str) -> None:
        """Raises what `compile` does."""
        self.compile(kind, text)


class GrammarState:
    """How far one sequence's output has come in its grammar.

    A mask is computed when it is needed, while the engine's step waits. If one took long, the next ones are computed
    beside the steps (`prepare`), until some in a row were quick.

    Attributes:
        pending: the next mask, which another thread computes or has computed. Until it is done nothing may be called.
    """

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._mask_bytes = -(-vocab_size // 32) * 4
        self._quick_to_come = 0
        self.pending: Future[bytes] | None = None

    @property
    def slow(self) -> bool:
        """The next mask may take long."""
        return self._quick_to_come > 0

    @property
    def complete(self) -> bool:
        """Nothing but an end may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def prepare(self, threads: Executor) -> None:
        """Begins to compute the next mask on another thread if it may take long."""
        if self.slow and self.pending is None:
            self.pending = threads.submit(self._compute)

    def allows(self, token: int) -> bool:
        """Whether the mask allows `token`. Takes microseconds; the mask takes up to milliseconds."""
        if self.pending is None:
            if forced := self._matcher.compute_ff_tokens():
                return bool(token == forced[0])
            if self._matcher.validate_tokens([token]):
                return True
            if not self._matcher.is_accepting():
                return False
            self.pending = Future()  # whether it is an end of sequence, only the mask tells
            self.pending.set_result(self._compute())
        return bool(self.pending.result()[token >> 3] >> (token & 7) & 1)

    def mask(self, scores: Float32Array) -> None:
        """Sets the scores, float32[vocab], of tokens that are not allowed next to -inf.

        Raises:
            InvalidValueError: the mask takes too much work.
        """
        pending, self.pending = self.pending, None
        packed = self._compute() if pending is None else pending.result()
        if self._matcher.is_error():
            raise too_complex(self._matcher)
        forbid(packed, scores)

    def masks(self, tokens: Int32Array, parents: Int32Array) -> TokenMasks:
        """What may follow the nodes of a draft tree. Finds masks for no longer than a step may wait.

        Nodes that are not allowed themselves have no mask, as no output comes to them. The state does not change.

        Args:
            tokens, parents: int32[n], the tree with its root, which is node 0.
        """
        until = time.thread_time() + _SLOW_SECONDS
        states: list[llguidance.LLMatcher | None] = [self._matcher.deep_copy()]
        rows, packed = np.full(tokens.size, UNKNOWN_MASK, np.int32), list[bytes]()
        for node in range(tokens.size):
            if time.thread_time() > until:
                break
            if node:
                states.append(_after(states[parents[node]], int(tokens[node])))
            if (state := states[node]) is None:
                continue
            mask = state.compute_bitmask()
            if not state.is_error():
                rows[node] = len(packed)
                packed.append(mask[: self._mask_bytes])
            if node == 0 and time.thread_time() > until:
                self._quick_to_come = _QUICK_MASKS
        bits = np.frombuffer(b"".join(packed), np.int32)
        return TokenMasks(rows, bits.reshape(-1, self._mask_bytes // 4))

    def _compute(self) -> bytes:
        started = time.thread_time()
        packed = self._matcher.compute_bitmask()
        slow = time.thread_time() - started > _SLOW_SECONDS
        self._quick_to_come = _QUICK_MASKS if slow else max(self._quick_to_come - 1, 0)
        return packed

    def copy(self) -> GrammarState:
        """An independent state after the same tokens, its next mask computed."""
        copy = self._matcher.deep_copy()
        copy.compute_bitmask()
        return GrammarState(copy, self._vocab_size)

    def accept(self, token: int) -> None:
        """The output goes on with `token`, which the mask allowed.

        Raises:
            InvalidValueError: what may come then takes too much work to find out.
        """
        self.pending = None
        if not self._matcher.consume_token(token):
            raise too_complex(self._matcher)

    def forced(self) -> list[int]:
        """The tokens that must come next: up to the first place at which several are allowed."""
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return tokens


def _after(state: llguidance.LLMatcher | None, token: int) -> llguidance.LLMatcher | None:
    """A state one token further; None if the token is not allowed."""
    if state is None or not state.validate_tokens([token]):
        return None
    after = state.deep_copy()
    return after if after.consume_token(token) else None
