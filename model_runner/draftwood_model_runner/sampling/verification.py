"""Verification: finds the path of a draft tree that the model itself writes. The specification is in `metadata`."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from draftwood_model_runner.output import TokenLogprobs
from draftwood_model_runner.sampling.token_sampler import TokenSampler
from draftwood_strategies.arrays import Int32Array, Integer
from draftwood_strategies.base import StepFeedback
from draftwood_strategies.native import compiled
from draftwood_strategies.threads import LEAST_NUMBERS, in_threads, parts

ROOT_NODE = 0
"""The node of the last committed token; the nodes of the draft follow."""


@dataclass(eq=False, slots=True)
class AcceptedPath:
    """What the model writes along a draft tree. Not frozen: each step makes one for each sequence.

    Attributes:
        token_ids: tokens of the model: those of the accepted nodes, and the one after them.
        nodes: the accepted nodes, from the root down; node 0 is the first of the draft.
        logprobs: of each token, if the request asks for them.
        error: what failed after these tokens.
    """

    token_ids: list[int]
    nodes: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: Exception | None = None

    def cut(self, count: int) -> AcceptedPath:
        """Its first tokens, so many, if the output ends with them."""
        return AcceptedPath(self.token_ids[:count], self.nodes[:count], self.logprobs[:count])


def verify(
    samplers: SequenceOf[TokenSampler | None],
    feedback: StepFeedback,
    logits: Any,
    rows: SequenceOf[int],
    threads: int,
) -> list[AcceptedPath]:
    """The accepted paths of some batch rows, by the host. Their samplers accept the tokens.

    Args:
        samplers: of each batch row; those of `rows` are there.
        feedback: trees and predictions of all batch rows.
        logits: [R, vocab], at their nodes: a tensor or an array.
        threads: that look through many logits, at most.
    """
    predicted = predicted_paths(feedback, feedback.predictions)
    paths: dict[int, AcceptedPath] = {}
    walked = list[tuple[int, TokenSampler]]()
    for row in rows:
        sampler = samplers[row]
        assert sampler is not None
        if not sampler.follows_predictions:
            walked.append((row, sampler))
            continue
        paths[row] = path = predicted[row]
        if sampler.num_logprobs is not None:
            begin = int(feedback.offsets[row])
            at = [begin + node for node in (ROOT_NODE, *(node + 1 for node in path.nodes))]
            path.logprobs = [
                sampler.logprobs(logits[node], token) for node, token in zip(at, path.token_ids, strict=True)
            ]

    def walk_some(some: SequenceOf[tuple[int, TokenSampler]]) -> list[AcceptedPath]:
        return [walk_row(sampler, feedback, logits, row) for row, sampler in some]

    if walked:
        many = len(walked) * int(logits.shape[-1]) >= LEAST_NUMBERS
        groups = [walked[part.start : part.stop] for part in parts(len(walked), threads if many else 1)]
        walks = in_threads([partial(walk_some, group) for group in groups], threads)
        paths.update(zip((row for row, _ in walked), chain.from_iterable(walks), strict=True))
    return [paths[row] for row in rows]


def predicted_paths(feedback: StepFeedback, predicted: Int32Array) -> list[AcceptedPath]:
    """The path of each tree if the model's token after each node is known.

    Args:
        predicted: int32[R], that token.
    """
    nodes, written = np.empty((2, feedback.tokens.shape[0]), np.int32)
    ends = np.empty(feedback.offsets.shape[0] - 1, np.int32)
    follow_all(feedback.tokens, feedback.parents, feedback.offsets, predicted, nodes, written, ends)
    all_nodes, all_written, begin, paths = (nodes - 1).tolist(), written.tolist(), 0, []
    for end in ends.tolist():
        paths.append(AcceptedPath(all_written[begin:end], all_nodes[begin : end - 1]))
        begin = end
    return paths


def walk_row(sampler: TokenSampler, feedback: StepFeedback, logits: Any, row: int) -> AcceptedPath:
    """The path of one tree along the tokens that the sampler chooses, up to one that ends the output, one that a slow
    mask comes after, or an error."""
    nodes, top, path, node = feedback.of_row(row), feedback.top_tokens, AcceptedPath([], []), ROOT_NODE
    tokens, parents = feedback.tokens[nodes], feedback.parents[nodes]
    try:
        while True:
            index = nodes.start + node
            most_probable = feedback.predictions[index : index + 1] if top is None else top[index]
            token = sampler.sample_and_accept(logits[index], most_probable.tolist())
            path.token_ids.append(token)
            if sampler.num_logprobs is not None:
                path.logprobs.append(sampler.logprobs(logits[index], token))
            node = _child(tokens, parents, node, token)
            if node == ROOT_NODE or (sampler.slow and not sampler.ended):
                break  # the token after this one is chosen in another step
            path.nodes.append(node - 1)
            if sampler.ended:
                break
    except Exception as error:
        path.error = error
    return path


@compiled
def _child(tokens: Int32Array, parents: Int32Array, node: Integer, token: Integer) -> int:
    """The node with a token under another one; `ROOT_NODE` if there is none."""
    for child in range(node + 1, tokens.shape[0]):
        if parents[child] == node and tokens[child] == token:
            return child
    return ROOT_NODE


@compiled
def follow_all(
    tokens: Int32Array,
    parents: Int32Array,
    offsets: Int32Array,
    predicted: Int32Array,
    nodes: Int32Array,
    written: Int32Array,
    ends: Int32Array,
) -> None:
    """Follows all trees of a step along the tokens that are known to come after each node.

    A node comes after its parent, and has one child at most with a given token, so that one pass over a tree finds the
    path in it: trees need no index for it.

    Args:
        tokens, parents, offsets: as in `StepFeedback`.
        predicted: as many, the token after each node.
        nodes, written: as many, set to the node and token of each step of the paths, one path after the other; the last
            node of each is `ROOT_NODE`: its token was not drafted.
        ends: int32[s], set to the end of each path.
    """
    end = 0
    for s in range(ends.shape[0]):
        begin, at = offsets[s], 0
        for node in range(1, offsets[s + 1] - begin):
            if parents[begin + node] == at and tokens[begin + node] == predicted[begin + at]:
                nodes[end], written[end] = node, tokens[begin + node]
                end += 1
                at = node
        nodes[end], written[end] = ROOT_NODE, predicted[begin + at]
        end += 1
        ends[s] = end
