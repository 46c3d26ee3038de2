"""A runner on a CPU that chooses tokens and overlaps, as the one for GPUs does: for tests of the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from draftwood_model_runner.engine import Engine
from draftwood_model_runner.runners.base import Following, Predictions, Runner, StepBatch, compact
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.sampling.token_sampler import TokenSampler
from draftwood_model_runner.sampling.verification import AcceptedPath, predicted_paths, verify
from draftwood_strategies.arrays import Float32Array
from draftwood_strategies.base import StepFeedback, WrittenOnDevice
from draftwood_strategies.draft import EMPTY_TREE, DraftTree
from draftwood_strategies.successors import WIDTH


@dataclass(eq=False)
class Step:
    """Implements `StepInFlight`; the logits are gone when another step has begun.

    Attributes:
        on_device: of greedy sequences, the paths that the device accepted when the step began, by batch row.
    """

    runner: OverlappingRunner
    batch: StepBatch
    samplers: SequenceOf[TokenSampler | None]
    predictions: Predictions
    on_device: dict[int, AcceptedPath]
    error: Exception | None = None
    waited: bool = False
    scores: Float32Array = field(default_factory=lambda: np.zeros(0, np.float32))

    @property
    def can_overlap(self) -> bool:
        return all(sampler is None or row in self.on_device for row, sampler in enumerate(self.samplers))

    @property
    def feedback(self) -> StepFeedback:
        return self.batch.feedback(self.predictions.tokens, self.predictions.top_tokens)

    def written(self, tokens: torch.Tensor, counts: torch.Tensor) -> WrittenOnDevice:
        """With what its rows write, and its trees as they are on a device."""
        verified, [nodes] = self.feedback, np.indices(self.feedback.tokens.shape, np.int32)
        assert verified.top_tokens is not None
        begins = verified.offsets[np.searchsorted(verified.offsets, nodes, "right") - 1]
        parents = np.where(verified.parents >= 0, verified.parents + begins, -1).astype(np.int32)
        arrays = {"nodes": verified.tokens, "parents": parents, "offsets": verified.offsets}
        arrays["top_tokens"] = np.ascontiguousarray(verified.top_tokens, np.int32)
        return SimpleNamespace(
            tokens=tokens, counts=counts, **{name: torch.tensor(array) for name, array in arrays.items()}
        )

    def wait(self) -> tuple[StepFeedback, float]:
        assert not self.waited
        self.waited = True
        if self.error is not None:
            raise self.error
        return self.feedback, 0.001

    def verify(self, rows: SequenceOf[int]) -> list[AcceptedPath]:
        others = [row for row in rows if row not in self.on_device]
        found = verify(self.samplers, self.feedback, self.predictions.logits, others, 1)
        paths = dict(zip(others, found, strict=True))
        compact(self.runner.runner, self.batch, paths)
        return [paths[row] if row in paths else self.on_device[row] for row in rows]


@dataclass(eq=False)
class OverlappingRunner:
    """Chooses the most probable tokens; all else is left to the host.

    Attributes:
        begun: all steps so far.
        begin_errors: raised by the next calls of `begin`, None for none; wait_errors: likewise by `wait`.
    """

    runner: Runner
    begun: list[Step] = field(default_factory=list)
    begin_errors: list[Exception | None] = field(default_factory=list)
    wait_errors: list[Exception | None] = field(default_factory=list)
    follows: bool = True
    is_asynchronous: bool = True
    mixed_batches: bool = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def follow(
        self, earlier: Step, following: Following, batch: StepBatch, samplers: SequenceOf[TokenSampler | None]
    ) -> Step:
        """The step is laid out again behind what `earlier` wrote, as a device does; by a host that has computed it."""
        assert earlier.can_overlap
        assert not earlier.waited
        paths = [earlier.on_device[row] for row in range(earlier.batch.rows)]
        longest = max(len(path.token_ids) for path in paths)
        tokens = torch.zeros((len(paths), longest), dtype=torch.int32)
        for row, path in enumerate(paths):
            tokens[row, : len(path.token_ids)] = torch.tensor(path.token_ids)
        counts = torch.tensor([len(path.nodes) for path in paths], dtype=torch.int32)
        trees = None if following.draft is None else following.draft(earlier.written(tokens, counts))
        rows, scores = [], [np.zeros(0, np.float32)]
        for row, (source, number) in enumerate(zip(following.sources, following.drafted, strict=True)):
            path, size = paths[source], int(batch.cu_seqlens[row + 1] - batch.cu_seqlens[row])
            context = int(earlier.batch.context_lens[source]) + len(path.token_ids)
            context = min(context, int(batch.context_lens[row]))  # of a sequence that the other step ends
            tree = EMPTY_TREE
            if number >= 0:
                assert trees is not None
                nodes = int(trees.counts[number])
                assert nodes < size
                scores.append(trees.scores[number, :nodes].numpy().copy())
                tree = DraftTree.of(trees.tokens[number, :nodes].tolist(), trees.parents[number, :nodes].tolist())
            pages = batch.block_table[batch.cu_blocks[row] : batch.cu_blocks[row + 1]]
            assert context + size <= pages.size * self.runner.page_size
            rows.append(BatchRow(pages, context, np.array(path.token_ids[-1:], np.int32), tree, logits_from=0))
        step = self.begin(lay_out(rows), 0, samplers)
        step.scores = np.concatenate(scores)
        return step

    def begin(self, batch: StepBatch, top_k: int, samplers: SequenceOf[TokenSampler | None]) -> Step:
        if self.begin_errors and (error := self.begin_errors.pop(0)) is not None:
            raise error
        if self.begun:
            self.begun[-1].predictions.logits.fill_(math.nan)
        assert sum(not step.waited for step in self.begun[-2:]) <= 1
        found = self.runner.step(batch, max(top_k, WIDTH))
        predictions = Predictions(torch.as_tensor(found.logits).clone(), found.tokens, found.top_tokens)
        paths = predicted_paths(batch.feedback(found.tokens, None), found.tokens)
        greedy = [sampler is not None and sampler.follows_predictions for sampler in samplers]
        on_device = {row: path for row, path in enumerate(paths) if greedy[row]}
        compact(self.runner, batch, on_device)
        error = self.wait_errors.pop(0) if self.wait_errors else None
        self.begun.append(Step(self, batch, samplers, predictions, on_device, error))
        return self.begun[-1]


def overlap_halves(engine: Engine, whole: float = 0.0) -> OverlappingRunner:
    """Lets an engine's steps have half of its sequences in turn, and this share of them, by chance, all."""
    assert not engine._runner.is_asynchronous, "torch computes a step while it is called"
    runner, random = OverlappingRunner(engine._runner), np.random.default_rng(0)

    def microbatch(running: int) -> int | None:
        return None if random.random() < whole else -(-running // 2)

    patched: Any = engine
    patched._runner, patched._microbatches.microbatch = runner, microbatch
    return runner


def overlap_ahead(engine: Engine) -> OverlappingRunner:
    """Lets an engine's steps begin while the one before is in flight."""
    runner, patched = OverlappingRunner(engine._runner), cast(Any, engine)
    patched._runner = patched._following = runner
    return runner
