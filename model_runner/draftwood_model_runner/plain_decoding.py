"""Decodes without drafts while the engine has no work: an answer again, to compare; texts of the model's own; answers
by which models that draft are tried.

A tenant's first answers find its own table of successors empty. So the model writes some texts without a question,
sampled at temperature 1 from the beginning of its chat template on (as Magpie, arXiv 2406.08464, makes training data).
Its most probable tokens at each of their positions are kept as a table that all tenants draft from. That contains
nothing that any tenant wrote.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from draftwood_model_runner.errors import InvalidValueError
from draftwood_model_runner.loading.loaded import LoadedModel
from draftwood_model_runner.loading.tokenizer import Tokenizer
from draftwood_model_runner.model_drafts import Computed, ModelDrafts
from draftwood_model_runner.output import ENDING_DIFFERS, Answer, Difference, OutputText
from draftwood_model_runner.request import Request, SamplingParams, StopParams
from draftwood_model_runner.runners.base import Predictions, Runner
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.sampling.token_sampler import TokenSampler
from draftwood_model_runner.scheduling.kv_pool import KVPool
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies import EMPTY_TREE
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.drafting import UNDRAFTED
from draftwood_strategies.successors import COLUMNS, NOWHERE, ORDERS, WIDTH, SuccessorTable, has_layout

PREFILL_TOKENS = 32
"""Prompt tokens of a step. A request that arrives waits for the step that runs, and one of 32 tokens takes little more
than one of a single token, since both read all weights (`draftwood bench step`)."""

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
_QUESTIONS = (
    "How does a bicycle stay upright?",
    "Where is my order? It should have arrived on Monday.",
    "Write a function that adds the numbers of a list.",
    "Name three large cities, and say what each is known for.",
)
"""Of a trial of models that draft."""
_READ_TOKENS = 32
"""Of each answer to them: as many as `ModelDrafts` compares at once."""
_log = logging.getLogger(__name__)


class PlainDecoding:
    """Decodes sequences without drafts. To be stepped only while the engine runs none; `pause` gives the KV pages up.

    Attributes:
        done: there is nothing left to do.
    """

    _reads_features: ClassVar[bool] = False

    def __init__(self, runner: Runner, pool: KVPool) -> None:
        self.done = False
        self._runner = runner
        self._pool = pool
        self._opened: list[Sequence] = []

    @property
    def with_pages(self) -> list[Sequence]:
        """What holds KV pages."""
        return [*self._opened]

    def pause(self) -> None:
        """Gives up the pages. What they hold is found again by the next step, or computed again if they were needed."""
        self._release(keep=True)

    def close(self) -> None:
        """Ends it, finished or not, and forgets its pages; idempotent."""
        self.done = True
        self._release(keep=False)

    def _forward(self, sequences: Iterable[Sequence], top_k: int) -> list[tuple[Sequence, Predictions]]:
        """One forward pass: of the latest token of each sequence that there are pages for, or of up to `PREFILL_TOKENS`
        of all of them that have no keys and values yet. Returns the predictions for those computed to their end."""
        if not (computed := [sequence for sequence in sequences if self._has_room(sequence)]):
            self.pause()  # each waits for pages that another one holds
            return []
        rows, limit = [], max(1, PREFILL_TOKENS // len(computed))
        for sequence in computed:
            left = sequence.length - sequence.committed
            chain = sequence.tokens(sequence.committed, min(left, limit))
            logits_from = chain.size - 1 if chain.size == left else chain.size
            pages, prompt = self._pool.pages(sequence), int(sequence.request.prompt.size)
            rows.append(BatchRow(pages, sequence.committed, chain, EMPTY_TREE, logits_from, prompt))
        batch = replace(lay_out(rows), reads_features=self._reads_features)
        logits, tokens, top, features = self._runner.step(batch, top_k)
        observed, first = [], 0
        for sequence, row in zip(computed, rows, strict=True):
            observed.append(Computed(sequence, sequence.committed, np.arange(first, first + row.chain.size)))
            sequence.committed, first = sequence.committed + row.chain.size, first + row.chain.size
        self._observe(observed, features)
        ends = [sequence for sequence in computed if sequence.committed == sequence.length]
        return [
            (sequence, Predictions(logits[i : i + 1], tokens[i : i + 1], None if top is None else top[i : i + 1]))
            for i, sequence in enumerate(ends)
        ]

    def _observe(self, computed: SequenceOf[Computed], features: Any) -> None:
        """What a pass computed, as for `ModelDrafts.observe`."""

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether there are pages for a sequence in this step."""
        pool = self._pool
        if sequence not in self._opened:
            if not pool.open(sequence):
                pool.leave(sequence)
                return False
            self._opened.append(sequence)
        if pool.is_short(sequence):
            pool.trim(sequence)
            if pool.shortfall([sequence]) > 0:
                return False
            pool.grow(sequence)
        return True

    def _release(self, keep: bool) -> None:
        for sequence in self._opened:
            self._pool.close(sequence, keep)
        self._opened = []


