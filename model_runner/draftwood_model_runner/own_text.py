"""What the model writes by itself, for no tenant, as a table of successors that all tenants draft from. No torch.

A tenant's first answers find its own table empty. So the model writes some texts without a question, sampled at
temperature 1 from the beginning of its chat template on (as Magpie, arXiv 2406.08464, makes training data), and its
most probable tokens at each of their positions are kept. That contains nothing that any tenant wrote.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from draftwood_model_runner.errors import InvalidValueError
from draftwood_model_runner.loading.loaded import LoadedModel
from draftwood_model_runner.loading.tokenizer import Tokenizer
from draftwood_model_runner.redecoding import PlainDecoding
from draftwood_model_runner.request import Request, SamplingParams, StopParams
from draftwood_model_runner.runners.base import Predictions, Runner
from draftwood_model_runner.sampling.token_sampler import TokenSampler
from draftwood_model_runner.scheduling.kv_pool import KVPool
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies.native import Int32Array
from draftwood_strategies.successors import COLUMNS, NOWHERE, ORDERS, WIDTH, SuccessorTable, has_layout

_TENANT = "\x00own text"
"""No caller can have this name."""
_TEXT_TOKENS = 160
"""Of each text, at most."""
_AT_ONCE = 8
"""Texts, at most: a request that arrives waits for the step that runs, and one of 8 tokens takes little more than one
of a single token (`draftwood bench step`)."""
_CONTEXTS = 1 << 16
"""Of the table, at most: rows of 44 bytes, 2.9 MB."""
_ROOT: Int32Array = np.array([-1], np.int32)

_log = logging.getLogger(__name__)


class OwnText(PlainDecoding):
    """Writes the texts, some at a time.

    Args:
        at_once: texts, at most.
        tokens: of all texts together, or a few more.
        cache: folder of the file that the table is read from, or else written to; None for none. A file that is
            damaged or cannot be written is logged.
        publish: takes `rows` each time that they change.

    Attributes:
        done: all is written, or was read from the file.
        rows: of the table, int32[r, COLUMNS], as read from the file, or as of the latest texts that were written.
            Nobody writes to them any more.
    """

    def __init__(
        self,
        model: LoadedModel,
        runner: Runner,
        pool: KVPool,
        at_once: int,
        tokens: int,
        cache: Path | None,
        publish: Callable[[Int32Array], None],
    ) -> None:
        super().__init__(runner, pool)
        self.rows: Int32Array = np.empty((0, COLUMNS), np.int32)
        self._model, self._publish = model, publish
        self._at_once = min(at_once, _AT_ONCE)
        self._file = None if cache is None else cache / f"own-text-{model.fingerprint}-{tokens}.npy"
        self._beginning = _beginning(model.tokenizer)
        self._length = min(_TEXT_TOKENS, tokens, model.max_context - self._beginning.size - 1)
        self._texts = -(-tokens // self._length) if self._length > 0 else 0
        self._begun = 0
        self._writing: dict[Sequence, TokenSampler] = {}
        self._table = SuccessorTable(_CONTEXTS)
        if self._file is not None and self._file.exists():
            try:
                self._show(_read(self._file, model.vocab_size))
                self.done = True
            except (OSError, ValueError, EOFError, MemoryError) as error:
                _log.warning("the model's own text in %s is not used: %s", self._file, error)

    def step(self) -> None:
        """One forward pass: of the latest token of each text, or of some that have no keys and values yet."""
        assert not self.done
        if not self._writing:
            self._begin()
        unfinished = [one for one in self._writing if len(one.output) < self._length]
        for sequence, predictions in self._forward(unfinished, WIDTH):
            self._write(sequence, predictions)
        if not all(len(one.output) == self._length for one in self._writing):
            return
        self._release(keep=False)
        self._writing = {}
        self.done = self._begun == self._texts
        self._show(self._table.rows if self.done else self._table.rows.copy())
        if self.done:
            self._keep()

    def _begin(self) -> None:
        """Begins the next texts."""
        model, end = self._model, min(self._begun + self._at_once, self._texts)
        for seed in range(self._begun, end):
            request = Request(
                request_id=f"own-text-{seed}",
                prompt=self._beginning,
                stop=StopParams(max_tokens=self._length, ignore_eos=True),
                sampling=SamplingParams(temperature=1.0, seed=seed),
                tenant=_TENANT,
                max_draft_nodes=0,
                learns=False,
            )
            sequence = Sequence(request)
            constraints = model.defaults.constraints
            self._writing[sequence] = TokenSampler(sequence, model.eos_token_ids, model.vocab_size, constraints)
        self._begun = end

    def _write(self, sequence: Sequence, predictions: Predictions) -> None:
        """The next token of a text, and what else may follow here."""
        assert predictions.top_tokens is not None
        tail: Int32Array = np.full(ORDERS, NOWHERE, np.int32)
        latest = sequence.tokens(max(sequence.length - ORDERS, 0), min(sequence.length, ORDERS))
        tail[ORDERS - latest.size :] = latest
        top_tokens = np.ascontiguousarray(predictions.top_tokens, np.int32)
        self._table.update(tail, tail[-1:], _ROOT, top_tokens)
        sampler = self._writing[sequence]
        token = sampler.sample(predictions.logits[0], [int(predictions.tokens[0])])
        sampler.accept(token)
        sequence.output.append(token)

    def _show(self, rows: Int32Array) -> None:
        self.rows = rows
        self._publish(rows)

    def _keep(self) -> None:
        """Writes the file as a whole."""
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._file.parent) as folder:
                part = Path(folder) / self._file.name
                np.save(part, self.rows)
                part.replace(self._file)
        except OSError as error:
            _log.warning("the model's own text was not kept: %s", error)


def _beginning(tokenizer: Tokenizer) -> Int32Array:
    """int32[b], b >= 1: what precedes a question in the chat template; else how the tokenizer begins a text."""
    if tokenizer.has_chat_template:
        try:
            one, other = (tokenizer.encode_chat([{"role": "user", "content": text}]) for text in ("a", "7"))
        except InvalidValueError:
            one = other = np.empty(0, np.int32)
        common = min(one.size, other.size)
        differs = np.flatnonzero(one[:common] != other[:common])
        if differs.size and differs[0]:
            return one[: differs[0]]
    return tokenizer.encode("\n")[:1] if tokenizer.encode("\n").size else np.zeros(1, np.int32)


def _read(file: Path, vocab_size: int) -> Int32Array:
    """The rows in a file.

    Raises:
        OSError, ValueError, EOFError, MemoryError: it cannot be read, or contains other things.
    """
    rows: Int32Array = np.load(file, allow_pickle=False)
    if not has_layout(rows):
        raise ValueError("it is no table of successors")
    if rows[:, :WIDTH].min() < 0 or rows[:, :WIDTH].max() >= vocab_size:
        raise ValueError("it has tokens that the model does not have")
    return rows
