"""Replays strategies that draft by a model, a head or a smaller one, over texts that its target wrote.

The target reads each recording once, as a prompt: what a head reads of it does not depend on drafts. Then strategies
draft and accept as they would beside the target, whose steps are not computed. A level of a draft counts as a fixed
share of a step, so that results do not depend on this machine, and show what another one would gain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np

from draftwood_benchmarks.replay import Recording, Replayed, accepted_length
from draftwood_model_runner.engine_config import EngineConfig
from draftwood_model_runner.errors import InvalidInputError
from draftwood_model_runner.execution import allocate
from draftwood_model_runner.loading.loaded import LoadedModel
from draftwood_model_runner.model_drafts import Computed, ModelDrafts
from draftwood_model_runner.request import Request, StopParams
from draftwood_model_runner.runners.base import StepBatch
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.sampling.most_probable import log_probabilities
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies import Strategy
from draftwood_strategies.arrays import Float32Array, Int32Array
from draftwood_strategies.base import AsksModels, DraftsForRow
from draftwood_strategies.draft import EMPTY_TREE
from draftwood_strategies.drafting import UNDRAFTED
from draftwood_strategies.model_drafts import ModelStrategy
from draftwood_strategies.registry import offered

_CHUNK = 512
"""Tokens that the target reads at once."""


class CountedDrafts(ModelDrafts):
    """Drafts of a model whose levels count as a fixed share of a step each.

    Attributes:
        share: of a level.
        levels: passes so far, one for each level of a draft, and those that only read.
    """

    share = 0.0
    levels = 0

    def level_share(self, rows: int | None = None) -> float:
        return self.share

    def _pass(self, batch: StepBatch) -> Any:
        self.levels += 1
        return super()._pass(batch)


class ModelReplay:
    """A target and the models beside it.

    Args:
        largest: draft nodes of a step at most.
    """

    def __init__(self, model: LoadedModel, largest: int) -> None:
        self._model, self._largest = model, largest
        config = EngineConfig(max_running=1, max_draft_nodes=largest, prefix_cache=False)
        self._runner, self._pool, _ = allocate(model, config)
        self._features: dict[bytes, Float32Array | None] = {}

    @contextmanager
    def strategies(self, share: float) -> Iterator[None]:
        """In it there are strategies that draft by the models, each level of which takes this share of a step."""
        runner = self._runner
        with ExitStack() as stack:
            for name, drafter in self._model.drafters.items():
                own = drafter.factory.runner(runner.pages * runner.page_size)
                drafts = CountedDrafts(own, log_probabilities, drafter.head)
                drafts.share = share
                stack.enter_context(offered(name, partial(ModelStrategy, drafts)))
            yield

    def replay(self, strategy: Strategy, recordings: Iterable[Recording], budget: int) -> Replayed:
        """As `replay.replay`, with the levels of each answer's drafts and without times.

        Raises:
            InvalidInputError: a recording does not fit the model.
        """
        steps, levels, tokens, drafted = list[int](), list[int](), 0, 0
        models: list[CountedDrafts] = [*strategy.models] if isinstance(strategy, AsksModels) else []
        for prompt, output in recordings:
            text = np.concatenate([prompt, output])
            if text.size > self._model.max_context or int(text.max()) >= self._model.vocab_size:
                problem = f"it has {text.size:,} tokens, up to id {text.max():,}: the model did not write it"
                raise InvalidInputError("FILE", f"{prompt[:4].tolist()}...", problem)
            longest = output.size + self._largest
            request = Request(request_id="", prompt=prompt, stop=StopParams(longest), drafting=UNDRAFTED)
            sequence = Sequence(request, strategy, in_flight=longest)
            self._pool.open(sequence)
            for model in models:
                model.open(sequence)
            before = sum(model.levels for model in models)
            sizes = self._follow(strategy, sequence, models, self._read(sequence, text), output, budget)
            steps.append(len(sizes))
            drafted += sum(sizes)
            levels.append(sum(model.levels for model in models) - before)
            tokens += output.size - 1
            for model in models:
                model.close(sequence)
            self._pool.close(sequence)
        return Replayed(steps, tokens, drafted, draft_us=None, levels=levels)

    def _follow(
        self,
        strategy: Strategy,
        sequence: Sequence,
        models: list[CountedDrafts],
        features: Float32Array | None,
        output: Int32Array,
        budget: int,
    ) -> list[int]:
        """Lets the strategy draft for a sequence until it has written `output`; returns the nodes of each step."""

        def write(tokens: Int32Array) -> None:
            committed, sequence.committed = sequence.committed, sequence.length + tokens.size - 1
            sequence.output += tokens.tolist()
            computed = Computed(sequence, committed, np.arange(committed, sequence.committed))
            for model in models:
                model.observe([computed], features)

        drafter = strategy.start(sequence.request.prompt)
        if isinstance(drafter, DraftsForRow):
            drafter.follow_row(sequence)
        write(output[:1])
        drafter.observe(output[:1], None)
        sizes = list[int]()
        while (at := len(sequence.output)) < output.size:
            tree = drafter.propose(budget)
            written = output[at : at + accepted_length(tree, output[at:]) + 1]
            write(written)
            drafter.observe(written, None)
            sizes.append(tree.tokens.size)
        drafter.close()
        return sizes

    def _read(self, sequence: Sequence, text: Int32Array) -> Float32Array | None:
        """What the target shows of a text, float32[n, f]; None if it has no head."""
        known = text.tobytes()
        if not any(drafter.head for drafter in self._model.drafters.values()):
            return None
        if known not in self._features:
            read = []
            for begin in range(0, text.size, _CHUNK):
                chain = text[begin : begin + _CHUNK]
                row = BatchRow(self._pool.pages(sequence), begin, chain, EMPTY_TREE, logits_from=chain.size - 1)
                features = self._runner.step(lay_out([row]), 0).features
                assert features is not None
                read.append(features.copy())
            self._features[known] = np.concatenate(read)
        return self._features[known]
