"""Decodes an answer again without drafts, one token a step, and compares: drafting must not change what is written.

It shares nothing with the answer but the model: no scheduler, no draft policy, and no page that a step with drafts
wrote. Knows nothing of torch.
"""

from __future__ import annotations

from dataclasses import replace

from draftwood_model_runner.answer import ENDING_DIFFERS, Answer, Difference
from draftwood_model_runner.loading.loaded import LoadedModel
from draftwood_model_runner.runners.base import Predictions, Runner
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.sampling.output_text import OutputText
from draftwood_model_runner.sampling.token_chooser import TokenChooser
from draftwood_model_runner.scheduling.kv_pool import KVPool
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies import EMPTY_TREE

PREFILL_TOKENS = 32
"""Prompt tokens of a step. A request that arrives waits for the step that runs, and one of 32 tokens takes little more
than one of a single token, since both read all weights (`draftwood bench step`)."""


class Redecoding:
    """Decodes one answer again. To be stepped only while no sequence runs; `pause` gives the KV pages up.

    Args:
        label: stands for the tenant in the prefix cache: no other sequence may have it.

    Attributes:
        done: all tokens were compared, or one differs.
        difference: the first one, if there is any.
    """

    def __init__(self, model: LoadedModel, runner: Runner, pool: KVPool, answer: Answer, label: str) -> None:
        request = replace(answer.request, tenant=label, strategy_name="none", max_draft_nodes=0, learns=False)
        self.sequence = Sequence(request, grammar=answer.grammar)
        self.done = False
        self.difference: Difference | None = None
        self._answer = answer
        self._runner = runner
        self._pool = pool
        self._has_pages = False
        eos = model.eos_token_ids
        self._chooser = TokenChooser(self.sequence, eos, model.vocab_size, model.defaults.constraints)
        decoder = model.tokenizer.stream(request.prompt, request.include_special_tokens)
        self._text = OutputText(decoder, request.stop, eos)

    @property
    def waits(self) -> bool:
        """Never: each step is the caller's."""
        return False

    @property
    def with_pages(self) -> list[Sequence]:
        """What holds KV pages."""
        return [self.sequence] if self._has_pages else []

    def step(self) -> None:
        """One forward pass: of the latest token, or of up to `PREFILL_TOKENS` that have no keys and values yet."""
        assert not self.done
        sequence, pool = self.sequence, self._pool
        if not self._has_pages:
            self._has_pages = pool.open(sequence)
            assert self._has_pages, "a sequence runs"
        if pool.is_short(sequence):
            pool.trim(sequence)
            pool.grow(sequence)
        count = min(sequence.length - sequence.committed, PREFILL_TOKENS)
        chain = sequence.tokens(sequence.committed, count)
        prompt = int(sequence.request.prompt.size)
        row = BatchRow(pool.pages(sequence), sequence.committed, chain, EMPTY_TREE, count - 1, prompt)
        predictions = self._runner.step(lay_out([row]), 0)
        sequence.committed += count
        if sequence.committed == sequence.length:
            self._compare(predictions)
        if self.done:
            self.close()

    def pause(self) -> None:
        """Gives up the pages. What they hold is found again by the next step, or computed again if they were needed."""
        self._release(keep=True)

    def close(self) -> None:
        """Ends it, finished or not, and forgets its pages; idempotent."""
        self.done = True
        self._release(keep=False)

    def _release(self, keep: bool) -> None:
        if self._has_pages:
            self._has_pages = False
            self._pool.close(self.sequence, keep)

    def _compare(self, predictions: Predictions) -> None:
        output, written = self.sequence.output, self._answer.output
        logits = predictions.logits[0]
        token = self._chooser.pick(logits, [int(predictions.tokens[0])])
        if token != written[len(output)]:
            self._differ(len(output), self._chooser.margin(logits, written[len(output)]))
            return
        self._chooser.remember(token)
        output.append(token)
        _, finish = self._text.push(token)
        complete = len(output) == len(written)
        if finish is not None or complete:
            self.done = True
            if not complete or finish != self._answer.finish:
                self._differ(len(output), ENDING_DIFFERS)

    def _differ(self, position: int, margin: float) -> None:
        self.done = True
        self.difference = Difference(position, margin)