class Redecoding(PlainDecoding):
    """Decodes one answer again, and compares. It shares nothing with the answer but the model: no scheduler, no draft
    policy, and no page that a step with drafts wrote.

    Args:
        label: stands for the tenant in the prefix cache: no other sequence may have it.

    Attributes:
        done: all tokens were compared, or one differs.
        difference: the first one, if there is any.
    """

    def __init__(self, model: LoadedModel, runner: Runner, pool: KVPool, answer: Answer, label: str) -> None:
        super().__init__(runner, pool)
        request = replace(answer.request, tenant=label, drafting=UNDRAFTED, learns=False)
        self.sequence = Sequence(request, grammar=answer.grammar)
        self.difference: Difference | None = None
        self._answer = answer
        eos = model.eos_token_ids
        self._sampler = TokenSampler(self.sequence, eos, model.vocab_size, model.defaults.constraints)
        decoder = model.tokenizer.stream(request.include_special_tokens)
        self._text = OutputText(decoder, request.stop, eos)

    @property
    def waits(self) -> bool:
        """Always false: the caller makes each step."""
        return False

    def step(self) -> None:
        """One forward pass, see `PREFILL_TOKENS`."""
        assert not self.done
        predicted = self._forward([self.sequence], 0)
        assert self._opened, "a sequence runs"
        for _, predictions in predicted:
            self._compare(predictions)
        if self.done:
            self.close()

    def _compare(self, predictions: Predictions) -> None:
        output, written = self.sequence.output, self._answer.output
        logits = predictions.logits[0]
        token = self._sampler.sample(logits, [int(predictions.tokens[0])])
        if token != written[len(output)]:
            self._differ(len(output), self._sampler.margin(logits, written[len(output)]))
            return
        self._sampler.accept(token)
        output.append(token)
        _, finish = self._text.push(token)
        if finish is None and self._sampler.complete:
            _, finish = self._text.end()
        complete = len(output) == len(written)
        if finish is not None or complete:
            self.done = True
            if not complete or finish != self._answer.finish:
                self._differ(len(output), ENDING_DIFFERS)

    def _differ(self, position: int, margin: float) -> None:
        self.done = True
        self.difference = Difference(position, margin)


