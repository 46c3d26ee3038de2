"""A trial of draft trees: the logits of a model that a runner took over, against those of the model itself.

What differs between runners is how they take a model over, and how they compute a step of it (`Stepper`).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache

from draftwood_model_runner.errors import UnsupportedModelError
from draftwood_model_runner.runners.base import KVCompaction, StepBatch
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.runners.model_inputs import cache_argument_of, plain_positions
from draftwood_model_runner.runners.probing import difference, path_with_wrong_siblings, tolerance_of
from draftwood_strategies.draft import EMPTY_TREE, DraftTree, Int32Array, merged
from draftwood_strategies.tree_index import NO_NODE

PATH = 5
"""Tokens of the true path of a tree."""


class Stepper(NamedTuple):
    """A model that a runner took over, with KV memory of its own.

    Attributes:
        pages: of its KV memory.
        step: one forward pass; returns logits [R, vocab].
    """

    pages: int
    step: Callable[[StepBatch], torch.Tensor]


class Draft(NamedTuple):
    """A draft tree, and the path in it that a trial compares.

    Attributes:
        nodes: of the path.
    """

    tree: DraftTree
    nodes: SequenceOf[int]

    @property
    def rows(self) -> list[int]:
        """Rows of logits of the path, the token that the tree hangs from before it."""
        return [0, *(1 + node for node in self.nodes)]


class Trial(NamedTuple):
    """A sequence of random tokens, the same each time: a prompt, and a path of `PATH` tokens that is drafted.

    Attributes:
        tokens: int32[context + PATH].
        vocab: tokens that the model knows.
    """

    tokens: Int32Array
    vocab: int

    @classmethod
    def of(cls, module: Any, context: int, seed: int = 0) -> Trial:
        """For a model, as `random`."""
        return cls.random(int(module.config.get_text_config(decoder=True).vocab_size), context, seed)

    @classmethod
    def random(cls, vocab: int, context: int, seed: int = 0) -> Trial:
        """With a prompt of `context` tokens, at least 3."""
        return cls(np.random.default_rng(seed).integers(0, vocab, context + PATH, np.int32), vocab)

    @property
    def context(self) -> int:
        """Tokens of the prompt."""
        return self.tokens.size - PATH

    @property
    def path(self) -> Int32Array:
        """int32[PATH], what follows the prompt."""
        return self.tokens[self.context :]

    def ids(self, module: Any) -> torch.Tensor:
        """int64[1, context + PATH], on the device of the model."""
        return torch.from_numpy(self.tokens.astype(np.int64)).to(module.device)[None]

    def tree(self) -> Draft:
        """The path with a wrong sibling beside every node."""
        return Draft(path_with_wrong_siblings(self.path, self.vocab), range(0, 2 * PATH, 2))

    def chain(self) -> Draft:
        """The path alone."""
        return Draft(DraftTree.of(self.path), range(PATH))

    def drafted(self, model: Stepper, draft: Draft) -> torch.Tensor:
        """Logits [1 + PATH, vocab] from the last token of the prompt on, along the path of a draft. The
        token before that one is in the same batch row and needs no logits.

        The context is committed before in two steps, in pages that are no neighbours.
        """
        pages, half = self.pages(model), self.context // 2
        for start, end in ((0, half), (half, self.context - 2)):
            row = BatchRow(pages, start, self.tokens[start:end], EMPTY_TREE, logits_from=end - start - 1)
            model.step(lay_out([row]))
        return model.step(lay_out([self.drafted_row(pages, draft)]))[draft.rows]

    def generated(self, module: Any) -> torch.Tensor:
        """Logits [2 + PATH, vocab] computed as by `generate`, the prompt at once, then one token after the other with
        the cache that the model returned: from the last token of the prompt on, the last of them twice."""
        name, ids = cache_argument_of(module.__class__), self.ids(module)
        prompt = {"input_ids": ids[:, : self.context], "use_cache": True, **plain_positions(module, self.context)}
        output = module(**prompt)
        if (cache := output.get(name)) is None:  # the model returns none, as RecurrentGemma
            cache = DynamicCache(config=module.config.get_text_config())
            output = module(**prompt, **{name: cache})
        logits = [output.logits[0, -1:]]
        for at in range(self.context, ids.shape[1]):
            token = {"input_ids": ids[:, at : at + 1], "use_cache": True, **plain_positions(module, 1, at)}
            logits.append(module(**token, **{name: cache}).logits[0, -1:])
        return torch.cat([*logits, logits[-1]])

    def continued(
        self, model: Stepper, draft: Draft, page_size: int, accept: Callable[[KVCompaction, list[int]], None]
    ) -> torch.Tensor:
        """The same logits, along the path of a draft; the last once more from a step of its own, with the path before
        it accepted.

        Args:
            accept: called with the moves that accept nodes, and the nodes.
        """
        logits = self.drafted(model, draft).clone()
        pages, nodes = self.pages(model), [*draft.nodes[:-1]]
        slots = lay_out([self.drafted_row(pages, draft)]).slot_mapping(page_size)[2:].astype(np.int32)
        accept(KVCompaction(slots[nodes], slots[: len(nodes)], np.array([0, len(nodes)], np.int32)), nodes)
        last = BatchRow(
            pages, self.context + PATH - 1, self.path[-1:], EMPTY_TREE, logits_from=0, prompt_len=self.context
        )
        return torch.cat([logits, model.step(lay_out([last]))[:1]])

    def same_bits(self, model: Stepper) -> bool:
        """Whether logits have the same bits with and without drafts, in other batches and for other chunks of a prompt.

        Nodes of a draft tree, far from their rows in plain decoding and in pages that are no neighbours, after a prompt
        that was read in two steps, are compared with plain decoding on one thread.

        Args:
            model: its KV memory holds the context and the tree twice.
        """
        context, n, half = self.tokens[: self.context], self.context, self.context // 2
        neighbours, scattered = np.arange(model.pages // 2 * 2, dtype=np.int32).reshape(2, -1)
        scattered = scattered[::-1].copy()
        model.step(lay_out([BatchRow(scattered, 0, context[:half], EMPTY_TREE, logits_from=half - 1)]))
        whole = BatchRow(neighbours, 0, context[:-1], EMPTY_TREE, logits_from=n - 2)
        rest = BatchRow(scattered, half, context[half:-1], EMPTY_TREE, logits_from=n - 2 - half)
        model.step(lay_out([whole, rest]))
        crowd = DraftTree.of([*range(min(40, self.vocab))], [NO_NODE] * min(40, self.vocab))
        tree = merged([crowd, path_with_wrong_siblings(self.path, self.vocab)])
        drafted = model.step(lay_out([BatchRow(scattered, n - 1, context[-1:], tree, logits_from=0)]))
        rows = [0]
        for token in self.path.tolist():
            children = (tree.parents == rows[-1] - 1) & (tree.tokens == token)
            rows.append(1 + int(np.flatnonzero(children)[0]))
        drafted, plain = drafted[rows].clone(), []
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        for at in range(n - 1, n + PATH):
            one = BatchRow(neighbours, at, self.tokens[at : at + 1], EMPTY_TREE, logits_from=0)
            plain.append(model.step(lay_out([one])).clone())
        torch.set_num_threads(threads)
        return torch.equal(torch.cat(plain), drafted)

    def pages(self, model: Stepper) -> Int32Array:
        """int32[pages], the page table of the sequence: no two of its pages are neighbours in this order."""
        return np.arange(model.pages, dtype=np.int32)[::-1].copy()

    def drafted_row(self, pages: Int32Array, draft: Draft) -> BatchRow:
        """The last two tokens of the prompt, and the draft."""
        tokens = self.tokens[self.context - 2 : self.context]
        return BatchRow(pages, self.context - 2, tokens, draft.tree, logits_from=1)


def require_same(module: Any, logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises UnsupportedModelError if logits over a draft differ from those of a model by more than rounding."""
    differing = difference(logits, expected)
    if differing > tolerance_of(module):
        raise UnsupportedModelError(different(module, differing))


def different(module: Any, differing: float) -> str:
    """Why a model is refused whose logits over a draft differ by so much."""
    return (
        f"{type(module).__name__}: logits over a draft differ from the model's own by {differing:.1e} (at most"
        f" {tolerance_of(module):.0e} is rounding), so it computes something that depends on the other tokens of a"
        " step, has positions of its own, or keeps something of earlier tokens beside its cache"
    )
