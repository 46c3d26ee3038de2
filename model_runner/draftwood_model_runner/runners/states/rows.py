"""The batch rows of a step, as recurrent layers see them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from draftwood_model_runner.runners.base import StepBatch
from draftwood_strategies.draft import Int32Array


@dataclass(frozen=True, eq=False, slots=True)
class StepRow:
    """A batch row.

    Attributes:
        context: committed tokens.
        chain: tokens before its tree, the root included.
        prompt: those of them that are of its prompt.
        nodes: tokens of the step in its tree.
        table: its pages.
    """

    context: int
    chain: range
    prompt: range
    nodes: range
    table: Int32Array

    def page_end(self, page_size: int) -> int:
        """The first token behind the last full page of the prompt, if the step ends that page, after which others may
        begin; -1 if not. Written tokens are computed one by one, and are no prompt of others."""
        ends = (self.context + len(self.prompt)) // page_size * page_size
        return self.chain.start + ends - self.context if ends > self.context else -1

    def page_ending_at(self, page_end: int, page_size: int) -> int:
        """The page that ends before a token of the step, see `page_end`."""
        return int(self.table[(self.context + page_end - self.chain.start) // page_size - 1])


def rows_of(batch: StepBatch) -> list[StepRow]:
    """What needs logits after the first token that does is a draft."""
    first_logits = np.searchsorted(batch.logit_rows, batch.cu_seqlens[:-1])
    rows = []
    for number in range(batch.rows):
        begin, end, context = (
            int(batch.cu_seqlens[number]),
            int(batch.cu_seqlens[number + 1]),
            int(batch.context_lens[number]),
        )
        at = int(first_logits[number])
        root = min(int(batch.logit_rows[at]) if at < batch.logit_rows.size else end - 1, end - 1)
        chain = range(begin, root + 1)
        prompt = len(chain) if batch.prompt_lens is None else max(0, int(batch.prompt_lens[number]) - context)
        table = batch.block_table[batch.cu_blocks[number] : batch.cu_blocks[number + 1]]
        rows.append(StepRow(context, chain, chain[:prompt], range(root + 1, end), table))
    return rows