class OwnText(PlainDecoding):
    """Writes texts for no tenant, some at a time, and the table of their successors.

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
        self._writing: list[Sequence] = []
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
        unfinished = [sequence for sequence in self._writing if len(sequence.output) < self._length]
        for sequence, predictions in self._forward(unfinished, WIDTH):
            self._write(sequence, predictions)
        if not all(len(sequence.output) == self._length for sequence in self._writing):
            return
        self._release(keep=False)
        self._writing = []
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
                learns=False,
            )
            sequence = Sequence(request)
            constraints = model.defaults.constraints
            sequence.writer = TokenSampler(sequence, model.eos_token_ids, model.vocab_size, constraints)
            self._writing.append(sequence)
        self._begun = end

    def _write(self, sequence: Sequence, predictions: Predictions) -> None:
        """The next token of a text, and what else may follow here."""
        assert predictions.top_tokens is not None
        tail: Int32Array = np.full(ORDERS, NOWHERE, np.int32)
        latest = sequence.tokens(max(sequence.length - ORDERS, 0), min(sequence.length, ORDERS))
        tail[ORDERS - latest.size :] = latest
        top_tokens = np.ascontiguousarray(predictions.top_tokens, np.int32)
        self._table.update(tail, tail[-1:], _ROOT, top_tokens)
        sampler: TokenSampler = sequence.writer
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


class DrafterTrial(PlainDecoding):
    """Answers a few questions greedily, and lets models that draft read the answers.

    Args:
        at_once: answers, at most.
        drafters: by the names of their strategies.

    Attributes:
        shares: of the tokens of the answers that each model held most probable, by the same names; 1 of a model that
            read none.
    """

    _reads_features = True

    def __init__(
        self, model: LoadedModel, runner: Runner, pool: KVPool, at_once: int, drafters: Mapping[str, ModelDrafts]
    ) -> None:
        super().__init__(runner, pool)
        self._at_once = at_once
        self._drafters = drafters
        self._agreed: dict[str, list[bool]] = {name: [] for name in drafters}
        self._length = max(0, min(_READ_TOKENS, model.max_context - 2))
        stop, room = StopParams(max_tokens=self._length + 1, ignore_eos=True), model.max_context - self._length - 1
        self._answers = [
            Sequence(Request(request_id=f"trial-{i}", prompt=prompt[:room], stop=stop, tenant=_TENANT, learns=False))
            for i, prompt in enumerate(_asked(model.tokenizer, question) for question in _QUESTIONS)
        ]
        for sequence in self._answers:
            for drafter in drafters.values():
                drafter.open(sequence)

    @property
    def shares(self) -> dict[str, float]:
        return {name: sum(agreed) / len(agreed) if agreed else 1.0 for name, agreed in self._agreed.items()}

    def step(self) -> None:
        """One forward pass: of the latest token of each answer, or of a part of the questions."""
        assert not self.done
        for sequence, predictions in self._forward(self._answers[: self._at_once], 0):
            if len(sequence.output) < self._length:
                sequence.output.append(int(predictions.tokens[0]))
            else:
                self._read(sequence)
        if not self._answers:
            self.close()

    def _read(self, sequence: Sequence) -> None:
        """Lets the models read an answer, as they do where they are asked. What they hold probable after its last token
        is not known to be right."""
        self._answers.remove(sequence)
        one = np.ones(1, np.int32)
        for name, drafter in self._drafters.items():
            drafter.draft([sequence], one, one, np.zeros(1, np.float32))
            self._agreed[name] += drafter.agreed(sequence)[1]
            drafter.close(sequence)

    def _observe(self, computed: SequenceOf[Computed], features: Any) -> None:
        for drafter in self._drafters.values():
            drafter.observe(computed, features)


def _asked(tokenizer: Tokenizer, question: str) -> Int32Array:
    """int32[n], n >= 1."""
    if tokenizer.has_chat_template:
        with suppress(InvalidValueError):
            return tokenizer.encode_chat([{"role": "user", "content": question}])
    tokens = tokenizer.encode(question)
    return tokens if tokens.size else np.zeros(1, np.int32)


def _beginning(tokenizer: Tokenizer) -> Int32Array:
    """int32[b], b >= 1: what precedes a question in the chat template; else how the tokenizer begins a text."""
    if tokenizer.has_chat_template:
        try:
            first, second = (tokenizer.encode_chat([{"role": "user", "content": text}]) for text in ("a", "7"))
        except InvalidValueError:
            first = second = np.empty(0, np.int32)
        common = min(first.size, second.size)
        differs = np.flatnonzero(first[:common] != second[:common])
        if differs.size and differs[0]:
            return first[: differs[0]]
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
