"""Decodes an answer again without drafts, one token a step, and compares: drafting must not change what is written.
No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from draftwood_model_runner.answer import ENDING_DIFFERS, Answer, Difference
from draftwood_model_runner.loading.loaded import LoadedModel
from draftwood_model_runner.runners.base import Predictions, Runner
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.sampling.output_text import OutputText
from draftwood_model_runner.sampling.token_sampler import TokenSampler
from draftwood_model_runner.scheduling.kv_pool import KVPool
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies import EMPTY_TREE

PREFILL_TOKENS = 32
"""Prompt tokens of a step. A request that arrives waits for the step that runs, and one of 32 tokens takes little more
than one of a single token, since both read all weights (`draftwood bench step`)."""


class PlainDecoding:
    """Decodes sequences without drafts. To be stepped only while the engine runs none; `pause` gives the KV pages up.

    Attributes:
        done: there is nothing left to do.
    """

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
        if not (computed := [one for one in sequences if self._has_room(one)]):
            self.pause()  # each waits for pages that another one holds
            return []
        rows, most = [], max(1, PREFILL_TOKENS // len(computed))
        for one in computed:
            left = one.length - one.committed
            chain = one.tokens(one.committed, min(left, most))
            logits_from = chain.size - 1 if chain.size == left else chain.size
            prompt = int(one.request.prompt.size)
            rows.append(BatchRow(self._pool.pages(one), one.committed, chain, EMPTY_TREE, logits_from, prompt))
        logits, tokens, top = self._runner.step(lay_out(rows), top_k)
        for one, row in zip(computed, rows, strict=True):
            one.committed += row.chain.size
        ends = [one for one in computed if one.committed == one.length]
        return [
            (one, Predictions(logits[i : i + 1], tokens[i : i + 1], None if top is None else top[i : i + 1]))
            for i, one in enumerate(ends)
        ]

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
        request = replace(answer.request, tenant=label, strategy_name="none", max_draft_nodes=0, learns=False)
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
